"""A chain of blocks, and what any choice of checkpoints among them costs, without running each choice.

    chain = Chain.of(step)                      # four steps are measured, whatever the number of blocks
    schedule(chain, (True, False, True, True))  # every pass in order: what is alive, and how high memory rises
    best(chain)                                 # the placement of least memory; `pareto` has all that are sensible

Rules:

1. Every block is measured kept and checkpointed, each behind a kept and behind a checkpointed neighbour: which of two
   neighbours lets go of the tensor between them last depends on both. A schedule strings these passes together.
2. A placement is a tuple of *regions*, each a tuple of consecutive blocks that are checkpointed as one: `((0,), (2,
   3))`. Flags, one for each block, are a placement of single blocks. The other blocks are kept.
3. Peaks are those of the traces that the chain was made from (tensor bytes, as measured): for single blocks to the
   byte. Regions of several blocks are put together from single ones: to the byte where blocks save their own inputs,
   otherwise off by the size of such an input; and by a bias (16 B in our tests) whose gradient is born elsewhere.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from .errors import MemlabError
from .measure import Stage, trace
from .passes import Cut, Pass, Passes, in_order
from .step import TrainingStep
from .strategies import Baseline, Checkpoint, Strategy, regions
from .trace import Trace
from .units import format_bytes, parse_bytes

Region: TypeAlias = tuple[int, ...]
Regions: TypeAlias = tuple[Region, ...]
Held: TypeAlias = Mapping[tuple[str, int], int]


@dataclass(frozen=True)
class Block:
    """One block of a chain; sizes in bytes.

    output_bytes:   the boundary: its output, which is the next block's input
    saved_bytes:    what it saves for backward when it is kept, beside input and output
    random_bytes:   what a checkpoint keeps beside its input: the states of random streams
    kept, checkpointed: its passes, [0] behind a kept block and [1] behind a checkpointed one (Rule 1)
    """

    name: str
    output_bytes: int
    saved_bytes: int
    random_bytes: int
    kept: tuple[Passes, Passes] = field(repr=False)
    checkpointed: tuple[Passes, Passes] = field(repr=False)

    @property
    def gradient_bytes(self) -> int:
        """Of its parameters."""
        return self.kept[0].backward.gradients

    @property
    def temporary_bytes(self) -> int:
        """What its forward pass needs at its highest, beyond what it leaves."""
        return self.kept[0].forward.rise - self.kept[0].forward.change

    @property
    def recompute_work(self) -> int:
        """Operations of a second run, which ends with the last tensor that backward needs."""
        return self.checkpointed[0].recompute.work


@dataclass(frozen=True)
class Chain:
    """Blocks that run one after the other, and what stands around them; sizes in bytes.

    resident_bytes: there when the step begins: parameters, optimizer state, buffers, the batch
    input_bytes:    the first block's input; 0 where it is the batch itself
    work:           operations of the plain step
    before, after:  passes over what stands before the first block and after the last, [0] beside a kept block and
                    [1] beside a checkpointed one
    update:         the optimizer step
    """

    blocks: tuple[Block, ...]
    resident_bytes: int
    input_bytes: int
    work: int
    before: tuple[Passes, Passes] = field(repr=False)
    after: tuple[Passes, Passes] = field(repr=False)
    update: Pass = field(repr=False)

    @classmethod
    def of(
        cls,
        step: TrainingStep,
        modules: str | Sequence[str] = regions.AUTO,
        run: Callable[[Strategy], Trace] | None = None,
    ) -> Chain:
        """The chain of the blocks that `modules` names, as for `Checkpoint`, measured in four training steps.

        `run` makes the trace of a strategy, where it should not be a measured one of tensor bytes:
        `Chain.of(step, run=lambda strategy: memlab.simulate(step, strategy))`. Raises MemlabError where the blocks do
        not run one after the other.
        """
        found = [step.module_names[id(module)] for module in regions.chosen(step.model, modules).values()]
        if run is not None:
            return _chain(found, run)
        with Stage(step) as stage:
            return _chain(found, lambda strategy: trace(stage, strategy, allocator=False))


def _chain(found: Sequence[str], run: Callable[[Strategy], Trace]) -> Chain:
    plain = run(Baseline())
    names = in_order(plain, found)
    none, every, even, odd = (
        Cut(run(Checkpoint(tuple(some))) if some else plain, names) for some in ([], names, names[::2], names[1::2])
    )
    blocks = []
    for number, name in enumerate(names):
        alone, beside = (odd, even) if number % 2 else (even, odd)  # it and not its neighbours; they and not it
        random = every.checkpoint_bytes(number, "rng_state")
        bare = every.passes(number).forward  # leaves its output, and what is kept beside the input
        output = bare.change - bare.late - random
        blocks.append(
            Block(
                name,
                output_bytes=output,
                saved_bytes=none.passes(number).forward.change - none.passes(number).forward.late - output,
                random_bytes=random,
                kept=(none.passes(number), beside.passes(number)),
                checkpointed=(alone.passes(number), every.passes(number)),
            )
        )
    before, after = ((none.passes(place), every.passes(place)) for place in (-1, len(names)))
    return Chain(
        tuple(blocks),
        resident_bytes=none.resident_bytes,
        input_bytes=every.checkpoint_bytes(0, "input"),
        work=sum(op.flops for op in plain.operators),
        before=before,
        after=after,
        update=none.update,
    )


# ------------------------------------------------------------------------------------------------------------ schedule


@dataclass(frozen=True)
class Instant:
    """One pass of a schedule, at its highest; sizes in bytes.

    phase:    "forward", "recompute", "backward" or "optimizer"
    block:    the block's number; -1: before the chain, as many as there are blocks: after it
    nbytes:   in use at the highest point of the pass
    resident: parameters, optimizer state, buffers, the batch
    held:     alive when the pass began, by kind and block: ("input", 2), ("saved", 0), ("gradients", 3); and
              ("outside", -1) or ("outside", n), what was saved before and after the chain
    """

    phase: str
    block: int
    nbytes: int
    resident: int
    held: Held

    @property
    def working(self) -> int:
        """What the running block adds to what was there: its temporaries, what it makes, and the gradient that is
        handed from block to block."""
        return self.nbytes - self.resident - sum(self.held.values())

    def total(self, kind: str) -> int:
        """Bytes held of one kind."""
        return sum(nbytes for (its, _), nbytes in self.held.items() if its == kind)


def schedule(chain: Chain, placement: Sequence[Any] = ()) -> tuple[Instant, ...]:
    """Every pass of one training step, in order, under a placement (Rule 2)."""
    level, held, instants = chain.resident_bytes, dict[tuple[str, int], int](), []
    for move in _moves(chain, regions_of(chain, placement)):
        alive = {key: nbytes for key, nbytes in held.items() if nbytes}
        instants.append(Instant(move.phase, move.block, level + move.run.rise, chain.resident_bytes, alive))
        level += move.run.change
        held.update(move.leaves)
    return tuple(instants)


def regions_of(chain: Chain, placement: Sequence[Any]) -> Regions:
    """A placement given as flags or as regions, as regions. Raises MemlabError for one that the chain cannot have."""
    count = len(chain.blocks)
    if placement and all(isinstance(flag, bool) for flag in placement):
        if len(placement) != count:
            raise MemlabError(f"the placement has {len(placement)} flags, and the chain {count} blocks")
        return tuple((number,) for number, flag in enumerate(placement) if flag)
    if not all(isinstance(region, tuple | list) and region for region in placement):
        raise MemlabError(
            f"{placement!r} is no placement: give a flag for each block, (True, False, ...), or regions of consecutive "
            "blocks, ((0,), (2, 3))"
        )
    found = tuple(tuple(region) for region in placement)
    flat = [block for region in found for block in region]
    gaps = any(later != block + 1 for region in found for block, later in itertools.pairwise(region))
    if gaps or flat != sorted(set(flat)) or not set(flat) <= set(range(count)):
        raise MemlabError(f"{found} are no regions of blocks 0 to {count - 1}: each is a run of blocks, in order")
    return found


@dataclass(frozen=True)
class _Move:
    """A pass at its place: in which phase, over which block, and what is held when it ends, where that changes."""

    phase: str
    block: int
    run: Pass
    leaves: Held


def _moves(chain: Chain, placement: Regions) -> Iterator[_Move]:
    """The step in order: in over the chain, through the loss, and back."""
    count, flat = len(chain.blocks), {block for region in placement for block in region}
    before, after = chain.before[0 in flat], chain.after[count - 1 in flat]
    units = sorted([*placement, *((block,) for block in range(count) if block not in flat)])
    ways = [_ways(chain, unit, unit[0] in flat, unit[0] - 1 in flat) for unit in units]

    made = before.forward.change - chain.input_bytes
    yield _Move("forward", -1, before.forward, {("outside", -1): made, ("input", 0): chain.input_bytes})
    yield from itertools.chain.from_iterable(way_in for way_in, _ in ways)
    made = after.forward.change + chain.blocks[-1].output_bytes  # the last output is what comes after's affair
    loss = _released(after.forward, _joined(move.run for way_in, _ in ways for move in way_in))
    yield _Move("forward", count, loss, {("outside", count): made, ("input", count): 0})
    yield _Move("backward", count, after.backward, _done("outside", count, after.backward))
    yield from itertools.chain.from_iterable(way_out for _, way_out in reversed(ways))
    yield _Move("backward", -1, before.backward, _done("outside", -1, before.backward))
    yield _Move("optimizer", count, chain.update, {})


def _released(last: Pass, before: Pass) -> Pass:
    """The last forward pass, which lets go of what those before it leave until then."""
    return dataclasses.replace(last, change=last.change - before.late)


def _done(kind: str, block: int, backward: Pass) -> Held:
    return {(kind, block): 0, ("input", block): 0, ("gradients", block): backward.gradients}


def _ways(chain: Chain, unit: Region, checkpointed: bool, behind: bool) -> tuple[list[_Move], list[_Move]]:
    """The passes over a region, or over one kept block, on the way in and on the way out. `behind`: a checkpointed
    block comes before."""
    if checkpointed:
        return _region(chain, unit, behind)
    (number,) = unit
    block, its = chain.blocks[number], chain.blocks[number].kept[behind]
    left = {("saved", number): block.saved_bytes, ("input", number + 1): block.output_bytes}
    back = _Move("backward", number, its.backward, _done("saved", number, its.backward))
    return [_Move("forward", number, its.forward, left)], [back]


def _region(chain: Chain, region: Region, behind: bool) -> tuple[list[_Move], list[_Move]]:
    """Of a region its input is kept, and one state of random streams. On the way out all its blocks run again before
    the last one's backward, as if kept; only the last need not run to its end."""
    first, last = region[0], region[-1]
    way_in, again, back = list[_Move](), list[_Move](), list[_Move]()
    for number in region:
        block = chain.blocks[number]
        its, plain = block.checkpointed[behind or number > first], block.kept[0]
        output = {("input", number + 1): block.output_bytes}
        random = block.random_bytes if number == first else 0
        if number == first:
            forward, left = its.forward, {("saved", number): random}
            backward = its.backward
        else:  # the input is let go of when the output is there
            given = chain.blocks[number - 1].output_bytes
            rise, change = its.forward.rise - block.random_bytes, its.forward.change - block.random_bytes - given
            forward, left = dataclasses.replace(its.forward, rise=rise, change=change), {("input", number): 0}
            backward = plain.backward
        way_in.append(_Move("forward", number, forward, output | left))
        if number == last:
            recompute, left = its.recompute, {("saved", number): its.recompute.change + random}
        else:  # beside it stands the state of random streams that comes back afterwards
            rise = plain.forward.rise + chain.blocks[first].random_bytes
            recompute = dataclasses.replace(plain.forward, rise=rise, late=0)
            left = output | {("saved", number): block.saved_bytes + random}
        again.append(_Move("recompute", number, recompute, left))
        back.append(_Move("backward", number, backward, _done("saved", number, backward)))
    return way_in, again + back[::-1]


