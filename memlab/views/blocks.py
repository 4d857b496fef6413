"""The blocks of a network, as a person would name its parts, from the names of modules alone.

A block is the part of a name up to its first number (`blocks.3` of `blocks.3.attn.qkv`, `model.layers.0` of
`model.layers.0.mlp`). A name without number is cut where it leaves the way to numbered ones: beside
`bert.encoder.layer.0`, `bert.pooler.dense` is of `bert.pooler`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from ..trace import Trace

Row = TypeVar("Row")
NOWHERE = "(no module)"


def block_names(trace: Trace) -> dict[str, str]:
    """The block of each module that the trace names, in the order of the forward pass; what is outside modules
    is of `NOWHERE`."""
    forward = [operator.place.module for operator in trace.operators if operator.place.phase == "forward"]
    owners = [allocation.place.module for allocation in trace.allocations]
    saved = [tensor.module for tensor in trace.saved]
    names = list(dict.fromkeys([*forward, *saved, *owners]))
    numbered = {name: _to_number(name.split(".")) for name in names}
    above = {tuple(parts[:n]) for parts in numbered.values() if parts for n in range(1, len(parts))}
    return {name: ".".join(numbered[name] or _beside(name.split("."), above)) or NOWHERE for name in names}


def _to_number(parts: list[str]) -> list[str]:
    """The parts up to the first number; none where there is none."""
    return next((parts[: n + 1] for n, part in enumerate(parts) if part.isdecimal()), [])


def _beside(parts: list[str], above: set[tuple[str, ...]]) -> list[str]:
    return next((parts[:n] for n in range(1, len(parts) + 1) if tuple(parts[:n]) not in above), parts)


def pattern(name: str) -> str:
    """The name with `*` for its first number: equal for the same layer of each block."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name, count=1)


def runs(rows: Sequence[Row], look: Callable[[Row], Hashable], most: int) -> list[list[Row]]:
    """The rows in order, each in a list of its own; where they are more than `most`, three or more neighbours that
    look alike are in one list, and what is in the middle of a chain that is still too long is too."""
    if len(rows) <= most:
        return [[row] for row in rows]
    found: list[list[Row]] = []
    for row in rows:
        if found and look(found[-1][0]) == look(row):
            found[-1].append(row)
        else:
            found.append([row])
    single = [run for alike in found for run in ([alike] if len(alike) > 2 else [[row] for row in alike])]
    if len(single) <= 2 * most:
        return single
    middle = [row for run in single[most : 1 - most] for row in run]
    return [*single[:most], middle, *single[1 - most :]]


def span(names: Iterable[str]) -> str:
    """`blocks.2 … blocks.9`, or the name alone."""
    first, *others = names
    return f"{first} … {others[-1]}" if others else first
