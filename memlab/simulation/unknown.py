"""A number that a simulation does not have, and what becomes of a program that needs it.

`loss.item()` on a tensor without data is an `Unknown`. It can be added up, averaged, kept and printed; it equals
nothing, and `max` and `min` may take it. It cannot be compared, be a size or decide: what happens then depends on the
data, and the error names the line. A program that only checks (`assert x.all()`, `if x.isnan().any(): raise ...`) is
taken to pass.
"""

from __future__ import annotations

import dis
import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType
from typing import Any, NoReturn

import torch

from ..clock import line_of
from ..errors import MemlabError

# -- the line that asks ------------------------------------------------------------------------------------------------

Places = Iterable[tuple[CodeType, int]]

_TORCH = os.path.dirname(torch.__file__) + os.sep
_PACKAGES = os.path.dirname(os.path.dirname(_TORCH)) + os.sep  # installed beside it
_PYTHONS = (os.path.dirname(os.__file__) + os.sep, "<frozen")
_MEMLAB = os.path.dirname(os.path.dirname(__file__)) + os.sep
_ENTRIES = (_MEMLAB + "strategies" + os.sep, _MEMLAB + "step.py", _MEMLAB + "measure.py")  # they call the user's code
_BETWEEN = (
    _MEMLAB,
    *(_TORCH + name for name in ("_subclasses", "_dynamo", "_compile.py", "_ops.py", "overrides.py", "utils")),
)


def where(places: Places | None = None) -> str | None:
    """`file.py:12 in function`: the innermost line of the step, and the user's own that led there, where that line is a
    library's. `places` are a traceback's, innermost first; default, where the program is now. None in backward."""
    library = None
    for code, number in _frames() if places is None else places:
        if code.co_filename.startswith(_ENTRIES):
            break
        line = line_of(code, number)
        if line is None or (code.co_filename.startswith(_PYTHONS) and not code.co_filename.startswith(_PACKAGES)):
            continue
        if not code.co_filename.startswith(_PACKAGES):
            return line if library is None else f"{library} (called from {line})"
        library = library or line
    return library


def _frames() -> Iterator[tuple[CodeType, int]]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_code, frame.f_lineno
        frame = frame.f_back


def is_packaged(frame: FrameType) -> bool:
    """Whether it runs code of an installed package, or of Python's own."""
    return frame.f_code.co_filename.startswith((_PACKAGES, *_PYTHONS, _TORCH, _MEMLAB))


def needs_data(what: str, line: str | None = None) -> MemlabError:
    """The error for a line of the user's that does `what`: "compares the value of a tensor"."""
    return MemlabError(
        f"a simulation has shapes and no data, and {line or where() or 'the step'} {what}: leave that out of the step, "
        "or measure() the step"
    )


def refused(what: str) -> Callable[..., NoReturn]:
    """An operation that cannot be done without data."""

    def operation(*_: Any) -> NoReturn:
        raise needs_data(what)

    return operation


# -- checks ------------------------------------------------------------------------------------------------------------


def decided() -> bool:
    """The truth value with which the line that asks for one goes on, where with the other it only raises; else an
    error."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    goes_on = None if frame is None else _goes_on(frame.f_code, frame.f_lasti)
    if goes_on is None:
        raise needs_data("decides by the value of a tensor")
    return goes_on


@functools.lru_cache(maxsize=256)
def _goes_on(code: CodeType, at: int) -> bool | None:
    steps = list(dis.get_instructions(code))
    places = {step.offset: index for index, step in enumerate(steps)}
    index, negated = places[at], False
    while steps[index].opname in ("CALL", "COMPARE_OP", "TO_BOOL", "UNARY_NOT"):
        negated ^= steps[index].opname == "UNARY_NOT"
        index += 1
    jump = steps[index]
    if not (jump.opname.startswith("POP_JUMP") and jump.opname.endswith(("IF_TRUE", "IF_FALSE"))):
        return None
    if_jumped, if_not = _only_raises(steps[places[jump.argval] :]), _only_raises(steps[index + 1 :])
    if if_jumped == if_not:
        return None
    jumps_on = jump.opname.endswith("IF_TRUE")
    return (jumps_on if if_not else not jumps_on) != negated


def _only_raises(steps: Iterable[dis.Instruction]) -> bool:
    for step in steps:
        if step.opname == "RAISE_VARARGS":
            return True
        if "JUMP" in step.opname or step.opname.startswith(("RETURN", "FOR_ITER", "YIELD")):
            return False
    return False


# -- the number --------------------------------------------------------------------------------------------------------


class Unknown(float):
    def __new__(cls) -> Unknown:
        return super().__new__(cls, "nan")

    def __repr__(self) -> str:
        return "unknown"

    __str__ = __repr__

    def __format__(self, form: str) -> str:
        return "unknown"


def _arithmetic(name: str) -> Callable[..., Any]:
    def operation(self: Unknown, *others: Any) -> Any:
        result = getattr(float, name)(self, *others)
        return result if result is NotImplemented else Unknown()

    return operation


def _compared() -> Callable[..., bool]:
    """By `max`, `min` and `sorted` either answer will do."""

    def compare(self: Unknown, *others: Any) -> bool:
        frame = sys._getframe(1)
        if frame.f_code.co_code[frame.f_lasti] == dis.opmap["COMPARE_OP"]:
            goes_on = _goes_on(frame.f_code, frame.f_lasti)
            if goes_on is None:
                raise needs_data("compares the value of a tensor with another")
            return goes_on
        return False

    return compare


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
for _name in ("neg", "pos", "abs", "round", *_BINARY, *(f"r{name}" for name in _BINARY)):
    setattr(Unknown, f"__{_name}__", _arithmetic(f"__{_name}__"))
for _name in ("lt", "le", "gt", "ge"):
    setattr(Unknown, f"__{_name}__", _compared())
for _name in ("int", "trunc", "index", "floor", "ceil"):
    setattr(Unknown, f"__{_name}__", refused("takes the value of a tensor as a whole number"))
Unknown.__bool__ = refused("decides by the value of a tensor")  # type: ignore[method-assign]
Unknown.__hash__ = float.__hash__  # type: ignore[method-assign]
