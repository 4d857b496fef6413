"""Which objects a training step can reach, and so can change.

    for found in walk(model, batch, loss_fn): ...

Rules:

1. Followed are tensors (their `.grad` and hooks), containers, the attributes and slots of modules, optimizers and plain
   objects, bound methods and partials, and of functions the closure cells, defaults, attributes and the globals that
   they name. Of classes of the user's: the data among their attributes, and the methods that `forward` and `__call__`
   name.
2. Not followed: other classes, Python modules, the standard library's and PyTorch's private objects, loggers and
   displays.
3. Hooks on modules and an instance's own `forward` belong to instruments: what they hold is followed, but they are no
   state.
"""

from __future__ import annotations

import collections
import dis
import functools
import random
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

MOST_OBJECTS = 200_000
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.device, torch.dtype, torch.Size, type})
_LOGGERS = {"tqdm", "wandb", "mlflow", "tensorboard", "matplotlib", "IPython", "ipywidgets"}
_STANDARD = sys.stdlib_module_names - {"collections", "types", "argparse", "dataclasses"}
_LIBRARIES = _STANDARD | _LOGGERS | {"torch", "memlab", "numpy"}
_MODULE_HOOKS = frozenset(name for name in vars(nn.Module()) if "_hooks" in name)
_MISSING = object()


def walk(*roots: Any) -> Iterator[Any]:
    """Every object that is followed from `roots`, once, nearest first, at most `MOST_OBJECTS`."""
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
        yield contents(found)
    elif isinstance(found, types.FunctionType):
        yield from _of_function(found)
    for name, value in list((attributes(found) or {}).items()):
        if not is_instrument(found, name):
            yield value
        elif isinstance(value, dict):
            yield from list(value.values())
    yield from slots(found).values()
    for kind in own_classes(type(found)):
        yield from class_data(kind).values()
    yield from _methods(type(found))
    if isinstance(found, torch.jit.ScriptModule):  # what it holds lives in C++
        yield from found.parameters()
        yield from found.buffers()


def own_classes(kind: type) -> tuple[type, ...]:
    """The user's own among a class and its bases."""
    return tuple(base for base in kind.__mro__ if (base.__module__ or "").partition(".")[0] not in _LIBRARIES)


def class_data(kind: type) -> dict[str, Any]:
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
    """The object's own `__dict__`, where it is followed."""
    if is_foreign(found) and not isinstance(found, nn.Module | torch.optim.Optimizer):
        return None
    attributes = getattr(found, "__dict__", None)
    return attributes if isinstance(attributes, dict) else None


def slots(found: Any) -> dict[str, Any]:
    """The values of the object's `__slots__`, where it has such."""
    kind = type(found)
    if is_foreign(found) or isinstance(found, torch.Tensor):
        return {}
    names = [name for base in kind.__mro__ for name in _as_tuple(base.__dict__.get("__slots__", ()))]
    values = {name: getattr(found, name, _MISSING) for name in names if not name.startswith("__")}
    return {name: value for name, value in values.items() if value is not _MISSING}


def _as_tuple(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def is_foreign(found: Any) -> bool:
    """Rule 2, by the Python module that defines the object's class, or the function."""
    function = isinstance(found, types.FunctionType)
    module = (found if function else type(found)).__module__ or ""
    top = module.partition(".")[0]
    private = ("torch", "memlab.") if function else ("torch._", "memlab.")
    return top in _STANDARD or top in _LOGGERS or module.startswith(private)


def is_instrument(found: Any, name: str) -> bool:
    """Rule 3."""
    if isinstance(found, nn.Module):
        return name == "forward" or name in _MODULE_HOOKS
    return isinstance(found, torch.optim.Optimizer) and is_optimizer_hooks(name)


def is_optimizer_hooks(name: str) -> bool:
    """Whether an optimizer's attribute holds its hooks."""
    return name.startswith("_optimizer_") and name.endswith("_hooks")


def contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # still empty
        return None


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
