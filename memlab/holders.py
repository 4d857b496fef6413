"""Who holds a tensor, by a name that a person knows: `the global list `losses``, `the dict `seen` of decoder`.

With `names(tensors)` one goes up from tensors to whatever refers to them, until something has a name: a variable
(global, local, closure), an attribute of a module, of another object, of a class or of a function.

Rule 1. Nothing found on the way is kept: what is returned is text. Neither are the variables of functions that run: up
        to Python 3.12 to read them leaves a copy in the frame, which is emptied unless somebody else has it.
Rule 2. memlab's own objects hold nothing; PyTorch's are passed through without a name, modules and optimizers aside.
Rule 3. The search is bounded, in steps up and in width. What it does not find has no name, and no wrong one.
"""

from __future__ import annotations

import collections
import gc
import inspect
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import CellType, FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any

import torch
from torch import nn

from .clock import line_of

BOUNDED = ""  # the name of a holder that lets go by itself: a deque with a `maxlen`

_DEPTH = 8  # steps up; a tensor in a list in a closure of a function has four
_WIDTH = 256  # objects whose holders are looked for at once
_CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque, CellType)


def names(tensors: Iterable[torch.Tensor], modules: Mapping[int, str]) -> dict[int, str]:
    """The name of what holds each tensor, by the tensor's `id`; `BOUNDED` where only that holds it.

    `modules` has the names of modules, by `id`.
    """
    frontier: dict[int, Any] = {id(tensor): tensor for tensor in tensors}
    origins = {key: {key} for key in frontier}  # of each object, the tensors below it
    chains: dict[int, tuple[int, ...]] = {key: (key,) for key in frontier}  # the object, and what is below it
    found: dict[int, str] = {}
    variables, spaces = _variables_that_run(), _namespaces()
    bounded: set[int] = set()

    def settle(key: int, text: str) -> None:
        for origin in origins[key]:
            found.setdefault(origin, text)

    for _ in range(_DEPTH):
        for key in frontier.keys() & variables.keys():
            settle(key, variables[key])
        unnamed = [key for key in frontier if not origins[key] <= found.keys()]
        frontier = {key: frontier[key] for key in unnamed[:_WIDTH]}
        if not frontier:
            break
        above: dict[int, Any] = {}
        for holder in gc.get_referrers(*frontier.values()):
            key = id(holder)
            if holder is frontier or _is_memlabs(holder):
                continue
            held = {id(child) for child in gc.get_referents(holder)} & frontier.keys()
            if type(holder) is collections.deque and holder.maxlen is not None:
                bounded.update(*(origins[child] for child in held))
                continue
            for child in held:
                text = _name(holder, chains[child], modules, spaces)
                if text is not None:
                    settle(child, text)
                elif key not in spaces and not origins[child] <= origins.get(key, set()):
                    above[key] = holder
                    chains[key] = (key, *chains[child])
                    origins.setdefault(key, set()).update(origins[child])
        frontier = above
    return dict.fromkeys(bounded, BOUNDED) | found


# -- names -------------------------------------------------------------------------------------------------------------


def _name(holder: Any, chain: tuple[int, ...], modules: Mapping[int, str], spaces: Mapping[int, str]) -> str | None:
    """What a person calls the outermost link of the chain, seen from its holder; None where that gives no name."""
    kind = type(holder)
    if id(holder) in spaces:
        return _bound(holder, chain, "the global {kind} `{name}`" + spaces[id(holder)])
    if kind in _CONTAINERS or kind is ModuleType:
        return None
    if issubclass(kind, nn.Module):
        attributes = vars(holder) | holder._buffers | holder._parameters
        of = f" of the module `{modules.get(id(holder), kind.__name__)}`"
        return _bound(attributes, chain, "the {kind} `{name}`" + of)
    if kind is FunctionType:
        return None if _is_torchs(holder.__module__) else _name_in_function(holder, chain)
    frame = holder.gi_frame if kind is GeneratorType else holder
    if isinstance(frame, FrameType):
        where = f" of {frame.f_code.co_name}, a call that has not been released"
        return _bound(_variables(frame), chain, "the local {kind} `{name}`" + where)
    if issubclass(kind, type):
        return _bound(vars(holder), chain, f"the {{kind}} `{{name}}` of the class {holder.__name__}")
    if _is_torchs(kind.__module__):
        return None
    try:
        attributes = object.__getattribute__(holder, "__dict__")  # no code of the object's own runs
    except AttributeError:
        return None
    return _bound(attributes, chain, f"the {{kind}} `{{name}}` of a {kind.__name__}")


