"""When things happen in a trace, for files whose readers want a clock and every event in its order."""

from __future__ import annotations

from ..trace import Allocation, Trace

_MICROSECOND = 1000  # nanoseconds


def has_clock(trace: Trace) -> bool:
    """Whether the seconds of its operators were measured; otherwise an operator takes a microsecond here."""
    return trace.source != "simulated"


def changes(trace: Trace) -> list[tuple[list[Allocation], list[Allocation]]]:
    """For each tick what is released at it and then what is allocated. In this order no sum on the way is higher than
    those after whole ticks."""
    lasting = [a for a in trace.allocations if a.nbytes and a.freed != a.born]
    ticks = max((max(a.born, a.freed or 0) for a in lasting), default=0) + 1
    found: list[tuple[list[Allocation], list[Allocation]]] = [([], []) for _ in range(ticks)]
    for allocation in lasting:
        found[allocation.born][1].append(allocation)
        if allocation.freed is not None:
            found[allocation.freed][0].append(allocation)
    return found


def instants(trace: Trace, ticks: int) -> tuple[list[int], list[int]]:
    """Nanoseconds at which each of its operators ends, and at which each of its first `ticks` ticks falls.

    Tick 0 is at 0. Ticks rise, and lie inside of their operator, which runs from the end of the one before it; where
    the clock was too coarse for that, an operator is as long as its ticks need.
    """
    ends: list[int] = []
    at = list(range(min(ticks, 1)))
    begin = 0
    for number, operator in enumerate(trace.operators, 1):
        last = number == len(trace.operators)
        inside = max((ticks if last else min(operator.tick, ticks)) - len(at), 0)
        told = round(operator.seconds * 1e9) if has_clock(trace) else number * _MICROSECOND
        end = max(told, begin + inside + 1)
        at += [begin + (end - begin) * n // (inside + 1) for n in range(1, inside + 1)]
        ends.append(end)
        begin = end
    at += [tick * _MICROSECOND for tick in range(len(at), ticks)]  # of a trace without operators
    return ends, at
