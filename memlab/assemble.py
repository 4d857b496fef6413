"""From what the instruments noted to a `Trace`: where each operator ran, what role each storage had, when it lived.

Rule 1. Roles that the recorder gave (parameter, gradient, ...) stand. The others follow from how a storage came about
        and who held it.
Rule 2. A cast of a parameter, made in a forward pass, is a weight copy.
Rule 3. A storage made by recomputation that is still there when backward goes on is an activation.
Rule 4. What runs outside modules between a step's last backward and its optimizer (clipping, unscaling) is the
        optimizer's.
Rule 5. What belongs to a parameter (its gradient, its state) counts for the parameter's module, whoever made it.
"""

from __future__ import annotations

import functools
import itertools
import math
import platform
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from . import ledger
from .allocator import Event
from .clock import FORWARD, OPTIMIZER, RECOMPUTE, Clock
from .lives import Lives, by_log, joined
from .trace import PHASES, Allocation, Growth, Operator, Place, SavedTensor, Trace
from .tracker import Storage, Tracker

UNLISTENED = "workspace inside operators: record with allocator=True to see it"
_NUMBER = 16  # bytes: `x / 2` wraps the 2 as a tensor in C++, which no operator makes; a loss scaler counts in such

_place = functools.lru_cache(maxsize=4096)(Place)  # many operators run in one place, and one object serves them all


@dataclass(frozen=True)
class Saved:
    """An entry of the ledger, without its tensor."""

    entry: ledger.Entry
    storage: Storage | None
    nbytes: int
    operator: int  # operators that had run
    entered: int  # entries to backward before this one
    module: str
    source: str | None


@dataclass(frozen=True)
class Recorded:
    """All that the instruments noted. `events` is None where the allocator was not listened to."""

    device: torch.device
    clock: Clock
    tracker: Tracker
    events: list[Event] | None
    saved: list[Saved]
    opaque: set[str]
    growth: tuple[Growth, ...]
    start_ns: int
    reserved: int


def assembled(
    recorded: Recorded, strategy: str = "baseline", notes: Iterable[str] = (), absent: Iterable[str] = ()
) -> Trace:
    """The trace of a recording that has ended."""
    tracker, listened = recorded.tracker, recorded.events is not None
    places = _places(recorded)
    lives = by_log(tracker) if recorded.events is None else joined(tracker, recorded.events)
    roles = _roles(recorded, places)
    allocations: list[Allocation] = []
    for storage in tracker.storages:
        role = roles[storage.number]
        here = storage.nbytes and storage.device == recorded.device.type and storage.number not in lives.foreign
        if here and (listened or role != "workspace"):
            allocations += _allocations(storage, role, places, lives)
    allocations += _workspace(lives, places)
    work = tracker.work or itertools.repeat((), len(places))
    return Trace(
        allocations=tuple(allocations),
        operators=tuple(
            Operator(place, tick, (row[2] - recorded.start_ns) / 1e9, *work)
            for place, tick, row, work in zip(places, lives.operator_ticks, tracker.operators, work, strict=True)
        ),
        saved=tuple(_saved_tensors(recorded, roles, places)),
        strategy=strategy,
        allocator=listened,
        absent=(*_absent(recorded), *absent),
        notes=tuple(notes),
        provenance=_provenance(recorded),
        step_ends=tuple(recorded.clock.step_ends),
        growth=recorded.growth,
    )


def _places(recorded: Recorded) -> list[Place]:
    """Where each operator ran."""
    clock = recorded.clock
    backward_ends, step_ends = clock.backward_ends, clock.step_ends
    places, step, passes, first_pass = [], 0, 0, 0
    for number, (function, (phase, module, source), _, _) in enumerate(recorded.tracker.operators):
        while passes < len(backward_ends) and backward_ends[passes] <= number:
            passes += 1
        while step < len(step_ends) and step_ends[step] <= number:
            step, first_pass = step + 1, passes
        module, source = clock.resolved(module, source)
        if phase == FORWARD and not module and _prepares_update(passes, first_pass, backward_ends, step_ends[step:]):
            phase = OPTIMIZER
        micro_batch = 0 if phase == OPTIMIZER else passes - first_pass
        places.append(_place(PHASES[phase], module, function.name().partition(".")[0], micro_batch, step, source))
    return places


def _prepares_update(passes: int, first_pass: int, backward_ends: list[int], step_ends: list[int]) -> bool:
    """Whether the last of a step's backward passes is over and its optimizer still to come (Rule 4)."""
    following = backward_ends[passes] if passes < len(backward_ends) else math.inf
    return bool(step_ends) and passes > first_pass and following > step_ends[0]


def is_number(storage: Storage) -> bool:
    """Whether a storage that is nobody's is one number, wrapped for or kept by a library."""
    return storage.nbytes <= _NUMBER and not storage.shape


# -- roles -------------------------------------------------------------------------------------------------------------