# -------------------------------------------------------------------------------------------------------------- search


@dataclass(frozen=True)
class Placement:
    """Checkpointed regions and what they cost: the peak in bytes, and the operations that run again."""

    regions: Regions
    peak_bytes: int
    work: int


def weigh(chain: Chain, placement: Sequence[Any] = ()) -> Placement:
    """What one placement costs."""
    found = regions_of(chain, placement)
    moves = list(_moves(chain, found))
    return Placement(found, chain.resident_bytes + _joined(move.run for move in moves).rise, _again(moves))


def pareto(chain: Chain, joined: bool = False) -> tuple[Placement, ...]:
    """The placements that no other beats in peak and work at once, by growing work: of all there are, found exactly.
    `joined` admits regions of several blocks."""
    front: list[Placement] = []
    for placement in sorted(_candidates(chain, joined), key=lambda its: (its.work, its.peak_bytes, its.regions)):
        if not front or placement.peak_bytes < front[-1].peak_bytes:
            front.append(placement)
    return tuple(front)


def best(chain: Chain, budget: int | str | None = None, joined: bool = False) -> Placement:
    """The placement of least peak, and of least work among those; with a budget in bytes that of least work whose peak
    is within it. Raises MemlabError where none is."""
    front = pareto(chain, joined)
    if budget is None:
        return front[-1]
    within = parse_bytes(budget)
    for placement in front:
        if placement.peak_bytes <= within:
            return placement
    raise MemlabError(
        f"no placement of checkpoints peaks within {format_bytes(within)}: the least is "
        f"{format_bytes(front[-1].peak_bytes)}"
    )


