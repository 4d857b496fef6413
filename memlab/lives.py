"""From when to when each storage lived, in ticks: by the tracker's log alone, or joined with the allocator's events.

The join needs no clock. When operator k ends it leaves a marker, and each storage that it made names, by its address,
exactly one open block of the allocator's. A block that no storage names is the operator's own: workspace.

An operator's time runs until the next allocation, or until the next operator ends: what is released between two
operators (autograd dropping what it saved, gradients set to None) ends the first one and does not begin the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .allocator import Event
from .tracker import Storage, Tracker


@dataclass
class Block:
    """One block of the allocator's, alive for `born <= tick < freed`."""

    nbytes: int
    born: int
    freed: int | None = None
    operator: int = -1  # in which, or before which, it was allocated; -1: after the last
    owner: Storage | None = None


@dataclass
class Lives:
    """Lives of storages, by their number.

    born, freed:    ticks (`freed` has no entry for what never died)
    rounding:       bytes that the storage's block has above the storage's own
    foreign:        storages that have no memory of their own: the allocator did not give it (numpy's, a file's), or it
                    is counted as that of the sum which takes a gradient's place
    workspace:      blocks that no storage names
    operator_ticks: the first tick after each operator
    """

    born: dict[int, int] = field(default_factory=dict)
    freed: dict[int, int] = field(default_factory=dict)
    rounding: dict[int, int] = field(default_factory=dict)
    foreign: set[int] = field(default_factory=set)
    workspace: list[Block] = field(default_factory=list)
    operator_ticks: list[int] = field(default_factory=list)


def by_log(tracker: Tracker) -> Lives:
    """Lives from the tracker alone: an entry of its log is a tick."""
    lives = Lives()
    for storage in tracker.storages:
        lives.born[storage.number] = 0 if storage.operator < 0 else storage.born + 1
        if storage.died is not None:
            lives.freed[storage.number] = storage.died + 1
    allocates = [entry > 0 for entry in tracker.log]
    lives.operator_ticks = _until_next_allocation([row[3] + 1 for row in tracker.operators], allocates)
    _continue(lives, tracker, allocates)
    return lives


def joined(tracker: Tracker, events: Sequence[Event]) -> Lives:
    """Lives from the allocator's events, each block given to the storage that its address names."""
    lives = Lives()
    made_by: dict[int, list[Storage]] = {}
    for storage in tracker.storages:
        made_by.setdefault(storage.operator, []).append(storage)
    blocks: list[Block] = []
    open_blocks: dict[int, Block] = {}
    ends: list[int] = []
    allocates: list[bool] = []
    unplaced = 0  # index of the first block that no operator has ended after
    marks = iter(tracker.mark_of)
    for event in events:
        tick = len(allocates) + 1
        if event.nbytes > 0:
            block = open_blocks[event.ptr] = Block(event.nbytes, tick)
            blocks.append(block)
            allocates.append(True)
        elif event.nbytes < 0:
            released = open_blocks.pop(event.ptr, None)
            if released is not None:
                released.freed = tick
                allocates.append(False)
        else:
            kind, number = next(marks)
            if kind == "operator":
                _claim(made_by.get(number, ()), open_blocks)
                for block in blocks[unplaced:]:
                    block.operator = number
                unplaced = len(blocks)
                ends.append(tick)
            elif kind == "met":
                _claim([tracker.storages[number]], open_blocks)
            else:  # a storage older than the recording died: the allocator does not report it
                lives.freed[number] = tick
                allocates.append(False)
    lives.operator_ticks = _until_next_allocation(ends, allocates)
    _fill(lives, blocks, tracker.storages)
    _continue(lives, tracker, allocates)
    return lives


def _claim(storages: Sequence[Storage], open_blocks: dict[int, Block]) -> None:
    for storage in storages:
        block = open_blocks.get(storage.ptr) if storage.nbytes else None
        if block is not None and block.owner is None:
            block.owner = storage


def _fill(lives: Lives, blocks: list[Block], storages: list[Storage]) -> None:
    for block in blocks:
        if block.owner is None:
            lives.workspace.append(block)
            continue
        number = block.owner.number
        lives.born[number] = block.born
        lives.rounding[number] = block.nbytes - block.owner.nbytes
        if block.freed is not None:
            lives.freed[number] = block.freed
    for storage in storages:
        if storage.number not in lives.born:
            lives.born[storage.number] = 0
            if storage.operator >= 0:
                lives.foreign.add(storage.number)


def _continue(lives: Lives, tracker: Tracker, allocates: list[bool]) -> None:
    """Have sums that the engine would have put in a gradient's place (see `accumulation.py`) live there from the
    gradient's birth on. Only where the gradient did go at once, with nothing allocated in between."""
    for first, total in tracker.continued.items():
        gone, born = lives.freed.get(first), lives.born[total]
        if gone is not None and gone > born and not any(allocates[born : gone - 1]):
            lives.born[total] = lives.born[first]
            lives.foreign.add(first)
            tracker.storages[total].operator = tracker.storages[first].operator


def _until_next_allocation(ends: list[int], allocates: list[bool]) -> list[int]:
    """Each end moved to the first tick from it on that allocates, but not past the next operator's end."""
    following = [len(allocates) + 1] * (len(allocates) + 2)
    for tick in range(len(allocates), 0, -1):
        following[tick] = tick if allocates[tick - 1] else following[tick + 1]
    afters = [*ends, len(allocates) + 1][1:]
    return [min(following[end], after) for end, after in zip(ends, afters, strict=True)]
