"""How one training step runs: the loop that a person would write, with the places where strategies change it.

A plain runner is the plain loop, operator for operator:

    loss = loss_fn(model, batch); loss.backward(); optimizer.step(); gradients to None

Rules:

1. No graph and no activation outlives its micro-batch's backward pass: the loss lives in `_backward` alone, or the
   next forward pass would run beside the last one's graph.
2. Gradients are None before and after, also after an exception.
3. Forward passes see fresh containers around the same micro-batch tensors: a loss that pops an entry may run again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .. import nest, release
from ..errors import MemlabError
from ..step import MicroBatchPart, TrainingStep

Catch = Callable[[torch.Tensor, torch.Tensor], object]
Context = Callable[[], contextlib.AbstractContextManager[Any]]


class Runner:
    """Runs a step under a strategy; made by `strategy.applied(step)` and good until that block ends.

    - notes: sentences about what the strategy did differently from what was asked.
    - skipped: True if the last run's optimizer step was left out because scaled gradients overflowed (fp16).
    - losses: each micro-batch's share of the last run's loss, detached.
    """

    def __init__(self, step: TrainingStep, name: str = "baseline") -> None:
        self.step = step
        self.name = name
        self.notes: list[str] = []
        self.skipped = False
        self.losses: list[torch.Tensor] = []
        # What strategies set:
        self.micro_batches: list[MicroBatchPart] | None = None
        self.around_forward: Context = contextlib.nullcontext
        self.scaler: torch.amp.GradScaler | None = None
        self.around_run: Callable[[Catch | None], contextlib.AbstractContextManager[Any]] | None = None
        self.steps_in_backward = False
        self.afterwards: list[Callable[[], Iterable[str]]] = []
        self._applied = True
        self._looked = False

    @property
    def batch(self) -> Any:
        """The batch as it is run, a nest of tensors: the user's, and the micro-batches where there are any."""
        if self.micro_batches is None:
            return self.step.batch
        return [self.step.batch, *(part.batch for part in self.micro_batches)]

    @property
    def scales_loss(self) -> bool:
        """Whether an optimizer step may be skipped, so that a first run proves nothing."""
        return self.scaler is not None

    def not_numbers(self) -> list[int]:
        """The micro-batches (from 1) of the last run whose loss is NaN: perhaps one without loss terms."""
        parts = self.micro_batches
        run = [1] if parts is None else [number for number, part in enumerate(parts, start=1) if part.share > 0]
        return [number for number, loss in zip(run, self.losses, strict=True) if bool(loss.isnan().any())]

    def close(self) -> None:
        self._applied = False
        self.micro_batches, self.scaler, self.losses = None, None, []

    def run(self, *, catch: Catch | None = None) -> None:
        """One training step; `loss` is then the full batch's loss.

        `catch(parameter, gradient)` is called once for each distinct parameter that got a gradient, with the whole,
        unscaled gradient, before anything consumes it.
        """
        if not self._applied:
            raise MemlabError(
                "this runner's strategy is no longer applied: call run() inside `with strategy.applied()`"
            )
        self._clear_gradients()
        try:
            with contextlib.nullcontext() if self.around_run is None else self.around_run(catch):
                self._forward_and_backward()
                self._update(catch)
        except BaseException as error:
            release.queue()
            if isinstance(error, Exception) and not isinstance(error, MemlabError):
                error.add_note(f"memlab was running one training step of {self.step!r}, strategy: {self.name}")
            raise
        finally:
            self._clear_gradients()
        for explain in self.afterwards:
            self.notes += [note for note in explain() if note not in self.notes]

    @property
    def loss(self) -> torch.Tensor:
        """The full batch's loss in the last run, detached. Summed when asked for: an addition is no part of a step."""
        total = self.losses[0]
        for loss in self.losses[1:]:
            total = total + loss
        return total

    def _forward_and_backward(self) -> None:
        self.losses = []
        if self.micro_batches is None:
            self._backward(self.step.batch, 1.0)
            return
        parts = [part for part in self.micro_batches if part.share > 0]  # without loss terms, a mean is 0/0
        no_sync: Context = getattr(self.step.model, "no_sync", contextlib.nullcontext)
        for part in parts:
            with contextlib.nullcontext() if part is parts[-1] else no_sync():
                self._backward(nest.rebuilt(part.batch), part.share)

    def _backward(self, batch: Any, share: float) -> None:
        with self.around_forward():
            loss = self.step.loss(batch)
        if not self._looked:
            self._look_for_early_gradients()
        if share != 1.0:
            loss = loss * share
        self.losses = [*map(_alone, self.losses), loss.detach()]
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward()

    def _look_for_early_gradients(self) -> None:
        """Gradients are None when a step begins (rule 2): after its first loss, whatever is there came from loss_fn."""
        self._looked = True
        early = [name for name, parameter in self.step.named_parameters() if parameter.grad is not None]
        if early:
            self.notes.append(
                f"loss_fn calls backward itself: the gradients that it leaves ({', '.join(early[:4])}) add to the "
                "step's own. Have it return the loss alone"
            )

    def _update(self, catch: Catch | None) -> None:
        optimizer = self.step.optimizer
        if self.scaler is None:
            self._show_gradients(catch)
            if optimizer is not None and not self.steps_in_backward:
                optimizer.step()
            return
        scale = self.scaler.get_scale()
        if catch is not None and optimizer is not None:
            self.scaler.unscale_(optimizer)
        self._show_gradients(catch, scale)
        if optimizer is not None:
            self.scaler.step(optimizer)
            self.scaler.update()
        self.skipped = self.scaler.get_scale() < scale

    def _show_gradients(self, catch: Catch | None, scale: float = 1.0) -> None:
        if catch is None:
            return
        groups = [] if self.step.optimizer is None else self.step.optimizer.param_groups
        unscaled = {id(parameter) for group in groups for parameter in group["params"]}
        for _, parameter in self.step.named_parameters():
            gradient = parameter.grad
            if gradient is not None:
                catch(parameter, gradient if scale == 1.0 or id(parameter) in unscaled else gradient / scale)

    def _clear_gradients(self) -> None:
        groups = [] if self.step.optimizer is None else self.step.optimizer.param_groups
        owners = [group["params"] for group in groups] + [self.step.model.parameters(), nest.tensors(self.batch)]
        for tensors in owners:
            for tensor in tensors:
                if tensor.is_leaf:
                    tensor.grad = None


def _alone(loss: torch.Tensor) -> torch.Tensor:
    """An earlier loss without the storage it came in, as in a loop whose variable `loss` is given anew: `mse_loss` and
    others leave their elements' behind it."""
    if loss.untyped_storage().nbytes() == loss.nbytes:
        return loss
    with _disable_current_modes():
        return loss.clone()
