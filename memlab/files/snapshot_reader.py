"""A CUDA memory snapshot (`torch.cuda.memory._dump_snapshot`) as a `Trace`.

The history of events gives what was allocated and released, each allocation's stack the place; the segments, as they
were in the end, give what was there all along.

Rule 1. The sizes are those that were asked for, which is all that events tell.
Rule 2. Memory is in use until its release is requested, as in `torch.cuda.memory_allocated`.
Rule 3. What is released, or there in the end, without having been allocated in the history was there from tick 0.
Rule 4. An allocation at an address in use shows that a release is missing: what was there ends then.
Rule 5. An operator is a run of allocations from one place; releases do not begin one.
Rule 6. All that is used is checked first, and nothing else is looked at. No list is walked twice for being shared.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..trace import CATEGORIES, Allocation, Operator, Place, Trace
from ..units import format_bytes
from .checks import WrongError, get, get_number, shown
from .pickles import plain_values
from .stacks import Stacks

_HIGHEST = 2**64  # of an address
_MOST_EVENTS = 2**22
_CATEGORIES = {name: name for name in CATEGORIES} | {  # the others are the names of torch.profiler's memory timeline
    "parameter": "parameters",
    "gradient": "gradients",
    "optimizer_state": "optimizer state",
    "input": "batch",
    "activation": "activations",
    "temporary": "temporaries",
}
_NAMED = 3  # failed allocations that get a note each


def snapshot_trace(content: bytes) -> Trace:
    """The trace of one device in a snapshot: the one with the most events. Raises WrongError."""
    snapshot = plain_values(content)
    histories = get(snapshot, "device_traces", list, "the pickle")
    for device, history in enumerate(histories):
        if type(history) is not list:
            raise WrongError(f'"device_traces"[{device}] is {shown(history)}, where a list should stand')
    segments = _segments(get(snapshot, "segments", list, "the pickle"))
    device = _busiest(histories, segments)
    history = histories[device] if device < len(histories) else []
    if len(history) > _MOST_EVENTS:
        raise WrongError(f"it has {len(history):,} events, and this memlab reads {_MOST_EVENTS:,}")
    mine = [segment for segment in segments if segment.device == device]

    recorded = any(type(event) is dict and event.get("frames") for event in history)
    replay = _Replay(Stacks(recorded))
    for number, event in enumerate(history):
        replay.event(event, f"device_traces[{device}][{number}]")
    for segment in mine:
        for block in segment.blocks:
            replay.final(block)
    trace = Trace(
        allocations=tuple(replay.ended()),
        operators=tuple(Operator(run.place, run.tick, run.seconds) for run in replay.runs),
        saved=(),
        strategy="CUDA memory snapshot",
        allocator=True,
        absent=tuple(_absent(replay, recorded)),
        notes=tuple(_notes(replay, device, histories, segments)),
        provenance={"device": "cuda", "device_index": device},
    )
    return _of_memlab(trace, snapshot) if "memlab" in snapshot else trace


def _of_memlab(trace: Trace, snapshot: dict[str, Any]) -> Trace:
    """The trace of a snapshot that memlab wrote: what it says of itself."""
    said = get(snapshot, "memlab", dict, "the pickle")
    source = get(said, "source", str, '"memlab"')
    if source not in ("measured", "simulated"):
        raise WrongError(f'"memlab"["source"] is {shown(source)}, neither "measured" nor "simulated"')
    return dataclasses.replace(
        trace,
        strategy=get(said, "strategy", str, '"memlab"')[:1000],
        source=source,
        allocator=get(said, "allocator", bool, '"memlab"'),
        absent=(
            *_sentences(said, "absent"),
            "what autograd saved, and shapes: a memory snapshot has no place for them",
        ),
        notes=_sentences(said, "notes"),
        provenance={"device": get(said, "device", str, '"memlab"')[:1000]},
    )


def _sentences(said: dict[str, Any], key: str) -> tuple[str, ...]:
    sentences = get(said, key, list, '"memlab"')
    for sentence in sentences:
        if type(sentence) is not str:
            raise WrongError(f'"memlab"["{key}"] holds {shown(sentence)}, where text should stand')
    return tuple(sentences)


def _busiest(histories: list[Any], segments: list[_Segment]) -> int:
    """The device with the most events; where there are none, that with the most memory."""
    reserved: dict[int, int] = {}
    for segment in segments:
        reserved[segment.device] = reserved.get(segment.device, 0) + segment.nbytes
    devices = {*range(len(histories)), *reserved} or {0}
    events = {device: len(history) for device, history in enumerate(histories)}
    busiest: int = max(sorted(devices), key=lambda device: (events.get(device, 0), reserved.get(device, 0)))
    return busiest


# -- segments ----------------------------------------------------------------------------------------------------------


class _Block(NamedTuple):
    """A block in use in the end."""

    address: int
    nbytes: int
    row: Any
    where: str


class _Segment(NamedTuple):
    device: int
    address: int
    nbytes: int
    blocks: list[_Block]
    rounding: int  # bytes that its blocks have above what was asked for


def _segments(rows: list[Any]) -> list[_Segment]:
    spans = []
    for number, row in enumerate(rows):
        where = f"segments[{number}]"
        device, address = get_number(row, "device", where, 2**16), get_number(row, "address", where, _HIGHEST)
        spans.append((device, address, get_number(row, "total_size", where), number))
    ordered = sorted(spans)
    for (device, address, nbytes, one), (other_device, other, _, two) in itertools.pairwise(ordered):
        if device == other_device and address + nbytes > other:
            raise WrongError(f"segments[{one}] and segments[{two}] overlap")
    seen: set[int] = set()
    found = []
    for device, address, nbytes, number in spans:
        blocks = get(rows[number], "blocks", list, f"segments[{number}]")
        if id(blocks) in seen:
            raise WrongError(f"segments[{number}] shares its blocks with another segment")
        seen.add(id(blocks))
        found.append(_tiled(_Segment(device, address, nbytes, [], 0), blocks, f"segments[{number}]"))
    return found


def _tiled(segment: _Segment, rows: list[Any], inside: str) -> _Segment:
    """The segment with its blocks in use; those and the free ones must follow one another and fill it."""
    at, rounding = segment.address, 0
    for number, row in enumerate(rows):
        where = f"{inside}.blocks[{number}]"
        size, state = get_number(row, "size", where), get(row, "state", str, where)
        if not size or ("address" in row and get_number(row, "address", where, _HIGHEST) != at):
            raise WrongError(f"{where} does not begin where the block before it ends")
        if state == "active_allocated":
            asked, row = _asked(row, size, where)
            segment.blocks.append(_Block(at, asked, row, where))
            rounding += size - asked
        at += size
    if at != segment.address + segment.nbytes:
        raise WrongError(f"the blocks of {inside} add up to {at - segment.address:,} bytes of {segment.nbytes:,}")
    return segment._replace(rounding=rounding)


def _asked(row: Any, size: int, where: str) -> tuple[int, Any]:
    """Bytes that were asked for, and where the frames are: in old snapshots both are in the block's history."""
    key = "requested_size"
    if "history" in row:
        history = get(row, "history", list, where)
        if history:
            row, key, where = history[0], "real_size", f"{where}.history[0]"
    return (get_number(row, key, where, size) if type(row) is not dict or key in row else size), row


