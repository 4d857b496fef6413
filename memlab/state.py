"""Everything that a training step can change, put back in place.

    state = snapshot(model, batch, loss_fn, optimizer)
    ...                                                 # any number of steps
    state.restore()                                     # as often as wanted

Rules:

1. Identities stay. Objects are followed from the roots and restored themselves: tensors (bytes, layout, requires_grad,
   `.grad`), lists, dicts, sets, deques, the attributes of modules, optimizers and plain objects, the closure cells,
   default arguments and attributes of functions, and the globals that a function of the user's names. Of classes of
   the user's: the data among their attributes, and the methods that `forward` and `__call__` name.
2. Bytes are kept by *storage*, once, in host memory, and the storage itself by a weak reference. So tied tensors and
   views stay tied, and a snapshot holds no device memory: where the step let a storage go, a new one takes its place.
3. What the step added goes (entries, attributes, activations appended to a list); what it removed or rebound returns.
4. Random streams are state: torch on the CPU and on each CUDA device in use, numpy's and Python's global ones, and
   generators that the roots hold. Nothing here draws from any.
5. Hooks on modules and an instance's own `forward` belong to instruments: they are left as they are. Restore a state
   where it was taken: one taken outside `strategy.applied(step)` would undo there what the strategy installed.
6. Not followed: other classes, Python modules, the standard library's and PyTorch's private objects, loggers and
   displays.
"""

from __future__ import annotations

import collections
import dis
import functools
import random
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .modes import unseen

Undo = Callable[[], object]

MOST_OBJECTS = 200_000
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.device, torch.dtype, torch.Size, type})
_LOGGERS = {"tqdm", "wandb", "mlflow", "tensorboard", "matplotlib", "IPython", "ipywidgets"}
_STANDARD = sys.stdlib_module_names - {"collections", "types", "argparse", "dataclasses"}
_LIBRARIES = _STANDARD | _LOGGERS | {"torch", "memlab", "numpy"}
_MODULE_HOOKS = frozenset(name for name in vars(nn.Module()) if "_hooks" in name)
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
        self.complete = len(objects) < MOST_OBJECTS
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
            yield functools.partial(_put_back_cell, found, _cell(found))
        elif isinstance(found, types.FunctionType):
            yield functools.partial(_put_back_globals, found.__globals__, data_globals(found))
        else:
            yield from _generator(found)
        for kind in _own_classes(type(found)):
            if kind not in self._classes:
                self._classes.add(kind)
                yield functools.partial(_put_back_class, kind, _class_data(kind))
        own = attributes(found)
        if own is not None:
            mine = {name: value for name, value in own.items() if not _instrument(found, name)}
            yield functools.partial(_put_back_attributes, found, own, mine)
        slots = _slots(found)
        if slots:
            yield functools.partial(_put_back_slots, found, slots)

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


# ------------------------------------------------------------------------------------------------- following the roots


def walk(*roots: Any) -> Iterator[Any]:
    """Every object that rule 1 follows from `roots`, once, nearest first, at most `MOST_OBJECTS`."""
    seen: dict[int, Any] = {}  # the objects themselves: an id is only an identity while its object lives
    queue = collections.deque(roots)
    while queue and len(seen) < MOST_OBJECTS:
        found = queue.popleft()
        if type(found) in _ATOMS or id(found) in seen or isinstance(found, type | types.ModuleType):
            continue
        seen[id(found)] = found
        yield found
        queue.extend(_children(found))


def _children(found: Any) -> Iterator[Any]:
    if isinstance(found, torch.Tensor):
        if found.is_leaf and found.grad is not None:
            yield found.grad
        for hooks in (found._backward_hooks, found._post_accumulate_grad_hooks):
            yield from (hooks or {}).values()
    elif isinstance(found, dict):
        yield from list(found.values())
    elif isinstance(found, list | tuple | set | frozenset | collections.deque):
        yield from list(found)
    elif isinstance(found, functools.partial):
        yield from (found.func, found.args, found.keywords)
    elif isinstance(found, types.MethodType):
        yield from (found.__self__, found.__func__)
    elif isinstance(found, types.CellType):
        yield _cell(found)
    elif isinstance(found, types.FunctionType):
        yield from _of_function(found)
    for name, value in list((attributes(found) or {}).items()):
        if not _instrument(found, name):
            yield value
        elif isinstance(value, dict):
            yield from list(value.values())
    yield from _slots(found).values()
    for kind in _own_classes(type(found)):
        yield from _class_data(kind).values()
    yield from _methods(type(found))
    if isinstance(found, torch.jit.ScriptModule):  # what it holds lives in C++
        yield from found.parameters()
        yield from found.buffers()


def _own_classes(kind: type) -> tuple[type, ...]:
    """The user's own among a class and its bases."""
    return tuple(base for base in kind.__mro__ if (base.__module__ or "").partition(".")[0] not in _LIBRARIES)


