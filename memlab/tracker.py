"""Which storages live, from when to when, and which operator made them.

With a `Tracker` entered one gets a record (`Storage`) for every storage that an operator makes, its birth and its
death, in order. It is a dispatch mode: it sees each operator once, below autograd, on real and on fake tensors alike.

Rule 1. A storage is known by its C++ address (`_cdata`) while it lives. The Python object of a storage lives as long
        as the C++ one, so a weak reference's callback fires exactly when the bytes go.
Rule 2. The record of a storage holds no tensor.
Rule 3. View operators make no storage and are passed through untouched: they are half of all calls.
Rule 4. With `marks` every operator leaves a marker among the allocator's events when it ends, and so does whatever
        happens outside an operator; marker k belongs to `mark_of[k]`.
Rule 5. Roles (parameter, gradient, ...) are given later, to records; the last word is `record.py`'s.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from . import allocator
from .clock import Clock
from .modes import LightMode


class Storage:
    """One storage's record. `operator` is the number of the operator that made it (-1: older than the recording)."""

    __slots__ = (
        "born",
        "cast_of",
        "device",
        "died",
        "dtype",
        "name",
        "nbytes",
        "number",
        "operator",
        "owner",
        "ptr",
        "role",
        "shape",
    )

    def __init__(self, number: int, nbytes: int, operator: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.number = number
        self.nbytes = nbytes
        self.operator = operator
        self.dtype = dtype
        self.shape = shape
        self.born = 0  # index into Tracker.log
        self.died: int | None = None
        self.ptr = 0
        self.device = ""
        self.role = ""
        self.name = ""  # of the parameter, buffer or batch entry
        self.owner = ""  # module that owns it
        self.cast_of: int | None = None  # number of the storage it is a cast of


class Tracker(LightMode):
    """Records every storage made inside. Read `storages`, `log` and `operators` afterwards.

    log:       births (+number + 1) and deaths (-(number + 1)) in order
    operators: (function, what `Clock.now` said, nanoseconds, length of the log at its end)
    """

    def __init__(self, clock: Clock, marks: bool = False) -> None:
        super().__init__()
        self.clock = clock
        self.marks = marks
        self.storages: list[Storage] = []
        self.log: list[int] = []
        self.operators: list[tuple[Any, tuple[int, str | int, str | None], int, int]] = []
        self.mark_of: list[tuple[str, int]] = []  # ("operator", number) | ("met" | "died", storage number)
        self._known: dict[int, tuple[weakref.ref[Any], Storage]] = {}

    # -- operators -----------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = _KINDS.get(func)
        if known is None:
            known = _KINDS[func] = _kind(func), _written_by(func)
        kind, writes = known
        written = _given(writes, args, kwargs) if writes else ()
        for tensor in written:  # it was there before: met afterwards, it would count as made by the operator
            self.meet_outside(tensor)
        out = func(*args, **kwargs) if kwargs else func(*args)
        if kind == _VIEW:
            return out
        number = len(self.operators)
        before = len(self.storages)
        if type(out) is torch.Tensor and out.layout is torch.strided and not out.is_nested:
            storage = out.untyped_storage()
            if storage._cdata not in self._known:
                self._meet(storage, out, number)
        else:
            for tensor in tensors_in(out):
                self.meet(tensor, number)
        if kind:
            self._special(kind, args, written, number, before)
        if self.marks:
            allocator.mark()
            self.mark_of.append(("operator", number))
        self.operators.append((func, self.clock.now(), time.perf_counter_ns(), len(self.log)))
        return out

    def _special(self, kind: int, args: Any, written: Iterable[torch.Tensor], number: int, before: int) -> None:
        if kind == _CAST:
            source = self.find(args[0])
            if source is not None:
                for storage in self.storages[before:]:
                    storage.cast_of = source.number
        elif kind == _RESIZE:
            for tensor in written:
                self._check_size(tensor, number)
        elif kind == _LIBRARY:
            for storage in self.storages[before:]:
                if storage.dtype == torch.uint8:
                    storage.role = "workspace"

    def _check_size(self, tensor: torch.Tensor, number: int) -> None:
        """A storage that was resized in place counts as released and made anew."""
        for part in parts(tensor):
            storage = part.untyped_storage()
            known = self._known.get(storage._cdata)
            if known is not None and known[1].nbytes != storage.nbytes():
                self._died(known[1])
                del self._known[storage._cdata]
                new = self._meet(storage, part, number)
                new.role, new.name, new.owner = known[1].role, known[1].name, known[1].owner

    # -- storages ------------------------------------------------------------------------------------------------

    def meet(self, tensor: torch.Tensor, number: int) -> list[Storage]:
        """The records of a tensor's storages (several for sparse and nested ones), made now if they are new."""
        found = []
        for part in parts(tensor):
            storage = part.untyped_storage()
            known = self._known.get(storage._cdata)
            record = self._meet(storage, part, number) if known is None else known[1]
            if record not in found:
                found.append(record)
        return found

    def meet_outside(self, tensor: torch.Tensor) -> list[Storage]:
        """The same for a tensor met outside any operator: older than the recording, unless the allocator's events
        show that it was made during it."""
        before = len(self.storages)
        found = self.meet(tensor, -1)
        for storage in self.storages[before:]:
            if self.marks:
                allocator.mark()
                self.mark_of.append(("met", storage.number))
        return found

    def made_outside(self, tensor: torch.Tensor) -> list[Storage]:
        """The same for a tensor just made by C++ code outside any operator."""
        found = self.meet_outside(tensor)
        for storage in found:
            storage.operator = max(storage.operator, len(self.operators))
        return found

    def find(self, tensor: Any) -> Storage | None:
        """The record of a tensor's storage, if it is known."""
        if not isinstance(tensor, torch.Tensor):
            return None
        for part in parts(tensor):
            known = self._known.get(part.untyped_storage()._cdata)
            if known is not None:
                return known[1]
        return None

    def _meet(self, storage: Any, tensor: torch.Tensor, number: int) -> Storage:
        record = Storage(len(self.storages), storage.nbytes(), number, tensor.dtype, tuple(tensor.shape))
        record.born = len(self.log)
        record.device = tensor.device.type
        self.storages.append(record)
        self.log.append(record.number + 1)
        if self.marks:
            record.ptr = storage.data_ptr()
        key = storage._cdata

        def gone(_: Any) -> None:
            known = self._known.get(key)
            if known is not None and known[1] is record:
                del self._known[key]
                self._died(record)
                if self.marks and record.operator < 0:  # the allocator does not report it
                    allocator.mark()
                    self.mark_of.append(("died", record.number))

        self._known[key] = weakref.ref(storage, gone), record
        return record

    def _died(self, record: Storage) -> None:
        record.died = len(self.log)
        self.log.append(-record.number - 1)

    def forget(self) -> None:
        """Drop every weak reference: nothing is recorded from here on."""
        self._known = {}


# -- kinds of operators ------------------------------------------------------------------------------------------------

_PLAIN, _VIEW, _CAST, _RESIZE, _LIBRARY = range(5)
_Writes = tuple[tuple[int, str], ...]  # position and name of each argument that an operator writes into
_KINDS: dict[Any, tuple[int, _Writes]] = {}


def _kind(func: Any) -> int:
    name = func.name().removeprefix("aten::").partition(".")[0]
    if name in ("_to_copy", "to"):
        return _CAST
    if name in ("resize_", "resize_as_", "set_", "_resize_output_") or any(a.is_out for a in func._schema.arguments):
        return _RESIZE
    if "mkldnn_rnn" in name or "cudnn" in name or "miopen" in name:
        return _LIBRARY
    # `lift_fresh` receives what `torch.tensor(...)` made in C++: a view of a storage not met before
    return _VIEW if (func.is_view and not name.startswith("lift")) or name.startswith("profiler::") else _PLAIN


def _written_by(func: Any) -> _Writes:
    arguments = enumerate(func._schema.arguments)
    return tuple((place, a.name) for place, a in arguments if a.alias_info is not None and a.alias_info.is_write)


def _given(writes: _Writes, args: Any, kwargs: Any) -> list[torch.Tensor]:
    return [
        tensor
        for place, name in writes
        for tensor in tensors_in(args[place] if place < len(args) else (kwargs or {}).get(name))
    ]


# -- tensors of every kind ---------------------------------------------------------------------------------------------

_functorch: Any = torch._C._functorch


def parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The strided tensors that hold a tensor's data: itself, what a transform of `torch.func` wraps, or the components
    of a sparse or nested tensor."""
    layout = tensor.layout
    if layout == torch.strided:
        if _functorch.is_functorch_wrapped_tensor(tensor):
            yield from parts(_functorch.get_unwrapped(tensor))
        elif hasattr(tensor, "__tensor_flatten__"):
            names, _ = tensor.__tensor_flatten__()
            for name in names:
                yield from parts(getattr(tensor, name))
        elif tensor.is_nested:
            yield from tensor.detach().unbind()
        else:
            yield tensor
    elif layout == torch.sparse_coo:
        yield tensor._indices()
        yield tensor._values()
    elif layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    elif layout == torch.jagged:
        yield tensor.values()
        yield tensor.offsets()  # type: ignore[attr-defined]


def tensors_in(value: Any) -> Iterable[torch.Tensor]:
    """The tensors in an operator's result or arguments."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