# -- events ------------------------------------------------------------------------------------------------------------


@dataclass
class _Life:
    nbytes: int
    category: str
    place: Place
    born: int
    operator: int
    name: str = ""
    freed: int | None = None


@dataclass
class _Run:
    place: Place
    tick: int
    seconds: float


@dataclass
class _Replay:
    """The history, event by event."""

    stacks: Stacks
    lives: list[_Life] = field(default_factory=list)
    runs: list[_Run] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    unknown: set[str] = field(default_factory=set)  # actions
    tick: int = 0
    cut: int = 0  # releases of what was there before the history
    missing: int = 0  # releases that the history lacks
    categories: bool = False
    mapped: int = 0  # bytes of segments by which the history grew
    most_mapped: int = 0
    _alive: dict[int, _Life] = field(default_factory=dict)  # by address
    _start_us: int | None = None

    def event(self, event: Any, where: str) -> None:
        action = get(event, "action", str, where)
        if action == "alloc":
            self._allocate(event, where)
        elif action in ("free_requested", "free_completed"):
            self._release(event, where, action == "free_requested")
        elif action in ("segment_alloc", "segment_map", "segment_free", "segment_unmap"):
            sign = 1 if action in ("segment_alloc", "segment_map") else -1
            self.mapped += sign * get_number(event, "size", where)
            self.most_mapped = max(self.most_mapped, self.mapped)
        elif action == "oom":
            self._fail(event, where)
        elif action != "snapshot":
            self.unknown.add(action[:40])

    def _allocate(self, event: Any, where: str) -> None:
        address, nbytes = get_number(event, "addr", where, _HIGHEST), get_number(event, "size", where)
        place, resident = self.stacks.place(event, where)
        if address in self._alive:  # Rule 4
            self.missing += 1
            self._alive.pop(address).freed = self.tick + 1
        if resident and not self.tick:
            life = self._older(event, nbytes, place, where)
        else:
            self.tick += 1
            if not self.runs or self.runs[-1].place != place:
                self.runs.append(_Run(place, 0, 0.0))
            self._go_on(event, where)
            life = _Life(nbytes, self._category(event, where), place, self.tick, len(self.runs) - 1)
            life.name = self._name(event, where)
        self.lives.append(life)
        self._alive[address] = life

    def _release(self, event: Any, where: str, requested: bool) -> None:
        address = get_number(event, "addr", where, _HIGHEST)
        life = self._alive.pop(address, None)
        if life is None and not requested:
            return  # the end of a release that was requested, here or before the history
        if life is None:
            self.cut += 1
            life = _Life(get_number(event, "size", where), "other", Place(), 0, -1)
            self.lives.append(life)
        self.tick += 1
        life.freed = self.tick
        self._go_on(event, where)

    def _go_on(self, event: Any, where: str) -> None:
        """The operator that runs now lasts beyond this tick."""
        if self.runs:
            self.runs[-1].tick = self.tick + 1
            if "time_us" in event:
                time = get_number(event, "time_us", where)
                self._start_us = time if self._start_us is None else self._start_us
                self.runs[-1].seconds = max((time - self._start_us) / 1e6, self.runs[-1].seconds)

    def _older(self, row: Any, nbytes: int, place: Place, where: str) -> _Life:
        """What was there before the history."""
        return _Life(nbytes, self._category(row, where), place, 0, -1, self._name(row, where))

    def final(self, block: _Block) -> None:
        """A block in use in the end."""
        if block.address not in self._alive:
            place, _ = self.stacks.place(block.row, block.where)
            place = dataclasses.replace(place, phase="start")
            self.lives.append(self._older(block.row, block.nbytes, place, block.where))

    def _category(self, row: Any, where: str) -> str:
        if "category" not in row:
            return "other"
        self.categories = True
        return _CATEGORIES.get(get(row, "category", str, where), "other")

    def _name(self, row: Any, where: str) -> str:
        return "" if row.get("user_metadata") is None else get(row, "user_metadata", str, where)[:1000]

    def _fail(self, event: Any, where: str) -> None:
        place, _ = self.stacks.place(event, where)
        asked, free = get_number(event, "size", where), get_number(event, "device_free", where, _HIGHEST)
        at = f"at {place.source}" if place.source else f"after {self.tick:,} allocations and releases"
        self.failed.append(f"out of memory {at}: {format_bytes(asked)} requested, {format_bytes(free)} free")

    def ended(self) -> list[Allocation]:
        return [
            Allocation(
                life.nbytes,
                life.category,
                life.place,
                life.born,
                life.freed,
                life.operator,
                None if life.category in ("workspace", "rounding") else number,
                life.name,
            )
            for number, life in enumerate(self.lives)
        ]


