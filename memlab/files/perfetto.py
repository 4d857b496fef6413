"""A `Trace` as trace events, the JSON that Perfetto (ui.perfetto.dev) and chrome://tracing open.

Memory is a counter with a value for each category, which chrome://tracing stacks and Perfetto shows beneath one
another; a second counter has their sum. Steps, phases, modules and operators are slices in one another, and the peak is
an instant that says what it is.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

from ..trace import CATEGORIES, Place, Trace
from ..views.words import figure_summary, operator_name
from .instants import changes, has_clock, instants

_HERE = {"pid": 1, "tid": 1}
_DEEPEST = 30  # slices of modules in one another

Event = dict[str, Any]
Key = tuple[str, int]  # a slice's name, and a number that keeps it apart from one of the same name beside it
Row = tuple[tuple[Key, ...], int, int]  # an operator: the slices around it and its own, its begin and its end


def perfetto_json(trace: Trace) -> bytes:
    """The trace events of one trace, in microseconds; what it is and where it was measured in `otherData`."""
    steps = changes(trace)
    ends, ticks = instants(trace, len(steps))
    events = [*_names(trace), *_slices(_rows(trace, ends)), *_counters(trace, ticks), _peak(trace, ticks)]
    operators = "operators end when they ended in the run" if has_clock(trace) else "an operator takes one microsecond"
    about = {
        "strategy": trace.strategy,
        "source": trace.source,
        "time": f"{operators}; allocations and releases are spread evenly inside of their operator",
        "absent": trace.absent,
        "notes": trace.notes,
        "provenance": trace.provenance,
    }
    values = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}
    return json.dumps(values, allow_nan=False, default=str, separators=(",", ":")).encode("ascii")


def _names(trace: Trace) -> Iterator[Event]:
    names = {"process_name": f"memlab: {trace.strategy}, {trace.source}", "thread_name": "phases, modules, operators"}
    for kind, name in names.items():
        yield {"ph": "M", "name": kind, **_HERE, "args": {"name": name}}


# -- slices ------------------------------------------------------------------------------------------------------------


def _rows(trace: Trace, ends: list[int]) -> list[Row]:
    places = [operator.place for operator in trace.operators]
    steps = len({place.step for place in places}) > 1
    rows = zip(places, itertools.pairwise([0, *ends]), strict=True)
    return [(_path(place, number, steps), begin, end) for number, (place, (begin, end)) in enumerate(rows)]


def _path(place: Place, number: int, steps: bool) -> tuple[Key, ...]:
    """Step (where there are several), phase, the modules one in the other, the operator."""
    parts = place.module.split(".", _DEEPEST) if place.module else []
    phase = place.phase if place.phase == "optimizer" else f"{place.phase} of micro-batch {place.micro_batch + 1}"
    around = [f"step {place.step + 1}"] * steps + [phase, *itertools.accumulate(parts, "{}.{}".format)]
    return (*((name, -1) for name in around), (operator_name(place) or "operator", number))


def _slices(rows: list[Row]) -> Iterator[Event]:
    """Neighbours that share a slice around them, in one; outer slices come before what is in them."""
    for (name, _), group in itertools.groupby(rows, key=lambda row: row[0][0]):
        inside = list(group)
        begin, end = inside[0][1], inside[-1][2]
        yield {"ph": "X", "name": name, **_HERE, "ts": begin / 1000, "dur": (end - begin) / 1000}
        yield from _slices([(path[1:], begin, end) for path, begin, end in inside if len(path) > 1])


# -- counters ----------------------------------------------------------------------------------------------------------


def _counters(trace: Trace, ticks: list[int]) -> Iterator[Event]:
    present = {allocation.category for allocation in trace.allocations}
    alive = {category: 0 for category in CATEGORIES if category in present}
    for at, (released, allocated) in zip(ticks, changes(trace), strict=True):
        for allocation in released:
            alive[allocation.category] -= allocation.nbytes
        for allocation in allocated:
            alive[allocation.category] += allocation.nbytes
        if released or allocated:
            yield {"ph": "C", "name": "memory", **_HERE, "ts": at / 1000, "args": dict(alive)}
            yield {"ph": "C", "name": "memory in all", **_HERE, "ts": at / 1000, "args": {"bytes": sum(alive.values())}}


def _peak(trace: Trace, ticks: list[int]) -> Event:
    at = ticks[min(trace.peak.tick, len(ticks) - 1)] / 1000
    args = {"bytes": trace.peak_bytes, **trace.by_category()}
    return {"ph": "i", "s": "g", "name": figure_summary(trace), **_HERE, "ts": at, "args": args}
