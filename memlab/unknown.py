"""A number that a simulation does not have, and what becomes of a program that needs it.

`loss.item()` on a tensor without data is an `Unknown`. It can be added up, averaged, kept and printed. It cannot be
compared, be a size or decide: what happens then depends on the data, and the error names the line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from .clock import user_line
from .errors import MemlabError


def needs_data(what: str, line: str | None = None) -> MemlabError:
    """The error for a line of the user's that does `what`: "compares the value of a tensor"."""
    where = line or user_line() or "the step"
    return MemlabError(
        f"a simulation has shapes and no data, and {where} {what}: leave that out of the step, or measure() the step"
    )


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


def _refused(what: str) -> Callable[..., NoReturn]:
    def operation(self: Unknown, *others: Any) -> NoReturn:
        raise needs_data(what)

    return operation


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
for _name in ("neg", "pos", "abs", "round", *_BINARY, *(f"r{name}" for name in _BINARY)):
    setattr(Unknown, f"__{_name}__", _arithmetic(f"__{_name}__"))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Unknown, f"__{_name}__", _refused("compares the value of a tensor with another"))
for _name in ("int", "trunc", "index", "floor", "ceil"):
    setattr(Unknown, f"__{_name}__", _refused("takes the value of a tensor as a whole number"))
Unknown.__bool__ = _refused("decides by the value of a tensor")  # type: ignore[method-assign]
Unknown.__hash__ = float.__hash__  # type: ignore[method-assign]
