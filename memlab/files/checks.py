"""What a reader of files needs to say no: the error, and values of a stranger's shown without trusting them."""

from __future__ import annotations

from typing import Any


class WrongError(Exception):
    """What is wrong with a file's content; `load` adds which file."""


def shown(value: Any) -> str:
    """A value in an error message. Of what may be large or hold itself only the type is shown."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    if isinstance(value, str):
        return f"{value[:40]!r}"
    return f"a {type(value).__name__}"


def get(row: Any, key: str, kind: type, where: str) -> Any:
    """`row[key]`, where `row` is a dictionary and the value of that type."""
    if type(row) is not dict:
        raise WrongError(f"{where} is {shown(row)}, where a dict should stand")
    if key not in row:
        raise WrongError(f'{where} has no "{key}"')
    if type(row[key]) is not kind:
        raise WrongError(f'{where}["{key}"] is {shown(row[key])}, where {kind.__name__} should stand')
    return row[key]


def get_number(row: Any, key: str, where: str, most: int = 2**62 - 1) -> int:
    """`row[key]`, a whole number from 0 to `most`."""
    number: int = get(row, key, int, where)
    if not 0 <= number <= most:
        raise WrongError(f'{where}["{key}"] is {shown(number)}, where a number from 0 to {most:,} should stand')
    return number
