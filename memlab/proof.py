"""Does a strategy train the same model? One plain step against one step under the strategy, in float64.

With a `Prover` on a stage one gets, for each strategy, a `Verdict`: how far loss, gradients, buffers and updated
parameters are from the plain step's, whether that counts as the same, and a sentence wherever they differ.

Rule 1. Both steps run on copies in host memory, in float64, from the same start. Autocast leaves float64 alone and
        `LowPrecision` is left out: what these do to the numbers is the *gradient error*, measured beside it. A step
        in pure low precision is therefore never called equivalent: at best it is not proven.
Rule 2. Gradients are caught whole and unscaled, before anything consumes them.
Rule 3. Compared are gradients, updated parameters, loss, buffers (see `difference.py`), and of what modules keep
        elsewhere whatever accumulates: what a second plain step from the same parameters, buffers and random streams
        changes once more. (An attention map kept for a picture is the same after both, and counts for nothing.)
Rule 4. Equivalent means at most 1e-9 in float64. Where the model itself computes in a lower precision, or cannot run
        in float64 at all, a plain step in the same precision decides, within 100 units of its rounding; half precision
        rounds so coarsely that what is not identical is not proven.
Rule 5. Where random numbers are drawn and micro-batches draw others (dropout), each draw is replaced by its mean in
        both steps: equivalent if they then agree, and the note says so. Draws that have no mean (a permutation), or a
        plain step that is another each time it runs, leave it unproven.
Rule 6. Float64 is torch's default type meanwhile, so that tensors which a forward pass makes are in it too.
Rule 7. Gradient error = the strategy's gradient in its own precision, where the model lives, against the plain
        float64 gradient; the plain step's own error is the floor to read it by.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from .causes import listed, why_different
from .copies import Recast
from .difference import Difference, changed, difference
from .errors import MemlabError
from .kept import kept
from .measure import Stage
from .modes import unseen
from .outcome import Outcome, run_once
from .state import snapshot
from .strategies import Baseline, Checkpoint, LowPrecision, MicroBatch, MixedPrecision, Strategy

TOLERANCE = 1e-9
_ROUNDINGS = 100  # units in the last place that a same-precision comparison allows
_COARSE = 1e-3  # an allowance above this would let real differences pass


@dataclass(frozen=True)
class Verdict:
    """What the proof found for one strategy; fields as in `compare.Row`."""

    equivalent: bool | None
    proof: str
    loss_difference: float | None = None
    gradient_difference: float | None = None
    gradient_error: float | None = None
    buffer_differences: tuple[str, ...] = ()
    flops: int = 0
    notes: tuple[str, ...] = ()


@dataclass
class _Compared:
    """A step beside the plain one: what differs, by what the proof goes, and what a reader should know."""

    found: Difference
    outcome: Outcome
    plain: Outcome
    proof: str
    tolerance: float
    notes: list[str]
    proven: bool = True


@dataclass
class Prover:
    """Proves strategies on a stage. The plain steps it compares with are run once, here."""

    stage: Stage
    _exact: Stage | None = field(default=None, init=False)
    _why_not_exact: str = field(default="", init=False)
    _consumed: list[str] = field(default_factory=list, init=False)  # parameters whose gradients hooks use up

    @contextlib.contextmanager
    def ready(self) -> Iterator[Prover]:
        """Run the plain steps, in float64 where that is possible."""
        with contextlib.ExitStack() as stack:
            self._run_plain(stack)
            yield self

    @unseen()
    def _run_plain(self, stack: contextlib.ExitStack) -> None:
        self._own = run_once(self.stage, Baseline())
        hooked = [name for name, p in self.stage.step.named_parameters() if p._post_accumulate_grad_hooks]
        self._consumed = hooked if _no_gradient(self._own) else []
        if _no_gradient(self._own) and not self._consumed:
            raise MemlabError("no parameter gets a gradient: does loss_fn use the model that it is given?")
        try:
            exact = stack.enter_context(Stage(self.stage.step.copy(Recast(torch.float64)), steady=False))
            truth = self._run(exact, Baseline())
            if _no_gradient(truth):
                raise MemlabError("the loss does not use the model that it is given")
            self._exact, self._truth = exact, truth
        except Exception as error:
            first_line = (str(error).splitlines() or [""])[0]
            self._why_not_exact = f"{type(error).__name__}: {first_line}"
            self._exact, self._truth = None, self._own
        self._mean_truth = self._truth
        if self._truth.drew_random:
            self._mean_truth = self._run(self._proving, Baseline(), mean=True)

    @property
    def _proving(self) -> Stage:
        return self._exact or self.stage

    def _run(self, stage: Stage, strategy: Strategy, mean: bool = False) -> Outcome:
        with self._precision(stage):
            return run_once(stage, strategy, mean=mean)

    def _precision(self, stage: Stage) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if stage is self.stage else _float64_by_default()

    @unseen()
    def verdict(self, strategy: Strategy) -> Verdict:
        """Run the strategy and compare."""
        own = run_once(self.stage, strategy)
        error = self._error(strategy, own)
        lowered = any(isinstance(part, LowPrecision) for part in strategy.parts)
        notes = self._about_low_precision(own) if lowered else []
        provable = _without(strategy, LowPrecision) if self._exact else _without(strategy, LowPrecision, MixedPrecision)
        if provable == Baseline() != strategy:  # Rule 1: nothing is left to compare
            if not lowered:
                notes.append(f"not proven: a float64 copy, which could tell, cannot run ({self._why_not_exact})")
            return Verdict(None, "none", gradient_error=error, flops=own.flops, notes=tuple(notes))
        by = self._compared(provable)
        found = by.found
        notes += by.notes
        equivalent: bool | None = found.within(by.tolerance)
        if found.grown:
            notes.append(f"lists in modules end with other lengths than in the plain step: {listed(found.grown)}")
        if not by.proven:
            equivalent = None
        elif equivalent and by.tolerance > _COARSE and not found.within(TOLERANCE):
            equivalent = None
            notes.append(f"not proven: such coarse rounding hides differences up to {by.tolerance:.0%}")
        elif equivalent and lowered:
            equivalent = None
        elif not equivalent and not self._repeats:
            equivalent = False if any(isinstance(part, Checkpoint) for part in strategy.parts) else None
            notes.append(
                "the plain step is another each time it runs, from one and the same start: it draws from a source that "
                "nobody can put back (time, os.urandom, another process), and a recomputation draws anew"
            )
        elif not equivalent:
            notes += why_different(self.stage.step, strategy, found, by.tolerance, by.outcome, by.plain)
        return Verdict(
            equivalent=equivalent,
            proof=by.proof,
            loss_difference=found.loss,
            gradient_difference=None if self._consumed else found.gradient,
            gradient_error=error,
            buffer_differences=(*found.buffers, *found.kept),
            flops=own.flops,
            notes=tuple(notes),
        )

    def _compared(self, strategy: Strategy) -> _Compared:
        by = self._beside(strategy, mean=False)
        if self._exact is None:
            by.proof, by.tolerance = "same precision", self._rounding(self._own.lowest)
            why = self._why_not_exact
            by.notes.append(f"compared in the model's own precision, since a float64 copy cannot run ({why})")
        if self._consumed:
            by.notes.append(
                f"your own hooks use up the gradients of {listed(self._consumed)} as they come, so that updated "
                "parameters alone are compared"
            )
        differs = not by.found.gradient <= by.tolerance
        if differs and self._truth.drew_random and self._repeats_each_draw(strategy):  # Rule 5
            self._calm(by, strategy)
        low = self._truth.lowest
        if by.proof == "float64" and low not in (None, torch.float64) and not by.found.within(by.tolerance):  # Rule 4
            rounding = self._rounding(low)
            if by.found.within(rounding):
                by.proof, by.tolerance = "same precision", rounding
                name = str(low).removeprefix("torch.")
                by.notes.append(f"compared within the rounding of {name}, in which parts of the model compute")
        return by

    def _beside(self, strategy: Strategy, mean: bool) -> _Compared:
        plain = self._mean_truth if mean else self._truth
        outcome = plain if strategy == Baseline() else self._run(self._proving, strategy, mean)
        found = difference(outcome, plain)
        if found.kept or found.grown:
            kept, grown = (tuple(n for n in names if n in self._accumulating) for names in (found.kept, found.grown))
            found = replace(found, kept=kept, grown=grown)
        return _Compared(found, outcome, plain, "float64", TOLERANCE, [])

    def _repeats_each_draw(self, strategy: Strategy) -> bool:
        """Whether micro-batches are all that makes a strategy draw otherwise: a recomputation that draws anew what the
        forward pass drew is wrong, whatever the mean."""
        whole = _without(strategy, MicroBatch)
        if whole == strategy:
            return False
        return whole == Baseline() or self._beside(whole, mean=False).found.gradient <= TOLERANCE

    def _calm(self, by: _Compared, strategy: Strategy) -> None:
        """Rule 5: compare with each draw replaced by its mean, and take that where it tells more."""
        calm, apart = self._beside(strategy, mean=True), by.found.gradient
        if calm.found.gradient <= by.tolerance or calm.found.gradient < apart / 1e3:
            by.found, by.outcome, by.plain = calm.found, calm.outcome, calm.plain
            by.notes.append(
                "random layers (dropout) draw other masks here than in the plain step "
                f"(gradients {apart:.1g} apart); with each draw replaced by its mean they agree"
            )
        elif calm.outcome.no_mean and not (by.found.buffers or by.found.kept):
            by.proven = False
            by.notes.append(
                f"not proven: {listed(sorted(calm.outcome.no_mean))} draws at random and has no mean to take instead; "
                f"with other draws than in the plain step, gradients are {apart:.1g} apart"
            )

    @functools.cached_property
    def _repeats(self) -> bool:
        again = difference(self._run(self._proving, Baseline()), self._truth)
        return math.isnan(again.gradient) or again.gradient <= self._rounding(self._truth.lowest)

    @functools.cached_property
    def _accumulating(self) -> set[str]:
        """Rule 3: names of what modules keep that a second plain step changes once more, and the same way each time."""
        stage = self._proving
        with stage.applied(Baseline()) as runner, self._precision(stage):
            roots = stage.step.roots
            start = snapshot([[*root.parameters(), *root.buffers()] for root in roots.values()])
            runner.run()
            first = kept(roots)
            start.restore()
            runner.run()
            second = kept(roots)
        return changed(first, second) - changed(first, self._truth.kept)

    def _about_low_precision(self, own: Outcome) -> list[str]:
        notes = [
            "low precision is left out of the float64 proof: it rounds parameters, gradients and optimizer state, and "
            "small updates can vanish; the gradient error says how far gradients are off"
        ]
        if own.still > self._own.still + 0.01:
            notes.append(
                f"{own.still:.0%} of the weights that have a gradient did not move in this step (plain step: "
                f"{self._own.still:.0%})"
            )
        return notes

    def plain_flops(self) -> int:
        return self._own.flops

    def _error(self, strategy: Strategy, own: Outcome) -> float | None:
        """Rule 7. With random draws, both sides with the means: single and double precision draw other masks."""
        redraws = self._truth.drew_own and any(isinstance(part, Checkpoint) for part in strategy.parts)
        if self._exact is None or (self._truth.drew_random and redraws):
            return None
        if self._truth.drew_random:
            own = run_once(self.stage, strategy, mean=True)
        return difference(own, self._mean_truth).gradient

    @staticmethod
    def _rounding(dtype: torch.dtype | None) -> float:
        return _ROUNDINGS * torch.finfo(dtype or torch.float32).eps


def _without(strategy: Strategy, *kinds: type[Strategy]) -> Strategy:
    return sum((part for part in strategy.parts if not isinstance(part, kinds)), start=Baseline())


def _no_gradient(outcome: Outcome) -> bool:
    return bool(outcome.gradients) and all(gradient is None for gradient in outcome.gradients.values())


@contextlib.contextmanager
def _float64_by_default() -> Iterator[None]:
    """Rule 6."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