def _class_data(kind: type) -> dict[str, Any]:
    """What `type(self).calls += 1` and `self.history.append(x)` change where `__init__` set no such attribute."""
    data = (int, float, complex, torch.Tensor, list, dict, set, collections.deque)
    return {name: v for name, v in vars(kind).items() if isinstance(v, data) and not name.startswith("__")}


def _methods(kind: type) -> tuple[types.FunctionType, ...]:
    """`forward`, `__call__`, the methods and properties that these name, and so on."""
    found: dict[str, types.FunctionType] = {}
    pending = ["__call__", "forward"]
    while pending:
        name = pending.pop()
        method = getattr(kind, name, None)
        method = method.fget if isinstance(method, property) else getattr(method, "__func__", method)
        if name not in found and isinstance(method, types.FunctionType):
            found[name] = method
            if not is_foreign(method):
                pending += _attribute_names(method.__code__)
    return tuple(found.values())


def _attribute_names(code: types.CodeType) -> set[str]:
    inner = (_attribute_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*inner)


def _of_function(function: types.FunctionType) -> Iterator[Any]:
    if is_foreign(function):
        return
    yield from function.__closure__ or ()
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from data_globals(function).values()
    yield from helpers(function).values()


def helpers(function: types.FunctionType) -> dict[str, types.FunctionType]:
    """The functions of its own Python module that a function names."""
    space = function.__globals__
    named = {name: space.get(name) for name in _names(function.__code__)}
    return {name: f for name, f in named.items() if isinstance(f, types.FunctionType) and f.__globals__ is space}


def data_globals(function: types.FunctionType) -> dict[str, Any]:
    """The data among the globals that a function of the user's names: what `history.append(loss)` would change."""
    if is_foreign(function):
        return {}
    code = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
    named = {name: function.__globals__.get(name, _MISSING) for name in _names(function.__code__)}
    return {name: value for name, value in named.items() if value is not _MISSING and not isinstance(value, code)}


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> set[str]:
    """Global names in a function's code and in the functions inside it (`co_names` has attributes' names as well)."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    own = {step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "STORE_GLOBAL")}
    return own.union(*inner)


def attributes(found: Any) -> dict[str, Any] | None:
    """The object's own `__dict__`, where rule 6 lets it be followed."""
    if is_foreign(found) and not isinstance(found, nn.Module | torch.optim.Optimizer):
        return None
    attributes = getattr(found, "__dict__", None)
    return attributes if isinstance(attributes, dict) else None


def _slots(found: Any) -> dict[str, Any]:
    kind = type(found)
    if is_foreign(found) or isinstance(found, torch.Tensor):
        return {}
    names = [name for base in kind.__mro__ for name in _as_tuple(base.__dict__.get("__slots__", ()))]
    values = {name: getattr(found, name, _MISSING) for name in names if not name.startswith("__")}
    return {name: value for name, value in values.items() if value is not _MISSING}


def _as_tuple(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def is_foreign(found: Any) -> bool:
    """Rule 6, by the Python module that defines the object's class, or the function."""
    function = isinstance(found, types.FunctionType)
    module = (found if function else type(found)).__module__ or ""
    top = module.partition(".")[0]
    private = ("torch", "memlab.") if function else ("torch._", "memlab.")
    return top in _STANDARD or top in _LOGGERS or module.startswith(private)


def _instrument(found: Any, name: str) -> bool:
    """Rule 5."""
    if isinstance(found, nn.Module):
        return name == "forward" or name in _MODULE_HOOKS
    return isinstance(found, torch.optim.Optimizer) and is_optimizer_hooks(name)


def is_optimizer_hooks(name: str) -> bool:
    """Whether an optimizer's attribute holds its hooks."""
    return name.startswith("_optimizer_") and name.endswith("_hooks")


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # still empty
        return None


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


def _put_back_cell(cell: types.CellType, contents: Any) -> None:
    if _cell(cell) is not contents:
        cell.cell_contents = contents


def _put_back_globals(namespace: dict[str, Any], values: dict[str, Any]) -> None:
    namespace.update({name: value for name, value in values.items() if namespace.get(name, _MISSING) is not value})


def _put_back_attributes(found: Any, attributes: dict[str, Any], values: dict[str, Any]) -> None:
    for name in [name for name in attributes if name not in values and not _instrument(found, name)]:
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


def stream(found: Any) -> tuple[Callable[[], Any], Callable[[Any], object]] | None:
    """How to read and how to set the state of a generator; None for anything else."""
    numpy = sys.modules.get("numpy")
    if isinstance(found, torch.Generator):
        return found.get_state, found.set_state
    if isinstance(found, random.Random):
        return found.getstate, found.setstate
    if numpy is not None and isinstance(found, numpy.random.RandomState):
        return found.get_state, found.set_state
    if numpy is not None and isinstance(found, numpy.random.Generator):
        bits = found.bit_generator
        return lambda: bits.state, functools.partial(setattr, bits, "state")
    return None


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
