"""What autograd saved for backward, read from the graph without touching it.

With `walk(roots)` one can list every tensor that the graph of `roots` holds, at the moment backward is entered: which
node holds it, under which slot, and whether it is kept, dropped for recomputation, or packed away by a hook.

Rule 1. Raw attributes only: `node._raw_saved_<slot>.data` neither unpacks nor recomputes. (`node._saved_<slot>`
        unpacks, and so recomputes a checkpoint.)
Rule 2. What a non-reentrant checkpoint keeps (its inputs, the generators' states, what a selective policy saved) is
        found through the closures of its unpack hook; nothing of it is called.
Rule 3. The walk keeps nothing: entries carry tensors, and the caller drops them.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.utils import checkpoint as torch_checkpoint

_PREFIX = "_raw_saved_"
_PYTHON_SLOT = "_raw_saved_tensors"
_HOLDER = getattr(torch_checkpoint, "_Holder", ())
_Metadata = dict[int, tuple[tuple[int, ...], str]]  # of each dropped tensor, by its holder
_OPAQUE = ("CopySlices", "CppFunction")  # types of nodes that hold tensors which Python cannot see


@dataclass(frozen=True, slots=True)
class Entry:
    """One saved tensor. `state` as in `SavedTensor`; `tensor` is None where nothing is held for it now."""

    node: str
    slot: str
    sequence: int
    tensor: torch.Tensor | None
    state: str = "kept"
    checkpoint_input: bool = False
    shape: tuple[int, ...] = ()
    dtype: str = ""


def without_tensor(entry: Entry) -> Entry:
    """The same entry as a plain record: shape and type instead of the tensor."""
    if entry.tensor is None:
        return entry
    shape = (entry.tensor.size(0),) if entry.tensor.is_nested else tuple(entry.tensor.shape)
    dtype = str(entry.tensor.dtype).removeprefix("torch.")
    return Entry(entry.node, entry.slot, entry.sequence, None, entry.state, entry.checkpoint_input, shape, dtype)


@dataclass(frozen=True, slots=True)
class Graph:
    """The saved tensors of a graph, its leaves (parameters and others that take a gradient), and the names of nodes
    whose saved tensors cannot be seen."""

    entries: tuple[Entry, ...]
    leaves: tuple[torch.Tensor, ...]
    opaque: tuple[str, ...]


def walk(roots: Iterable[torch.Tensor]) -> Graph:
    """Read the graph below `roots` (tensors with a `grad_fn`)."""
    entries: list[Entry] = []
    leaves: list[torch.Tensor] = []
    opaque: set[str] = set()
    frames: dict[int, _Metadata] = {}
    pending = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(pending)
    slots: dict[type, list[str]] = {}
    while pending:
        node = pending.pop()
        kind = type(node)
        names = slots.get(kind)
        if names is None:
            names = slots[kind] = sorted(n for base in kind.__mro__ for n in vars(base) if n.startswith(_PREFIX))
        if names:
            entries += _saved_by(node, names, frames)
        elif hasattr(node, "variable"):
            leaves.append(node.variable)
        if kind.__name__ in _OPAQUE:
            opaque.add(node.name().rpartition("::")[2])
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)
    entries.sort(key=lambda entry: entry.sequence)
    return Graph(tuple(entries), tuple(leaves), tuple(sorted(opaque)))


def _saved_by(node: Node, names: list[str], frames: dict[int, _Metadata]) -> Iterator[Entry]:
    name, sequence = node.name(), node._sequence_nr()
    for attribute in names:
        try:
            raw = getattr(node, attribute)
        except RuntimeError:  # already released by an earlier backward
            continue
        slot = f"{name}.{attribute.removeprefix(_PREFIX)}"
        if attribute == _PYTHON_SLOT:
            slot = f"{name}.saved"
        several = isinstance(raw, list | tuple)
        for index, item in enumerate(raw if several else [raw]):
            yield from _entry(name, f"{slot}[{index}]" if several else slot, sequence, item, frames)
    for attribute, value in getattr(node, "__dict__", {}).items():  # tensors a Python function put on its ctx
        for tensor in _tensors(value):
            yield Entry(name, f"{name}.{attribute}", sequence, tensor)


def _entry(node: str, slot: str, sequence: int, item: Any, frames: dict[int, _Metadata]) -> Iterator[Entry]:
    data = getattr(item, "data", None)
    if isinstance(data, torch.Tensor):
        yield Entry(node, slot, sequence, data)
    elif isinstance(data, _HOLDER):
        kept = list(_kept_by_checkpoint(item, sequence, frames))
        shape, dtype = frames.get(id(_frame(item)), {}).get(id(data), ((), ""))
        yield Entry(node, slot, sequence, None, "recomputed", shape=shape, dtype=dtype)
        yield from kept
    elif isinstance(data, tuple) and any(isinstance(part, torch.Tensor) for part in data):
        held = next(part for part in data if isinstance(part, torch.Tensor))
        device = next((part for part in data if isinstance(part, torch.device)), None)
        yield Entry(node, slot, sequence, held, "offloaded" if device is not None else "packed")
    elif data is not None:
        yield Entry(node, slot, sequence, None, "packed")


def _kept_by_checkpoint(item: Any, sequence: int, frames: dict[int, _Metadata]) -> Iterator[Entry]:
    """What the checkpointed region that dropped `item` holds until it is recomputed; nothing the second time."""
    frame = _frame(item)
    if frame is None or id(frame) in frames:
        return
    frames[id(frame)] = dict(_metadata(frame))
    recompute, arguments = frame.recompute_fn, _checkpoint_arguments(frame)
    for position, held in enumerate(_tensors([getattr(held, "data", held) for held in arguments])):
        yield Entry("Checkpoint", f"Checkpoint.input[{position}]", sequence, held, checkpoint_input=True)
    for state in [_cell(recompute, "fwd_cpu_state"), *(_cell(recompute, "fwd_device_states") or ())]:
        if isinstance(state, torch.Tensor):
            yield Entry("Checkpoint", "Checkpoint.rng_state", sequence, state, checkpoint_input=True)
    for tensor in _tensors(getattr(_cell(recompute, "recompute_context"), "storage", None)):
        yield Entry("Checkpoint", "Checkpoint.policy", sequence, tensor)
    for held in arguments:  # within another region, that one dropped them
        if isinstance(getattr(held, "data", None), _HOLDER):
            yield from _kept_by_checkpoint(held, sequence, frames)


def _frame(item: Any) -> Any:
    return _cell(getattr(item, "unpack_hook", None), "frame")


def _checkpoint_arguments(frame: Any) -> list[Any]:
    """Positional ones, then what is kept with the function: keywords, a partial's arguments, a closure."""
    saver = getattr(getattr(frame, "input_saver", None), "grad_fn", None)  # torch < 2.12
    return [
        *getattr(frame, "saved_args", ()),
        *(getattr(saver, _PYTHON_SLOT, None) or ()),
        getattr(saver, "get_args", None),
        _cell(frame.recompute_fn, "kwargs"),
        _cell(frame.recompute_fn, "fn"),
    ]


