"""Everything that a training step can change, put back in place.

    state = snapshot(model, batch, loss_fn, optimizer)
    ...                                                 # any number of steps
    state.restore()                                     # as often as wanted

Rules:

1. Identities stay. All that `walk` reaches is restored itself: tensors (bytes, layout, requires_grad, `.grad`), lists,
   dicts, sets, deques, attributes, closure cells, and the globals that a function of the user's names.
2. Bytes are kept by *storage*, once, in host memory, and the storage itself by a weak reference. So tied tensors and
   views stay tied, and a snapshot holds no device memory: where the step let a storage go, a new one takes its place.
3. What the step added goes (entries, attributes, activations appended to a list); what it removed or rebound returns.
4. Random streams are state: torch on the CPU and on each CUDA device in use, numpy's and Python's global ones, and
   generators that the roots hold. Nothing here draws from any.
5. Hooks on modules and an instance's own `forward` belong to instruments: they are left as they are. Restore a state
   where it was taken: one taken outside `strategy.applied(step)` would undo there what the strategy installed.
"""

from __future__ import annotations

import collections
import functools
import random
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import walk as walking
from .modes import unseen
from .walk import attributes, class_data, contents, data_globals, is_instrument, own_classes, slots, stream, walk

Undo = Callable[[], object]

_MISSING = object()


def snapshot(*roots: Any) -> State:
    """Remember everything reachable from `roots` that a step could change, and the random streams."""
    return State(roots)


class State:
    """What `snapshot` remembers; `complete` is False where more than `MOST_OBJECTS` objects were reachable."""

    @unseen()
    def __init__(self, roots: Iterable[Any]) -> None:
        self._storages: dict[int, _Bytes] = {}
        self._undo: list[Undo] = []
        self._classes: set[type] = set()
        with torch._C.DisableTorchFunctionSubclass():
            objects = list(walk(*roots))
            for found in objects:
                self._undo += self._mementos(found)
        self.complete = len(objects) < walking.MOST_OBJECTS
        self._undo += _random_streams()

    @unseen()
    def restore(self) -> None:
        """Put everything back, in place."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            alive = [memory.put_back() for memory in self._storages.values()]  # rebuilt ones need a holder meanwhile
            for undo in self._undo:
                undo()
            del alive

    def _mementos(self, found: Any) -> Iterator[Undo]:
        if isinstance(found, torch.Tensor):
            yield from self._tensor(found)
        elif isinstance(found, dict):
            yield functools.partial(_put_back_items, found, list(found.items()))
        elif isinstance(found, list | collections.deque):
            yield functools.partial(_put_back_sequence, found, list(found))
        elif isinstance(found, set):
            yield functools.partial(_put_back_set, found, list(found))
        elif isinstance(found, types.CellType):
            yield functools.partial(_put_back_cell, found, contents(found))
        elif isinstance(found, types.FunctionType):
            yield functools.partial(_put_back_globals, found.__globals__, data_globals(found))
        else:
            yield from _generator(found)
        for kind in own_classes(type(found)):
            if kind not in self._classes:
                self._classes.add(kind)
                yield functools.partial(_put_back_class, kind, class_data(kind))
        own = attributes(found)
        if own is not None:
            mine = {name: value for name, value in own.items() if not is_instrument(found, name)}
            yield functools.partial(_put_back_attributes, found, own, mine)
        if held := slots(found):
            yield functools.partial(_put_back_slots, found, held)

    def _tensor(self, tensor: torch.Tensor) -> Iterator[Undo]:
        if is_lazy(tensor):  # it has neither bytes nor a shape; what its first forward makes of it stays
            return
        if tensor.is_leaf:
            yield functools.partial(_put_back_leaf, tensor)
        if is_traceable_wrapper_subclass(tensor) or tensor.layout is torch._mkldnn:  # type: ignore[attr-defined]
            pass  # a wrapper's inner tensors are among its attributes; oneDNN's are opaque and never written in place
        elif tensor.layout is not torch.strided:
            yield functools.partial(tensor.copy_, tensor.detach().to("cpu", copy=True))
        else:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._storages:
                self._storages[storage._cdata] = _Bytes(storage)
            if not tensor.is_nested:
                memory = self._storages[storage._cdata]
                yield functools.partial(_put_back_layout, tensor, memory, _layout(tensor))
        if tensor.is_leaf:
            yield functools.partial(_put_back_grad, tensor, tensor.requires_grad, tensor.grad)


class _Bytes:
    """One storage's bytes on the host, and the way back into it, or into a new one where it is gone (rule 2)."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = weakref.ref(storage)
        self.size = storage.nbytes()
        self.device = storage.device
        self.host = None if self.device.type == "meta" else _bytes(storage).to("cpu", copy=True)

    def put_back(self) -> torch.UntypedStorage:
        storage = self.storage()
        if storage is None:
            storage = torch.UntypedStorage(self.size, device=self.device)
            self.storage = weakref.ref(storage)
        elif storage.nbytes() != self.size:
            storage.resize_(self.size)
        if self.host is not None:
            there = _bytes(storage)
            # Memory mapped read-only must not be written; on the host, looking first is cheap.
            if there.device.type != "cpu" or not torch.equal(there, self.host):
                there.copy_(self.host)
        return storage


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