# -- what a reader should know -----------------------------------------------------------------------------------------


def _absent(replay: _Replay, recorded: bool) -> list[str]:
    found = ["modules, micro-batches, shapes and what autograd saved: a CUDA memory snapshot has none of them"]
    if not replay.categories:
        found.append("categories: the snapshot has none, and all bytes are called other")
    if not recorded:
        found.append("places: the snapshot has no stacks, and all that ran is called forward")
    found.append("rounding: sizes are those that were asked for; the allocator's blocks are larger")
    if replay.cut:
        found.append(
            f"the beginning: of {replay.cut:,} released blocks the history lacks the allocation, and they count as "
            "there from the start; _record_memory_history keeps the last max_entries events"
        )
    if replay.missing:
        found.append(f"the release of {replay.missing:,} blocks: something else was allocated in their place")
    if replay.unknown:
        found.append(f"events of kinds that memlab does not know: {', '.join(sorted(replay.unknown)[:_NAMED])}")
    found.append("the CUDA context and memory that libraries take outside PyTorch's allocator")
    return found


def _notes(replay: _Replay, device: int, histories: list[Any], segments: list[_Segment]) -> list[str]:
    found = replay.failed[:_NAMED]
    if len(replay.failed) > _NAMED:
        found.append(f"out of memory {len(replay.failed) - _NAMED:,} more times")
    others = [number for number, history in enumerate(histories) if history and number != device]
    if others:
        more = ", ".join(map(str, others[:_NAMED])) + (", ..." if len(others) > _NAMED else "")
        found.append(f"this is device {device}, which has the most events; there are events of {more} too")
    mine = [segment for segment in segments if segment.device == device]
    reserved = sum(segment.nbytes for segment in mine)
    most = max(reserved, reserved - replay.mapped + replay.most_mapped)
    rounding = sum(segment.rounding for segment in mine)
    found.append(
        f"reserved from the device: {format_bytes(reserved)} in the end, {format_bytes(most)} at most; blocks in use "
        f"in the end are {format_bytes(rounding)} larger than what was asked for"
    )
    return found