def _tensors(value: Any, depth: int = 8, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """The tensors in a nest of containers and of objects that hold them (a cache of keys and values, a selective
    policy's wrapper), in the arguments of a partial and in a closure. Modules are not looked into."""
    seen = set() if seen is None else seen
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and id(value) not in seen:
        seen.add(id(value))
        for inner in _inside(value):
            yield from _tensors(inner, depth - 1, seen)


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple | set):
        return list(value)
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, types.FunctionType):
        return [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
    if isinstance(value, nn.Module | type | types.ModuleType):
        return ()
    return list(getattr(value, "__dict__", {}).values())


def _cell(function: Any, name: str) -> Any:
    """The variable `name` in a function's closure, also one function further in; None where there is none."""
    for _ in range(2):
        code, closure = getattr(function, "__code__", None), getattr(function, "__closure__", None)
        if code is None or not closure:
            return None
        found = dict(zip(code.co_freevars, closure, strict=True))
        if name in found:
            try:
                return found[name].cell_contents
            except ValueError:  # an empty cell
                return None
        function = found["unpack_hook"].cell_contents if "unpack_hook" in found else None
    return None


def _metadata(frame: Any) -> Iterator[tuple[int, tuple[tuple[int, ...], str]]]:
    """Shape and type of each tensor that a region dropped, from the checkpoint's own determinism check."""
    for reference, metadata in zip(getattr(frame, "weak_holders", ()), getattr(frame, "x_metadatas", ()), strict=False):
        holder = reference()
        if holder is not None and isinstance(metadata, dict):
            yield id(holder), (tuple(metadata["shape"]), str(metadata["dtype"]).removeprefix("torch."))


@contextlib.contextmanager
def hooks() -> Iterator[list[torch.Tensor]]:
    """The same ledger seen through saved-tensor hooks: yields a list that fills with the tensors autograd saves.

    The slower cross-check of `walk`, and what a lesson builds by hand. Safe where naive hooks are not: it packs
    `(detached tensor, version)`, so no cycle keeps the graph alive, and it compares versions on unpacking, so an
    illegal in-place edit is still an error. Inside a checkpointed region it sees nothing (hooks there would cancel
    the checkpoint). Tensors in the list stay alive until the list is dropped.
    """
    packed: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        held = tensor.detach()
        packed.append(held)
        return held, tensor._version

    def unpack(pair: tuple[torch.Tensor, int]) -> torch.Tensor:
        tensor, version = pair
        if tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"saved tensor of shape {tuple(tensor.shape)} is at version {tensor._version}; expected {version}"
            )
        return tensor

    with saved_tensors_hooks(pack, unpack):
        yield packed