def _roles(recorded: Recorded, places: list[Place]) -> list[str]:
    held = [(saved.storage, saved.entry.checkpoint_input) for saved in recorded.saved if saved.storage is not None]
    direct = {storage.number for storage, is_input in held if not is_input} | _survivors(recorded.tracker)
    inputs = {storage.number for storage, is_input in held if is_input}
    storages = recorded.tracker.storages

    def role(storage: Storage) -> str:
        if storage.role:
            return storage.role
        source = None if storage.cast_of is None else storages[storage.cast_of]
        phase = places[storage.operator].phase if 0 <= storage.operator < len(places) else "forward"
        if source is not None and source.role == "parameters" and phase in ("forward", "recompute"):
            return "weight copies"
        if storage.number in direct:
            return "activations"
        if storage.number in inputs:
            return "checkpoint inputs"
        if storage.operator < 0:  # older than the recording, and nobody's that we know
            return "workspace" if is_number(storage) else "other"
        return "temporaries"

    return [role(storage) for storage in storages]


def _survivors(tracker: Tracker) -> set[int]:
    """Storages made by recomputation and still there when backward's next operator has run (Rule 3)."""
    operators = tracker.operators
    resumes = [len(operators)] * len(operators)  # for each operator, the first one from it on that is no recompute
    following = len(operators)
    for number in range(len(operators) - 1, -1, -1):
        if operators[number][1][0] != RECOMPUTE:
            following = number
        resumes[number] = following
    found = set()
    for storage in tracker.storages:
        number = storage.operator
        if 0 <= number < len(operators) and operators[number][1][0] == RECOMPUTE:
            resumed = resumes[number]
            if resumed < len(operators) and (storage.died is None or storage.died >= operators[resumed][3]):
                found.add(storage.number)
    return found


# -- allocations -------------------------------------------------------------------------------------------------------


def _allocations(storage: Storage, role: str, places: list[Place], lives: Lives) -> Iterator[Allocation]:
    number = storage.operator
    place = places[min(number, len(places) - 1)] if number >= 0 and places else Place()
    if storage.owner:
        place = _place(place.phase, storage.owner, place.operator, place.micro_batch, place.step, place.source)
    born, freed = lives.born[storage.number], lives.freed.get(storage.number)
    dtype = str(storage.dtype).removeprefix("torch.")
    yield Allocation(
        storage.nbytes, role, place, born, freed, number, storage.number, storage.name, dtype, storage.shape
    )
    if rounding := lives.rounding.get(storage.number, 0):
        yield Allocation(rounding, "rounding", place, born, freed, number)


def _workspace(lives: Lives, places: list[Place]) -> Iterator[Allocation]:
    """Blocks that no storage names: an operator's own if they went with it, otherwise nobody's that we know."""
    for block in lives.workspace:
        place = places[block.operator] if places else Place()
        inside = block.freed is not None and block.freed < lives.operator_ticks[block.operator]
        category = "workspace" if inside or block.nbytes <= _NUMBER else "other"
        yield Allocation(block.nbytes, category, place, block.born, block.freed, block.operator)


def _saved_tensors(recorded: Recorded, roles: list[str], places: list[Place]) -> Iterator[SavedTensor]:
    slots: dict[tuple[int, int], list[str]] = {}
    for saved in recorded.saved:
        entry, storage = saved.entry, saved.storage
        place = places[min(saved.operator, len(places) - 1)] if places else Place()
        kind, state, earlier = "activations", entry.state, []
        if storage is not None:
            earlier = slots.setdefault((saved.entered, storage.number), [])
            kind = roles[storage.number]
            if storage.device != recorded.device.type:
                kind = state = "offloaded"
        yield SavedTensor(
            module=saved.module,
            operator=entry.node,
            slot=entry.slot,
            shape=entry.shape,
            dtype=entry.dtype,
            nbytes=saved.nbytes,
            storage=None if storage is None else storage.number,
            storage_bytes=0 if storage is None else storage.nbytes,
            kind=kind,
            state=state,
            shares_with=tuple(earlier),
            micro_batch=place.micro_batch,
            step=place.step,
            entry=saved.entered,
            source=saved.source,
        )
        earlier.append(entry.slot)


# -- what a reader should know -----------------------------------------------------------------------------------------


def _absent(recorded: Recorded) -> Iterator[str]:
    if recorded.events is None:
        yield UNLISTENED
    if not recorded.clock.step_ends:
        yield "optimizer state beyond what was there: no optimizer step ran here"
    if not recorded.clock.backward_ends:
        yield "what is saved for backward: no backward pass ran here"
    if recorded.opaque:
        yield (
            f"what some operators save ({', '.join(sorted(recorded.opaque))}; CopySlices: in-place writes to views): "
            "autograd lists none of it. Counted as theirs is whatever is alive when backward begins and nothing else "
            "explains"
        )
    if recorded.device.type == "cuda":
        yield "the CUDA context and memory that libraries take outside PyTorch's allocator"


def _provenance(recorded: Recorded) -> dict[str, Any]:
    device = recorded.device
    about: dict[str, Any] = {
        "device": device.type,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        about["device_name"] = torch.cuda.get_device_name(device)
        about["max_memory_allocated"] = torch.cuda.max_memory_allocated(device)
        about["max_memory_reserved"] = recorded.reserved
    return about
