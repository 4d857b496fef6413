"""A trace of one training step, cut into the passes over each of its model's blocks.

A *pass* is a stretch of the step: forward over a block, its second run (recompute), backward over it. What runs between
two blocks belongs to the one that ran before. A pass is relative to the memory in use when it begins, so that passes
measured in different steps can be strung together: levels add up.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from .errors import MemlabError
from .trace import Trace


@dataclass(frozen=True, slots=True)
class Pass:
    """Bytes above the level at its start, `rise` at its highest and `change` at its end; `gradients`, bytes of
    parameters' gradients born in it; `work`, floating-point operations; `late`: what of its change is let go of at the
    end of the step's forward pass, such as autocast's copies of weights."""

    rise: int = 0
    change: int = 0
    gradients: int = 0
    work: int = 0
    late: int = 0

    def then(self, later: Pass) -> Pass:
        """Both, one after the other, as one."""
        return Pass(
            max(self.rise, self.change + later.rise),
            self.change + later.change,
            self.gradients + later.gradients,
            self.work + later.work,
            self.late + later.late,
        )


@dataclass(frozen=True, slots=True)
class Passes:
    """All passes over one block in one step; a block that is kept has no second run."""

    forward: Pass
    backward: Pass
    recompute: Pass = Pass()


class Cut:
    """The passes of one trace over the blocks of these names, given in the order in which they run.

    resident_bytes: in use when the step begins
    update:         the pass over the optimizer, to the end of the step
    """

    def __init__(self, trace: Trace, blocks: Sequence[str]) -> None:
        self._trace, self._blocks = trace, blocks
        self._levels = _levels(trace)
        self.resident_bytes = self._levels[0]
        self._passes: dict[tuple[str, int], Pass] = {}
        spans: dict[tuple[str, int], tuple[int, int]] = {}
        start = first = 0
        for spot, run in itertools.groupby(self._spots()):
            stop = first + len(list(run))
            end = self._end(stop)
            self._passes[spot], spans[spot] = self._pass(start, end, first, stop), (start, end)
            start, first = end, stop
        self._set_apart_late(spans)
        self.update = self._of("optimizer", len(blocks))

    def passes(self, block: int) -> Passes:
        """Those over a block, by its number; -1: over what stands before the first, `len(blocks)`: after the last."""
        return Passes(self._of("forward", block), self._of("backward", block), self._of("recompute", block))

    def checkpoint_bytes(self, block: int, slot: str) -> int:
        """What a checkpoint around the block keeps in that slot: "input" or "rng_state"."""
        storages = {
            tensor.storage: tensor.storage_bytes
            for tensor in self._trace.saved
            if tensor.kind == "checkpoint inputs"
            and tensor.slot.startswith(f"Checkpoint.{slot}")
            and block_of(tensor.module, self._blocks) == block
        }
        return sum(storages.values())

    def _of(self, phase: str, block: int) -> Pass:
        return self._passes.get((phase, block), Pass())

    def _spots(self) -> Iterator[tuple[str, int]]:
        """For each operator, the phase and the block whose pass it belongs to."""
        count = len(self._blocks)
        ran = [(op.place.phase, block_of(op.place.module, self._blocks)) for op in self._trace.operators]
        last = {spot: number for number, spot in enumerate(ran)}  # operator of each
        first_over = max(last.get((phase, 0), -1) for phase in ("backward", "recompute"))
        forward, backward, begun = -1, count, False
        for number, (phase, block) in enumerate(ran):
            begun |= phase == "backward"
            if phase == "optimizer" or (begun and phase == "forward"):
                yield "optimizer", count
            elif phase == "forward":
                forward = count if number > last["forward", count - 1] else forward if block is None else block
                yield "forward", forward
            else:
                backward = backward if block is None else min(block, backward)
                if number > first_over >= 0:
                    backward = -1
                yield "recompute" if number <= last.get(("recompute", backward), -1) else "backward", backward

    def _end(self, stop: int) -> int:
        """The last tick of the pass whose last operator comes before the operator `stop`. Gradients that are let go of
        are so after the step, whatever ran last."""
        final = len(self._levels)
        if stop < len(self._trace.operators):
            released = (a.freed for a in self._trace.allocations if a.category == "gradients" and a.freed is not None)
            final = min(self._trace.operators[stop - 1].tick, *released, final)
        return final - 1

    def _pass(self, start: int, end: int, first: int, stop: int) -> Pass:
        level, span = self._levels[start], self._levels[start : end + 1]
        born = (a.nbytes for a in self._trace.allocations if a.category == "gradients" and start < a.born <= end)
        work = sum(operator.flops for operator in self._trace.operators[first:stop])
        return Pass(max(span) - level, span[-1] - level, sum(born), work)

    def _set_apart_late(self, spans: dict[tuple[str, int], tuple[int, int]]) -> None:
        """Note as `late` what blocks leave and the pass after them lets go of; its change is then without that."""
        count = len(self._blocks)
        start, end = spans.get(("forward", count), (0, 0))
        freed = [
            a
            for a in self._trace.allocations
            if a.category == "weight copies" and a.freed is not None and start < a.freed <= end
        ]
        for spot in [("forward", block) for block in range(count)]:
            first, last = spans[spot]
            late = sum(a.nbytes for a in freed if first < a.born <= last)
            self._passes[spot] = replace(self._passes[spot], late=late)
            if late:
                after = self._passes["forward", count]
                self._passes["forward", count] = replace(after, change=after.change + late)


def _levels(trace: Trace) -> list[int]:
    """Bytes in use after each tick."""
    changes = collections.Counter[int]({0: 0})
    for allocation in trace.allocations:
        changes[allocation.born] += allocation.nbytes
        if allocation.freed is not None:
            changes[allocation.freed] -= allocation.nbytes
    return list(itertools.accumulate(changes[tick] for tick in range(max(changes) + 1)))


def block_of(module: str, blocks: Sequence[str]) -> int | None:
    """The number of the block that a module is, or lies in."""
    return next((i for i, name in enumerate(blocks) if module == name or module.startswith(f"{name}.")), None)


def in_order(plain: Trace, blocks: Sequence[str]) -> list[str]:
    """The blocks in the order in which they run. Raises MemlabError where they do not run one after the other, each
    once and whole."""
    ran = [block_of(op.place.module, blocks) for op in plain.operators if op.place.phase == "forward"]
    order = [number for number, _ in itertools.groupby(number for number in ran if number is not None)]
    if idle := [name for number, name in enumerate(blocks) if number not in order]:
        raise MemlabError(f"{', '.join(idle)} ran no operator in the forward pass: leave them out of the chain")
    for place, number in enumerate(order):
        if number in order[:place]:
            raise MemlabError(
                f"{blocks[number]} runs again after {blocks[order[place - 1]]} has run: these blocks are no chain, in "
                "which each runs once and hands its output to the next"
            )
    if any(op.place.phase == "recompute" for op in plain.operators):
        raise MemlabError(
            "the model checkpoints by itself already, and a chain is measured without: switch that off, e.g. by "
            "model.gradient_checkpointing_disable()"
        )
    return [blocks[number] for number in order]
