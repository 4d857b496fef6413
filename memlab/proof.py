"""Does a strategy train the same model? One plain step against one step under the strategy, in float64.

With a `Prover` on a stage one gets, for each strategy, a `Verdict`: how far loss, gradients, buffers and updated
parameters are from the plain step's, whether that counts as the same, and a sentence wherever they differ.

Rule 1. Both steps run on copies in host memory, in float64, from the same start. Autocast leaves float64 alone and
        `LowPrecision` is left out: what these do to the numbers is the *gradient error*, measured beside it. A step
        in pure low precision is therefore never called equivalent: at best it is not proven.
Rule 2. Gradients are caught whole and unscaled, before anything consumes them.
Rule 3. gradient_difference = max over parameters of ||g - g0|| / max(||g0||, 1e-3 sqrt(n_p / n) ||all g0||). The floor
        is there because some gradients are zero in mathematics (an attention key's bias) and noise in arithmetic. For
        updated parameters the same with 1 for 1e-3: a bias that starts at zero may hold nothing but such noise.
Rule 4. Equivalent means at most 1e-9 in float64. Where the model itself computes in a lower precision, or cannot run
        in float64 at all, a plain step in the same precision decides, within 100 units of its rounding; half precision
        rounds so coarsely that what is not identical is not proven.
Rule 5. Where random numbers are drawn and the strategy draws others (dropout on micro-batches), each draw is replaced
        by its mean in both steps: equivalent if they then agree, and the note says so.
Rule 6. Gradient error = the strategy's gradient in its own precision, where the model lives, against the plain
        float64 gradient; the plain step's own error is the floor to read it by.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from . import nest
from .clock import clean_name, unwrapped
from .errors import MemlabError
from .measure import Stage
from .modes import unseen
from .outcome import Outcome, run_once
from .step import TrainingStep
from .strategies import Baseline, LowPrecision, MicroBatch, MixedPrecision, Strategy

TOLERANCE = 1e-9
_FLOOR = 1e-3
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


@dataclass(frozen=True)
class _Difference:
    loss: float
    gradient: float
    parameter: float
    buffers: tuple[str, ...]
    worst: str  # the parameter whose gradient differs most

    def within(self, tolerance: float) -> bool:
        apart = (self.loss, self.gradient, self.parameter)  # one by one: NaN is within nothing
        return all(distance <= tolerance for distance in apart) and not self.buffers


@dataclass
class Prover:
    """Proves strategies on a stage. The plain steps it compares with are run once, here."""

    stage: Stage
    _exact: Stage | None = field(default=None, init=False)
    _why_not_exact: str = field(default="", init=False)

    @contextlib.contextmanager
    def ready(self) -> Iterator[Prover]:
        """Run the plain steps, in float64 where that is possible."""
        with contextlib.ExitStack() as stack:
            self._run_plain(stack)
            yield self

    @unseen()
    def _run_plain(self, stack: contextlib.ExitStack) -> None:
        self._own = run_once(self.stage, Baseline())
        if self._own.gradients and all(gradient is None for gradient in self._own.gradients.values()):
            raise MemlabError("no parameter gets a gradient: does loss_fn use the model that it is given?")
        try:
            exact = stack.enter_context(Stage(self.stage.step.copy(torch.float64), steady=False))
            truth = run_once(exact, Baseline())
            if all(gradient is None for gradient in truth.gradients.values()):
                raise MemlabError("the loss does not use the model that it is given")
            self._exact, self._truth = exact, truth
        except Exception as error:
            first_line = (str(error).splitlines() or [""])[0]
            self._why_not_exact = f"{type(error).__name__}: {first_line}"
            self._exact, self._truth = None, self._own
        self._mean_truth = self._truth
        if self._truth.drew_random:
            self._mean_truth = run_once(self._exact or self.stage, Baseline(), mean=True)

    @unseen()
    def verdict(self, strategy: Strategy) -> Verdict:
        """Run the strategy and compare."""
        own = run_once(self.stage, strategy)
        error = self._error(strategy, own)
        lowered = any(isinstance(part, LowPrecision) for part in strategy.parts)
        notes = self._about_low_precision(own) if lowered else []
        provable = _without(strategy, LowPrecision) if self._exact else _without(strategy, LowPrecision, MixedPrecision)
        if provable == Baseline() != strategy:  # Rule 1: nothing is left to compare
            return Verdict(None, "none", gradient_error=error, flops=own.flops, notes=tuple(notes))
        found, proof, tolerance, remarks = self._compared(provable)
        notes += remarks
        equivalent: bool | None = found.within(tolerance)
        if equivalent and tolerance > _COARSE and not found.within(TOLERANCE):
            equivalent = None
            notes.append(f"not proven: such coarse rounding hides differences up to {tolerance:.0%}")
        elif equivalent and lowered:
            equivalent = None
        elif not equivalent:
            notes += why_different(self.stage.step, strategy, found, tolerance, self._own.drew_outside)
        return Verdict(
            equivalent=equivalent,
            proof=proof,
            loss_difference=found.loss,
            gradient_difference=found.gradient,
            gradient_error=error,
            buffer_differences=found.buffers,
            flops=own.flops,
            notes=tuple(notes),
        )

    def _compared(self, strategy: Strategy) -> tuple[_Difference, str, float, list[str]]:
        """How far the strategy's step is from the plain one, the proof's name, what counts as the same, remarks."""
        proof, tolerance, remarks = "float64", TOLERANCE, []
        if self._exact is None:
            proof, tolerance = "same precision", self._rounding(self._own.lowest)
            why = self._why_not_exact
            remarks.append(f"compared in the model's own precision, since a float64 copy cannot run ({why})")
        stage = self._exact or self.stage
        found = difference(self._truth if strategy == Baseline() else run_once(stage, strategy), self._truth)
        if self._truth.drew_random and not found.gradient <= tolerance:  # Rule 5
            calm = difference(run_once(stage, strategy, mean=True), self._mean_truth)
            if calm.gradient <= tolerance or calm.gradient < found.gradient / 1e3:
                remarks.append(
                    "random layers (dropout) draw other masks here than in the plain step "
                    f"(gradients {found.gradient:.1g} apart); with each draw replaced by its mean they agree"
                )
                found = calm
        low = self._truth.lowest
        if proof == "float64" and low not in (None, torch.float64) and not found.within(tolerance):  # Rule 4
            rounding = self._rounding(low)
            if found.within(rounding):
                proof, tolerance = "same precision", rounding
                name = str(low).removeprefix("torch.")
                remarks.append(f"compared within the rounding of {name}, in which parts of the model compute")
        return found, proof, tolerance, remarks

    def _about_low_precision(self, own: Outcome) -> list[str]:
        return [
            "low precision is left out of the float64 proof: it rounds parameters, gradients and optimizer state, and "
            "small updates can vanish; the gradient error says how far gradients are off",
            f"{own.still:.0%} of the weights that have a gradient did not move in this step (plain step: "
            f"{self._own.still:.0%})",
        ]

    def plain_flops(self) -> int:
        return self._own.flops

    def _error(self, strategy: Strategy, own: Outcome) -> float | None:
        """Rule 6. With random draws, both sides with the means: single and double precision draw other masks."""
        if self._exact is None:
            return None
        if self._truth.drew_random:
            own = run_once(self.stage, strategy, mean=True)
        return difference(own, self._mean_truth).gradient

    @staticmethod
    def _rounding(dtype: torch.dtype | None) -> float:
        return _ROUNDINGS * torch.finfo(dtype or torch.float32).eps


def _without(strategy: Strategy, *kinds: type[Strategy]) -> Strategy:
    return sum((part for part in strategy.parts if not isinstance(part, kinds)), start=Baseline())


# -- how far apart -----------------------------------------------------------------------------------------------------


def difference(outcome: Outcome, plain: Outcome) -> _Difference:
    """How far an outcome is from the plain one (Rule 3)."""
    gradient, worst = _furthest(outcome.gradients, plain.gradients, _FLOOR)
    parameter, _ = _furthest(outcome.parameters, plain.parameters, 1.0)
    buffers = tuple(
        name
        for name in sorted(plain.buffers.keys() | outcome.buffers.keys())
        if name not in plain.buffers
        or name not in outcome.buffers
        or _apart(outcome.buffers[name].to(torch.float64), plain.buffers[name].to(torch.float64)) > TOLERANCE
    )
    loss = abs(outcome.loss - plain.loss) / max(abs(plain.loss), 1e-12)
    return _Difference(loss, gradient, parameter, buffers, worst)


def _furthest(
    outcome: Mapping[str, torch.Tensor | None], plain: Mapping[str, torch.Tensor | None], share: float
) -> tuple[float, str]:
    """The largest distance and whose it is: relative to the plain tensor's norm, or to a share of what all have for
    its size."""
    present = [tensor for tensor in plain.values() if tensor is not None]
    usual = math.sqrt(sum(_norm(t) ** 2 for t in present) / max(sum(t.numel() for t in present), 1))
    furthest, whose = 0.0, ""
    for name, reference in plain.items():
        found = outcome.get(name)
        if reference is None and found is None:
            continue
        if reference is None or found is None:
            apart = math.inf
        else:
            apart = _apart(found, reference, share * usual * math.sqrt(reference.numel()))
        if math.isnan(apart):
            return apart, name
        if apart > furthest:
            furthest, whose = apart, name
    return furthest, whose


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor))


def _apart(found: torch.Tensor, reference: torch.Tensor, floor: float = 0.0) -> float:
    """Relative distance; infinite where shapes differ."""
    if found.shape != reference.shape:
        return math.inf
    distance = _norm(found - reference)
    return 0.0 if distance == 0 else distance / max(_norm(reference), floor, 1e-300)


# -- why ---------------------------------------------------------------------------------------------------------------


def why_different(
    step: TrainingStep, strategy: Strategy, found: _Difference, tolerance: float, drew_outside: bool
) -> list[str]:
    """Sentences that name the cause of a difference, as far as the step shows it."""
    notes = []
    norms = _batch_norms(step.model)
    micro = any(isinstance(part, MicroBatch) for part in strategy.parts)
    if found.buffers:
        why = "each forward pass updates running statistics, and "
        why += "each micro-batch is one" if micro else "recomputation is one more"
        notes.append(
            f"buffers end differently: {_listed(found.buffers)}" + (f" ({_listed(norms)}: {why})" if norms else "")
        )
    if found.gradient <= tolerance and found.loss <= tolerance:
        if found.parameter > tolerance:
            notes.append(
                f"gradients agree but the updated parameters are {found.parameter:.1g} apart: the optimizer was given "
                "something else to do"
            )
        return notes
    if math.isnan(found.gradient):
        return [*notes, f"the gradient of {found.worst} is NaN, so nothing can be said of it"]
    amount = f"{found.gradient:.2g} relative"
    if math.isinf(found.gradient):
        amount = "a parameter gets a gradient in one step and none in the other"
    notes.append(f"gradients differ ({amount}; most in {found.worst})")
    if drew_outside:
        notes.append(
            "the forward pass draws random numbers from numpy or Python's random: they are not restored for a "
            "recomputation, and micro-batches draw others. Draw from torch instead"
        )
    elif not micro:
        notes.append(
            "recomputation did not repeat the forward pass: randomness outside torch, or state that it changes"
        )
    elif norms:
        whose = "" if found.buffers else f"{_listed(norms)}: "
        notes.append(f"{whose}BatchNorm normalises over each micro-batch, not over the batch")
    elif step.weight is None and step.reduction == "mean" and _has_ignored_targets(step.batch):
        notes.append(
            "the batch has targets of -100, which cross-entropy leaves out: micro-batches hold unequal numbers of loss "
            "terms. Pass weight=lambda batch: (its target != -100).sum()"
        )
    else:
        notes.append(
            "the loss is not a mean over independent samples: it couples them (contrastive losses, batch statistics), "
            'or its terms are unequally many (pass weight=) or summed (pass reduction="sum")'
        )
    return notes


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def _batch_norms(model: nn.Module) -> list[str]:
    root = unwrapped(model)
    return [
        f"{clean_name(name)} ({type(module).__name__})"
        for name, module in root.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training
    ]


def _has_ignored_targets(batch: Any) -> bool:
    return any(
        not tensor.is_floating_point() and not tensor.is_complex() and bool((tensor == -100).any())
        for tensor in nest.tensors(batch)
    )