@dataclass(frozen=True)
class _Tail:
    """From some block on to the loss, and back to that block: one way to place checkpoints there."""

    way_in: Pass
    way_out: Pass
    again: int
    regions: Regions

    @property
    def needs(self) -> tuple[int, int, int, int]:
        """No tail is worth going on with that needs no less in any of these than another."""
        turn = self.way_in.change
        return self.again, self.way_in.rise, turn + self.way_out.rise, turn + self.way_out.change


def _candidates(chain: Chain, joined: bool) -> list[Placement]:
    """All placements, but of those that agree up to some block only the ones that no other beats from there on."""
    count = len(chain.blocks)
    tails = {(count, bool(behind)): [_Tail(its.forward, its.backward, 0, ())] for behind, its in enumerate(chain.after)}
    for start in reversed(range(count)):
        ends = range(start + 1, (count if joined else start + 1) + 1)
        units = [((start,), False), *((tuple(range(start, end)), True) for end in ends)]
        for behind in (False, True):
            longer = [
                _longer(_ways(chain, unit, checkpointed, behind), tail, (unit,) if checkpointed else ())
                for unit, checkpointed in units
                for tail in tails[unit[-1] + 1, checkpointed]
            ]
            tails[start, behind] = _unbeaten(longer) if start else longer  # what stands before depends on the first
    candidates = []
    for tail in tails[0, False]:
        its = chain.before[bool(tail.regions) and tail.regions[0][0] == 0]
        whole = _joined([its.forward, tail.way_in, tail.way_out, its.backward, chain.update])
        candidates.append(Placement(tail.regions, chain.resident_bytes + whole.rise, tail.again))
    return candidates


def _longer(ways: tuple[list[_Move], list[_Move]], tail: _Tail, region: Regions) -> _Tail:
    way_in, way_out = (_joined(move.run for move in way) for way in ways)
    onwards = way_in.then(_released(tail.way_in, way_in))
    return _Tail(onwards, tail.way_out.then(way_out), tail.again + _again(ways[1]), (*region, *tail.regions))


def _unbeaten(tails: list[_Tail]) -> list[_Tail]:
    kept: list[_Tail] = []
    for tail in sorted(tails, key=lambda its: (its.needs, its.regions)):
        if not any(all(map(operator.le, other.needs, tail.needs)) for other in kept):
            kept.append(tail)
    return kept


def _joined(passes: Iterable[Pass]) -> Pass:
    return functools.reduce(Pass.then, passes, Pass())


def _again(moves: Iterable[_Move]) -> int:
    return sum(move.run.work for move in moves if move.phase == "recompute")
