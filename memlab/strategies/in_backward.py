"""The optimizer in backward: each gradient consumed, and freed, as it is born."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ..errors import MemlabError
from ..step import Optimizer, TrainingStep
from .base import Strategy
from .micro_batch import MicroBatch
from .precision import MixedPrecision
from .runner import Catch, Runner


@dataclass(frozen=True, repr=False)
class OptimizerInBackward(Strategy):
    """Each gradient is consumed as it is born: the optimizer steps a parameter in the hook that fires when its gradient
    is whole, and the gradient is freed at once, so that never all are alive together.

    What looks at all gradients first (clipping by global norm, loss scaling, accumulation, reduction over processes)
    cannot go with it, and is refused where it can be seen.
    """

    rank: ClassVar[int] = 5

    def label(self, step: TrainingStep | None = None) -> str:
        return "optimizer in backward"

    def clash(self, other: Strategy) -> str | None:
        if isinstance(other, MicroBatch):
            return (
                "the optimizer in backward consumes each gradient at once, before the next micro-batch could add to "
                "it: leave one of them out"
            )
        if isinstance(other, MixedPrecision) and other.dtype == "fp16":
            return "fp16 loss scaling must see all gradients before any is used: take MixedPrecision('bf16')"
        return None

    @contextlib.contextmanager
    def install(self, runner: Runner) -> Iterator[None]:
        _check_steps_alone(runner.step)
        runner.steps_in_backward = True
        runner.around_run = functools.partial(_consuming, runner.step)
        yield


def _check_steps_alone(step: TrainingStep) -> None:
    optimizer, refused = step.optimizer, "OptimizerInBackward cannot run this step: "
    if optimizer is None:
        raise MemlabError(f"{refused}it has no optimizer; pass optimizer= to TrainingStep")
    name = type(optimizer).__name__
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise MemlabError(
            f"{refused}hooks are registered on the {name}'s step, and they expect all gradients at once "
            "(such as clipping by global norm); remove them or use another strategy"
        )
    own = vars(optimizer).get("step")
    if own is not None and not getattr(own, "_wrapped_by_lr_sched", False):
        raise MemlabError(f"{refused}the {name}'s step was replaced on the instance; put the class's own back")
    if isinstance(step.model, nn.parallel.DistributedDataParallel):
        raise MemlabError(
            f"{refused}under DistributedDataParallel it would step before gradients are reduced, and the processes "
            "would drift apart; use the plain module, or fully_shard"
        )


@contextlib.contextmanager
def _consuming(step: TrainingStep, catch: Catch | None) -> Iterator[None]:
    """Hooks that step each of the optimizer's parameters and free its gradient, for one run."""
    optimizer = step.optimizer
    assert optimizer is not None
    names = {id(parameter): name for name, parameter in step.named_parameters()}
    consumed: set[int] = set()

    def consume(single: Optimizer, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        name = names.get(id(parameter))
        if id(parameter) in consumed:
            raise MemlabError(
                f"the gradient of {name or 'a parameter'} came in two pieces in one step, and the optimizer had used "
                "the first already: is it in a reentrant checkpoint (pass use_reentrant=False), or does loss_fn call "
                "backward itself?"
            )
        consumed.add(id(parameter))
        if catch is not None and name is not None:
            catch(parameter, parameter.grad)
        single.step()
        parameter.grad = None

    hooked = []
    try:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    hook = functools.partial(consume, _single(optimizer, group, parameter))
                    handle = parameter.register_post_accumulate_grad_hook(hook)
                    hooked.append((parameter, handle))
        yield
    finally:
        for parameter, handle in hooked:
            handle.remove()
            if not parameter._post_accumulate_grad_hooks:
                parameter._post_accumulate_grad_hooks = None  # as it was; removal leaves an empty dict


def _single(optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> Optimizer:
    """The optimizer for one parameter alone, on the same state. A scheduler's `step` on the instance is left out: it
    would step the original."""
    single: Optimizer = object.__new__(type(optimizer))
    single.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    single.param_groups = [{**group, "params": [parameter]}]
    return single