# ------------------------------------------------------------------------------------------------------- putting back


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.storage_offset(), tuple(tensor.size()), tuple(tensor.stride())


def _put_back_leaf(tensor: torch.Tensor) -> None:
    if not tensor.is_leaf:  # an in-place operation made it part of a graph
        tensor.detach_()


def _put_back_grad(tensor: torch.Tensor, requires_grad: bool, grad: torch.Tensor | None) -> None:
    if tensor.grad is not grad:
        tensor.grad = grad
    if tensor.requires_grad != requires_grad:
        tensor.requires_grad_(requires_grad)


def _put_back_layout(tensor: torch.Tensor, memory: _Bytes, layout: tuple[Any, ...]) -> None:
    storage = memory.storage()
    if storage is None or memory.host is None:
        return
    if tensor.untyped_storage()._cdata != storage._cdata or _layout(tensor) != layout:
        dtype, offset, size, stride = layout
        empty = torch.empty(0, dtype=dtype, device=memory.device)
        tensor.data = empty.set_(storage, offset, size, stride)


def _put_back_items(mapping: dict[Any, Any], items: list[tuple[Any, Any]]) -> None:
    now = list(mapping.items())
    if len(now) == len(items) and all(a is c and b is d for (a, b), (c, d) in zip(now, items, strict=True)):
        return
    base = collections.OrderedDict if isinstance(mapping, collections.OrderedDict) else dict
    base.clear(mapping)
    for key, value in items:
        base.__setitem__(mapping, key, value)


def _put_back_sequence(sequence: Any, items: list[Any]) -> None:
    if len(sequence) != len(items) or any(a is not b for a, b in zip(sequence, items, strict=True)):
        sequence.clear()
        sequence.extend(items)


def _put_back_set(collection: set[Any], items: list[Any]) -> None:
    if {id(item) for item in collection} != {id(item) for item in items}:
        collection.clear()
        collection.update(items)


def _put_back_cell(cell: types.CellType, before: Any) -> None:
    if contents(cell) is not before:
        cell.cell_contents = before


def _put_back_globals(namespace: dict[str, Any], values: dict[str, Any]) -> None:
    namespace.update({name: value for name, value in values.items() if namespace.get(name, _MISSING) is not value})


def _put_back_attributes(found: Any, attributes: dict[str, Any], values: dict[str, Any]) -> None:
    for name in [name for name in attributes if name not in values and not is_instrument(found, name)]:
        del attributes[name]
    attributes.update({name: value for name, value in values.items() if attributes.get(name, _MISSING) is not value})


def _put_back_class(kind: type, values: dict[str, Any]) -> None:
    for name, value in values.items():
        if vars(kind).get(name, _MISSING) is not value:
            setattr(kind, name, value)


def _put_back_slots(found: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        if getattr(found, name, _MISSING) is not value:
            object.__setattr__(found, name, value)


# ----------------------------------------------------------------------------------------------------- random streams


def _generator(found: Any) -> Iterator[Undo]:
    """A generator's stream, or a numpy array's contents, where an object holds one."""
    numpy = sys.modules.get("numpy")
    if own := stream(found):
        read, put_back = own
        yield functools.partial(put_back, read())
    elif numpy is not None and isinstance(found, numpy.ndarray):
        yield functools.partial(_put_back_array, found, found.copy())


def _put_back_array(array: Any, before: Any) -> None:
    if array.tobytes() != before.tobytes():
        array[...] = before


def _random_streams() -> Iterator[Undo]:
    """Rule 4: the global streams."""
    yield functools.partial(torch.set_rng_state, torch.get_rng_state())
    yield functools.partial(random.setstate, random.getstate())
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        yield functools.partial(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        yield functools.partial(numpy.random.set_state, numpy.random.get_state())