def _name_in_function(function: FunctionType, chain: tuple[int, ...]) -> str | None:
    code, of = function.__code__, f" of {function.__qualname__.rpartition('<locals>.')[2]}"
    closure = dict(_contents(zip(code.co_freevars, function.__closure__ or (), strict=False)))
    arguments = code.co_varnames[: code.co_argcount][::-1]
    defaults = dict(zip(arguments, (function.__defaults__ or ())[::-1], strict=False)) | (function.__kwdefaults__ or {})
    return (
        _bound(closure, chain, "the closure {kind} `{name}`" + of)
        or _bound(defaults, chain, "the {kind} that is the default of `{name}`" + of)
        or _bound(vars(function), chain, "the {kind} `{name}`" + of)
    )


def _contents(cells: Iterable[tuple[str, CellType]]) -> Iterator[tuple[str, Any]]:
    for name, cell in cells:
        try:
            yield name, cell.cell_contents
        except ValueError:  # an empty cell
            continue


def _bound(space: Mapping[str, Any], chain: tuple[int, ...], text: str) -> str | None:
    """`text` for the outermost link of the chain that has a name in `space`; one without `_` before it goes first."""
    named: dict[int, tuple[str, str]] = {}
    for name, value in list(space.items()):
        if id(value) not in named or named[id(value)][0].startswith("_"):
            named[id(value)] = str(name), _kind(value)
    for link in chain:
        if link in named:
            name, kind = named[link]
            return text.format(kind=kind, name=name)
    return None


def _kind(value: Any) -> str:
    return "tensor" if issubclass(type(value), torch.Tensor) else type(value).__name__


# -- where variables are -----------------------------------------------------------------------------------------------


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if line_of(frame.f_code, 0) is not None:  # neither PyTorch's nor memlab's
            yield frame
        frame = frame.f_back


def _variables_that_run() -> dict[int, str]:
    """The variables of the functions that run, as text by the `id` of the value: the collector does not see them."""
    texts: dict[int, str] = {}
    for frame in _frames():
        code = frame.f_code
        if code.co_flags & inspect.CO_OPTIMIZED:
            for name, value in _variables(frame).items():
                which = "closure" if name in code.co_freevars else "local"
                texts.setdefault(id(value), f"the {which} {_kind(value)} `{name}` of {code.co_name}")
    return texts


def _variables(frame: FrameType) -> dict[str, Any]:
    """A function's variables (Rule 1)."""
    seen = frame.f_locals
    variables = dict(seen)
    held_by_the_frame = 3  # the frame, `seen`, and the argument of `getrefcount`
    is_copy = type(seen) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED
    if is_copy and sys.getrefcount(seen) <= held_by_the_frame:
        seen.clear()
    return variables


def _namespaces() -> dict[int, str]:
    """The dictionaries of global variables, by `id`, with what to say of them: nothing for those of the program."""
    modules = ((module.__name__, vars(module)) for module in list(sys.modules.values()) if type(module) is ModuleType)
    running = ((str(frame.f_globals.get("__name__", "")), frame.f_globals) for frame in _frames())
    return {
        id(space): "" if name in ("", "__main__", "builtins") else f" of {name}"
        for name, space in itertools.chain(modules, running)
    }


# -- whose it is -------------------------------------------------------------------------------------------------------


def _is_memlabs(holder: Any) -> bool:
    if isinstance(holder, FrameType):
        return line_of(holder.f_code, 0) is None
    return _package(type(holder).__module__) == __package__


def _is_torchs(module: Any) -> bool:
    """Optimizers aside, which a person knows."""
    return _package(module) == "torch" and not module.startswith("torch.optim")


def _package(module: Any) -> str:
    return module.partition(".")[0] if isinstance(module, str) else ""
