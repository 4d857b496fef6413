"""Why a strategy's step is not the plain one, in sentences that name the cause as far as the step shows it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from . import nest
from .clock import clean_name, unwrapped
from .difference import Difference, factor
from .outcome import Outcome
from .step import TrainingStep
from .strategies import Checkpoint, MicroBatch, Strategy

_NORMS = nn.modules.batchnorm._NormBase
_MEAN_CRITERIA = (nn.CrossEntropyLoss, nn.NLLLoss)  # whose mean is over weights, where they have such


def why_different(
    step: TrainingStep, strategy: Strategy, found: Difference, tolerance: float, outcome: Outcome, plain: Outcome
) -> list[str]:
    """What differs, by how much, and why."""
    micro = any(isinstance(part, MicroBatch) for part in strategy.parts)
    notes = list(_state(step, found, micro, plain))
    if math.isnan(found.gradient):
        return [*notes, f"the gradient of {found.worst} is NaN, so nothing can be said of it"]
    if found.gradient <= tolerance and found.loss <= tolerance:
        return [*notes, *_updates(step, found, tolerance)]
    if found.gradient <= tolerance:
        notes.append(f"the loss differs ({found.loss:.2g} relative)")
    else:
        amount = f"{found.gradient:.2g} relative"
        if math.isinf(found.gradient):
            amount = "a parameter gets a gradient in one step and none in the other"
        notes.append(f"gradients differ ({amount}; most in {found.worst})")
    return [*notes, _cause(step, strategy, found, micro, outcome, plain)]


def _state(step: TrainingStep, found: Difference, micro: bool, plain: Outcome) -> Iterator[str]:
    """What ends differently that nothing trains."""
    again = "each micro-batch is one" if micro else "recomputation is one more"
    if found.buffers:
        norms = _batch_norms(step.model)
        frozen = any(name in plain.parameters for name in found.buffers)
        what = "buffers and frozen parameters" if frozen else "buffers"
        by = f"{listed(norms)}: each forward pass updates running statistics"
        by = by if norms else "each forward pass changes them"
        yield f"{what} end differently: {listed(found.buffers)} ({by}, and {again})"
    if found.kept:
        yield (
            f"what the model keeps outside buffers ends differently: {listed(found.kept)} (each forward pass changes "
            f"it, and {again})"
        )


def _updates(step: TrainingStep, found: Difference, tolerance: float) -> Iterator[str]:
    if found.parameter > tolerance:
        why = "the optimizer was given something else to do"
        if hooked := _hooked_after(step):
            why = f"your own hooks use each gradient of {listed(hooked)} as it comes, whole or not"
        apart = f"{found.parameter:.1g} apart, most in {found.worst_parameter}"
        yield f"gradients agree but the updated parameters are {apart}: {why}"


def _cause(
    step: TrainingStep, strategy: Strategy, found: Difference, micro: bool, outcome: Outcome, plain: Outcome
) -> str:
    """The likeliest cause, the surest first."""
    norms = _batch_norms(step.model)
    changing = list(_not_statistics(step, (*found.buffers, *found.kept, *found.grown)))
    touched = list(_not_statistics(step, sorted(plain.touched)))
    if plain.drew_own:
        return (
            "the forward pass draws random numbers from numpy or Python's random, or from a generator of its own: they "
            "are not restored for a recomputation, and micro-batches draw others. Draw from torch's global stream "
            "instead"
        )
    if micro and norms:
        whose = "" if found.buffers else f"{listed(norms)}: "
        return f"{whose}BatchNorm normalises over each micro-batch, not over the batch"
    if changing:
        whose = "each micro-batch" if micro else "a recomputation"
        return f"the forward pass changes {listed(changing)}, and may use that: {whose} finds it changed"
    if not micro:
        again = any(isinstance(part, Checkpoint) for part in strategy.parts)
        what = "recomputation did not repeat" if again else "another run does not repeat"
        which = f" ({listed(touched)})" if touched else ""
        return f"{what} the forward pass: randomness outside torch, or state that it changes{which}"
    return _of_shares(step, factor(outcome, plain), touched)


def _of_shares(step: TrainingStep, times: float | None, touched: list[str]) -> str:
    """Why micro-batches do not add up to the batch."""
    if hooked := _hooked_after(step):
        return f"your own hooks use each micro-batch's gradient of {listed(hooked)} by itself, not their sum"
    if hooked := [name for name, parameter in step.named_parameters() if parameter._backward_hooks]:
        return f"hooks on {listed(hooked)} change each micro-batch's gradient, not their sum"
    if step.reduction == "sum":
        more = "" if times is None else f" (the gradients are {times:.3g} times the plain ones)"
        return f'reduction="sum" is given, but the loss is not a sum over independent samples{more}: leave it out'
    if step.weight is not None:
        return (
            "the loss is not a mean over as many terms as weight= says, or not over independent samples: it couples "
            "them (contrastive losses, batch statistics)"
        )
    if times is not None:
        return (
            "the loss is not a mean over independent samples but their sum (the gradients are "
            f'{times:.3g} times the plain ones): pass reduction="sum"'
        )
    criterion: Any = step.loss_fn
    averages = isinstance(criterion, _MEAN_CRITERIA) and criterion.reduction == "mean"
    if averages and criterion.weight is not None:
        return (
            f"{type(criterion).__name__} has class weights, and its mean is over them: micro-batches hold unequal "
            "weights. Pass weight=lambda batch: the sum of the weights of its targets"
        )
    ignored = criterion.ignore_index if averages else -100
    if _has(step.batch, ignored):
        return (
            f"the batch has targets of {ignored}, which cross-entropy leaves out: micro-batches hold unequal numbers "
            f"of loss terms. Pass weight=lambda batch: (its target != {ignored}).sum()"
        )
    which = f" ({listed(touched)})" if touched else ""
    return (
        "the loss is not a mean over independent samples: it couples them (contrastive losses, batch statistics, a "
        f"first dimension that is time), it uses state that a forward pass changes{which}, or its terms are unequally "
        'many (pass weight=) or summed (pass reduction="sum")'
    )


def listed(names: Iterable[str]) -> str:
    """The first few, by commas."""
    several = list(names)
    return ", ".join(several[:4]) + (", ..." if len(several) > 4 else "")


def _batch_norms(model: nn.Module) -> list[str]:
    root = unwrapped(model)
    return [
        f"{clean_name(name)} ({type(module).__name__})"
        for name, module in root.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or module.running_mean is None)
    ]


def _not_statistics(step: TrainingStep, names: Iterable[str]) -> Iterator[str]:
    """The names without running statistics, which do not enter a training step."""
    norms = {clean_name(n) for n, module in unwrapped(step.model).named_modules() if isinstance(module, _NORMS)}
    return (name for name in names if name.rpartition(".")[0] not in norms)


def _hooked_after(step: TrainingStep) -> list[str]:
    return [name for name, parameter in step.named_parameters() if parameter._post_accumulate_grad_hooks]


def _has(batch: Any, target: int) -> bool:
    return any(
        not tensor.is_floating_point() and not tensor.is_complex() and bool((tensor == target).any())
        for tensor in nest.tensors(batch)
    )
