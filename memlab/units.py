"""Bytes, seconds and ratios: how memlab prints them, and how it reads a number of bytes.

Units are binary and written so (1 MiB = 2**20 bytes), with three significant digits. `GB` is read as the 10**9 bytes
that shops mean by it, and never printed.
"""

import re
from decimal import Decimal
from numbers import Real

from .errors import MemlabError

KiB = 2**10
MiB = 2**20
GiB = 2**30
TiB = 2**40

_UNITS = {"B": 1, "KiB": KiB, "MiB": MiB, "GiB": GiB, "TiB": TiB, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNIT_OF_ANY_CASE = {name.lower(): unit for name, unit in _UNITS.items()}
_AMOUNT = re.compile(r"\s*(?P<number>[0-9]+(\.[0-9]+)?)\s*(?P<unit>[A-Za-z]*)\s*")


def format_bytes(n: int) -> str:
    """A number of bytes for people: `512 B`, `12.3 MiB`; a difference may be negative, `-1.50 GiB`."""
    if abs(n) < KiB:
        return f"{n} B"
    for name, unit in (("KiB", KiB), ("MiB", MiB), ("GiB", GiB)):
        if round(abs(n) / unit) < 1024:  # after rounding, or a byte less than 1 MiB would be 1024 KiB
            return f"{_three_digits(n / unit)} {name}"
    return f"{_three_digits(n / TiB)} TiB"


def parse_bytes(amount: str | int | float) -> int:
    """Bytes from `"512 MiB"`, `"1.5GiB"`, `"16 GB"` (10**9), `"4096"` or a number; case does not matter.

    What is left below one byte (`"0.1 KiB"` is 102.4) is dropped, so that a budget never grows by being read.
    Raises MemlabError for all that is no number of bytes: negative or not finite, a truth value, an unknown unit, a
    number with a fraction (0.8 is a share of something).
    """
    if isinstance(amount, str):
        match = _AMOUNT.fullmatch(amount)
        unit = match and _UNIT_OF_ANY_CASE.get(match["unit"].lower() or "b")
        if match and unit:
            return int(Decimal(match["number"]) * unit)
    elif isinstance(amount, Real) and not isinstance(amount, bool) and amount >= 0 and amount % 1 == 0:
        return int(amount)
    raise MemlabError(
        f"{amount!r} is no number of bytes: write a whole number from 0 on, or text such as '512 MiB', "
        f"that is, a number and one of {', '.join(_UNITS)}"
    )


def format_seconds(seconds: float) -> str:
    """A duration for people: `789 µs`, `45.6 ms`, `1.23 s`."""
    for name, unit in (("µs", 1e-6), ("ms", 1e-3)):
        if round(abs(seconds) / unit) < 1000:
            return f"{_three_digits(seconds / unit)} {name}"
    return f"{_three_digits(seconds)} s"


def format_ratio(ratio: float) -> str:
    """A ratio for people, read as "times": `1.26x`, `0.55x`, `0.0042x`."""
    return f"{ratio:.2f}x" if ratio == 0 or ratio >= 0.1 else f"{ratio:.2g}x"


def _three_digits(x: float) -> str:
    """`1.23`, `12.3`, `123`; whole numbers keep all their digits, `1023`."""
    decimals = 2 if abs(x) < 9.995 else 1 if abs(x) < 99.95 else 0
    return f"{x:.{decimals}f}"
