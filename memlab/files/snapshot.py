"""A `Trace` as a memory snapshot: the pickle that PyTorch's own viewer (pytorch.org/memory_viz) opens.

Each allocation is an `alloc` event and, where it ends, the two of its release. What a snapshot has no field for stands
among the frames of its stack: a frame of the file `memlab/module` names the module, and so on.

Rule 1. The addresses are made up: the lowest gap of one segment that is large enough. Sizes are the trace's, to the
        byte.
Rule 2. What was there before the step is allocated first, with a frame `memlab/resident`.
Rule 3. Blocks tile the segment, and those in use are what is alive at the end.
Rule 4. The viewer fails where there are categories and none of them is "unknown": that is our "other", and that of the
        last event, which notes that the snapshot was taken.
"""

from __future__ import annotations

import pickle
import re
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

from ..trace import Allocation, Place, Trace
from .instants import changes, instants

_BASE = 0x7F0000000000  # where CUDA's addresses are about
_ALIGNED = 512  # blocks begin at multiples of it, as the caching allocator's do
_PAGE = 2**21
_LINE = re.compile(r"([^/\\]+):([0-9]{1,9}) in (.*)", re.DOTALL)  # of the user's code, as a `Place` has it
_PROTOCOL = 4  # the highest that the viewer reads

Row = dict[str, Any]


def snapshot_pickle(trace: Trace) -> bytes:
    """The snapshot of one trace, as of its end."""
    steps = changes(trace)
    _, ticks = instants(trace, len(steps))
    heap, stacks = _Heap(), _Stacks()
    events: list[Row] = []
    for at, (released, allocated) in zip(ticks, steps, strict=True):
        for allocation in released:
            address = heap.release(allocation)
            for action in ("free_requested", "free_completed"):
                events.append(_event(action, address, allocation.nbytes, at, stacks.of(allocation)))
        for allocation in allocated:
            event = _event("alloc", heap.allocate(allocation), allocation.nbytes, at, stacks.of(allocation))
            events.append(event | {"category": _category(allocation), "user_metadata": allocation.name})
    segment = _segment(heap, stacks)
    mapped = _event("segment_alloc", segment["address"], segment["total_size"], 0, [])
    taken = _event("snapshot", 0, segment["allocated_size"], ticks[-1], []) | {"category": "unknown"}
    snapshot = {
        "segments": [segment],
        "device_traces": [[mapped, *events, taken]],
        "allocator_settings": {},
        "external_annotations": [],
        "memlab": {
            "strategy": trace.strategy,
            "source": trace.source,
            "device": str(trace.provenance.get("device", "cpu")),
            "allocator": trace.allocator,
            "absent": list(trace.absent),
            "notes": list(trace.notes),
        },
    }
    return pickle.dumps(snapshot, _PROTOCOL)


def _event(action: str, address: int, nbytes: int, at: int, frames: list[Row]) -> Row:
    where = {"addr": address, "size": nbytes, "stream": 0, "pool_id": (0, 0)}
    return {"action": action, **where, "time_us": at // 1000, "frames": frames}


def _category(allocation: Allocation) -> str:
    return "unknown" if allocation.category == "other" else allocation.category


# -- stacks ------------------------------------------------------------------------------------------------------------


class _Stacks:
    """The frames of allocations, innermost first. Equal ones are one list, which a pickle holds once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Place, bool, str, str], list[Row]] = {}

    def of(self, allocation: Allocation) -> list[Row]:
        tensor = f"{allocation.dtype} {'x'.join(map(str, allocation.shape))}".strip()
        key = allocation.place, allocation.born == 0, allocation.category, tensor
        if key not in self._known:
            self._known[key] = list(_frames(*key))
        return self._known[key]


def _frames(place: Place, resident: bool, category: str, tensor: str) -> Iterator[Row]:
    line = _LINE.fullmatch(place.source or "")
    told = {
        "category": category,
        "tensor": tensor,
        "operator": place.operator,
        "module": place.module,
        "micro_batch": str(place.micro_batch + 1) if place.micro_batch else "",
        "phase": place.phase,
        "step": str(place.step + 1) if place.step else "",
        "resident": "there before the step" if resident else "",
        "source": "" if line else place.source,
    }
    for field, value in told.items():
        if value:
            yield {"filename": f"memlab/{field}", "line": 0, "name": value}
    if line:
        yield {"filename": line[1], "line": int(line[2]), "name": line[3]}


# -- addresses ---------------------------------------------------------------------------------------------------------


class _Heap:
    """Hands out addresses, the lowest gap first (Rule 1)."""

    def __init__(self) -> None:
        self.blocks: dict[int, Allocation] = {}  # in use, by address
        self.end = _BASE
        self._addresses: dict[int, int] = {}  # by the allocation's `id`
        self._gaps: list[tuple[int, int]] = []  # (address, size) below `end`, in order, no two of them neighbours

    def allocate(self, allocation: Allocation) -> int:
        size = _rounded(allocation.nbytes, _ALIGNED)
        for number, (address, room) in enumerate(self._gaps):
            if room >= size:
                self._gaps[number : number + 1] = [(address + size, room - size)] if room > size else []
                break
        else:
            address, self.end = self.end, self.end + size
        self.blocks[address] = allocation
        self._addresses[id(allocation)] = address
        return address

    def release(self, allocation: Allocation) -> int:
        address = self._addresses.pop(id(allocation))
        del self.blocks[address]
        start, end = address, address + _rounded(allocation.nbytes, _ALIGNED)
        number = bisect_left(self._gaps, (start, 0))
        first = last = number
        if number < len(self._gaps) and self._gaps[number][0] == end:
            end += self._gaps[number][1]
            last += 1
        if number and sum(self._gaps[number - 1]) == start:
            start = self._gaps[number - 1][0]
            first -= 1
        self._gaps[first:last] = [(start, end - start)]
        return address


def _rounded(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


def _segment(heap: _Heap, stacks: _Stacks) -> Row:
    """The one segment, and what of it is in use at the end (Rule 3)."""
    blocks: list[Row] = []
    reached = _BASE

    def gap(until: int) -> None:
        if until > reached:
            free = {"address": reached, "size": until - reached, "requested_size": 0}
            blocks.append(free | {"state": "inactive", "frames": []})

    for address, allocation in sorted(heap.blocks.items(), key=lambda item: item[0]):
        gap(address)
        size = _rounded(allocation.nbytes, _ALIGNED)
        used = {"address": address, "size": size, "requested_size": allocation.nbytes}
        blocks.append(used | {"state": "active_allocated", "frames": stacks.of(allocation)})
        reached = address + size
    total = max(_rounded(heap.end - _BASE, _PAGE), _PAGE)
    gap(_BASE + total)
    in_use = sum(block["size"] for block in blocks if block["state"] == "active_allocated")
    return {
        "device": 0,
        "address": _BASE,
        "total_size": total,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "allocated_size": in_use,
        "active_size": in_use,
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }
