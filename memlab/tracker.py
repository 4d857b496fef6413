"""Which storages live, from when to when, and which operator made them.

With a `Tracker` entered one gets a record (`Storage`) for every storage that an operator makes, its birth and its
death, in order. It is a dispatch mode: it sees each operator once, below autograd, on real and on fake tensors alike.

Rule 1. A storage is known by its C++ address (`_cdata`) while it lives. The Python object of a storage lives as long
        as the C++ one, so a weak reference's callback fires exactly when the bytes go.
Rule 2. The record of a storage is that weak reference; it holds no tensor.
Rule 3. View operators make no storage and are passed through untouched: they are half of all calls.
Rule 4. With `marks` every operator leaves a marker among the allocator's events when it ends, and so does whatever
        happens outside an operator; marker k belongs to `mark_of[k]`.
Rule 5. Roles (parameter, gradient, ...) are given later, to records; the last word is `record.py`'s.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from . import allocator
from .accumulation import would_be_in_place
from .clock import Clock
from .modes import LightMode, level


class Storage(weakref.ref[torch.UntypedStorage]):
    """One storage's record. `operator` is the number of the operator that made it (-1: older than the recording)."""

    __slots__ = (
        "address",
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
    __hash__ = object.__hash__
    __eq__ = object.__eq__

    number: int
    address: int  # the C++ object's
    nbytes: int
    operator: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str
    born: int  # index into Tracker.log
    died: int | None
    ptr: int
    role: str
    name: str  # of the parameter, buffer or batch entry
    owner: str  # module that owns it
    cast_of: int | None  # number of the storage it is a cast of


class Tracker(LightMode):
    """Records every storage made inside. Read `storages`, `log` and `operators` afterwards.

    log:       births (+number + 1) and deaths (-(number + 1)) in order
    operators: (function, what `Clock.now` said, nanoseconds, length of the log at its end)
    work:      with `measures`, what that function said of each operator's call and result
    """

    def __init__(self, clock: Clock, marks: bool = False, measures: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.clock = clock
        self.marks = marks
        self.measures = measures
        self.work: list[Any] = []
        self.storages: list[Storage] = []
        self.log: list[int] = []
        self.operators: list[tuple[Any, tuple[int, str | int, str | None], int, int]] = []
        self.mark_of: list[tuple[str, int]] = []  # ("operator", number) | ("met" | "died", storage number)
        self.continued: dict[int, int] = {}  # number of a gradient -> of the sum that alone would have overwritten it
        self._level = level()
        self._known: dict[int, Storage] = {}
        self._gone = _obituary(self._known, self.log, self.mark_of if marks else None)

    # -- operators -----------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if level() != self._level:
            return func(*args, **(kwargs or {}))
        _, kind, writes, makes = _OPERATORS.get(id(func)) or _operator(func)
        written = _given(writes, args, kwargs) if writes else ()
        for tensor in written:  # it was there before: met afterwards, it would count as made by the operator
            self.meet_outside(tensor)
        out = func(*args, **kwargs) if kwargs else func(*args)
        if kind == _VIEW:
            return out
        number = len(self.operators)
        before = len(self.storages)
        if type(out) in _DENSE and out.layout is _STRIDED and not out.is_nested:  # nearly always
            storage = out.untyped_storage()
            if storage._cdata not in self._known:
                if makes:
                    self._meet(storage, out, number)
                elif kind == _SET:
                    self.made_outside(out)
                else:  # in place: it was there before
                    self.meet_outside(out)
        elif makes:
            for tensor in tensors_in(out):
                self.meet(tensor, number)
        if kind:
            self._special(kind, args, written, number, before)
        if self.measures is not None:
            self.work.append(self.measures(func, args, kwargs, out))
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
        elif kind in (_RESIZE, _SET):
            for tensor in written:
                self._check_size(tensor, number)
        elif kind == _ADD:
            if len(self.storages) > before and would_be_in_place(args[0]):
                first = self.find(args[0])
                if first is not None and first.nbytes == self.storages[before].nbytes:
                    self.continued[first.number] = before
        elif kind == _LIBRARY:
            for storage in self.storages[before:]:
                if storage.dtype == torch.uint8:
                    storage.role = "workspace"

    def _check_size(self, tensor: torch.Tensor, number: int) -> None:
        """A storage that was resized in place counts as released and made anew."""
        for part in parts(tensor):
            storage = part.untyped_storage()
            known = self._known.get(storage._cdata)
            if known is not None and known.nbytes != storage.nbytes():
                known.died = len(self.log)
                self.log.append(-known.number - 1)
                new = self._meet(storage, part, number)
                new.role, new.name, new.owner = known.role, known.name, known.owner

    # -- storages ------------------------------------------------------------------------------------------------

    def meet(self, tensor: torch.Tensor, number: int) -> list[Storage]:
        """The records of a tensor's storages (several for sparse and nested ones), made now if they are new."""
        found: list[Storage] = []
        if level() != self._level:
            return found
        for part in parts(tensor):
            storage = part.untyped_storage()
            known = self._known.get(storage._cdata)
            record = self._meet(storage, part, number) if known is None else known
            if record not in found:
                found.append(record)
        return found

    def meet_outside(self, tensor: torch.Tensor) -> list[Storage]:
        """The same for a tensor met outside any operator: older than the recording, unless the allocator's events
        show that it was made during it."""
        before = len(self.storages)
        found = self.meet(tensor, -1)
        if self.marks:
            for storage in self.storages[before:]:
                allocator.mark()
                self.mark_of.append(("met", storage.number))
        return found

    def made_outside(self, tensor: torch.Tensor) -> list[Storage]:
        """The same for a tensor just made by C++ code outside any operator."""
        found = self.meet_outside(tensor)
        for storage in found:
            storage.operator = max(storage.operator, len(self.operators))
        return found

    def alive(self) -> list[Storage]:
        """The records of the storages that live now."""
        return list(self._known.values())

    def find(self, tensor: Any) -> Storage | None:
        """The record of a tensor's storage, if it is known."""
        if not isinstance(tensor, torch.Tensor):
            return None
        for part in parts(tensor):
            known = self._known.get(part.untyped_storage()._cdata)
            if known is not None:
                return known
        return None

    def _meet(self, storage: Any, tensor: torch.Tensor, number: int) -> Storage:
        record = Storage(storage, self._gone)
        record.address = storage._cdata
        record.number = len(self.storages)
        record.nbytes = storage.nbytes()
        record.operator = number
        record.dtype = tensor.dtype
        record.shape = tuple(tensor.shape)
        record.device = "cpu" if tensor.is_cpu else tensor.device.type
        record.born = len(self.log)
        record.died = record.cast_of = None
        record.ptr = storage.data_ptr() if self.marks else 0
        record.role = record.name = record.owner = ""
        self._known[record.address] = record
        self.storages.append(record)
        self.log.append(record.number + 1)
        return record

    def forget(self) -> None:
        """Drop every weak reference: nothing is recorded from here on."""
        self._known.clear()


def _obituary(
    known: dict[int, Storage], log: list[int], mark_of: list[tuple[str, int]] | None
) -> Callable[[Storage], None]:
    """What is done when a storage goes. No method, or records and tracker would keep each other alive."""

    def gone(record: Storage) -> None:
        if known.get(record.address) is not record:
            return
        del known[record.address]
        record.died = len(log)
        log.append(-record.number - 1)
        if mark_of is not None and record.operator < 0:  # the allocator does not report it
            allocator.mark()
            mark_of.append(("died", record.number))

    return gone


# -- kinds of operators ------------------------------------------------------------------------------------------------

_PLAIN, _VIEW, _CAST, _RESIZE, _SET, _LIBRARY, _ADD = range(7)
_Writes = tuple[tuple[int, str], ...]  # position and name of each argument that an operator writes into


class _Operator(NamedTuple):
    """What a schema says: the kind of operator, what it writes into, and whether any of its results is a new tensor."""

    function: Any  # held, so that its `id` is not used again
    kind: int
    writes: _Writes
    makes: bool


_OPERATORS: dict[int, _Operator] = {}  # by the function's `id`: its hash is slower


def _operator(func: Any) -> _Operator:
    kind, writes = _kind(func), _written_by(func)
    results = [result for result in func._schema.returns if "Tensor" in str(result.type)]
    makes = any(result.alias_info is None or not result.alias_info.is_write for result in results)
    if kind == _PLAIN and not makes and len(results) == len(writes):  # in place: it returns all that it writes into
        writes = ()
    known = _OPERATORS[id(func)] = _Operator(func, kind, writes, makes)
    return known


def _kind(func: Any) -> int:
    if func is torch.ops.aten.add.Tensor:
        return _ADD
    name, _, overload = func.name().removeprefix("aten::").partition(".")
    if name in ("_to_copy", "to"):
        return _CAST
    if name == "set_" and overload.startswith("source_Storage"):  # `copy.deepcopy`, `torch.load`: a storage just made
        return _SET
    if name in ("resize_", "resize_as_", "set_", "_resize_output_") or any(a.is_out for a in func._schema.arguments):
        return _RESIZE
    if "mkldnn_rnn" in name or "cudnn" in name or "miopen" in name:
        return _LIBRARY
    # `lift_fresh` receives what `torch.tensor(...)` made in C++: a view of a storage not met before
    is_view = func.is_view and not name.startswith("lift")
    return _VIEW if is_view or name.startswith(("profiler::", "prim::")) else _PLAIN


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
_DENSE, _STRIDED = {torch.Tensor, torch.nn.Parameter, FakeTensor}, torch.strided


def _is_plain(value: Any) -> bool:
    """Whether it is a tensor whose data is simply its storage: most are."""
    dense = type(value) in _DENSE and value.layout is torch.strided
    return dense and not value.is_nested and not _functorch.is_functorch_wrapped_tensor(value)


def parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """The strided tensors that hold a tensor's data: itself, what a transform of `torch.func` wraps, or the components
    of a sparse or nested tensor."""
    if _is_plain(tensor):
        return (tensor,)
    layout = tensor.layout
    if layout == torch.strided:
        if _functorch.is_functorch_wrapped_tensor(tensor):
            return parts(_functorch.get_unwrapped(tensor))
        if hasattr(tensor, "__tensor_flatten__"):
            names, _ = tensor.__tensor_flatten__()
            return [part for name in names for part in parts(getattr(tensor, name))]
        return tensor.detach().unbind() if tensor.is_nested else (tensor,)
    if layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    if layout == torch.jagged:
        return tensor.values(), tensor.offsets()  # type: ignore[attr-defined]
    return ()


def tensors_in(value: Any) -> Iterable[torch.Tensor]:
    """The tensors in an operator's result or arguments."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
