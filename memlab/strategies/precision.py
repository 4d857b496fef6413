"""Fewer bits: around the computation (autocast), or in everything."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from .. import nest
from ..clock import unwrapped
from ..copies import view_of
from ..errors import MemlabError
from ..step import Optimizer, TrainingStep
from .base import Strategy
from .runner import Runner

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, repr=False)
class MixedPrecision(Strategy):
    """torch.autocast around forward and loss; "fp16" with loss scaling by `torch.amp.GradScaler`. Parameters, gradients
    and optimizer state stay as they are (the parameters are the master weights)."""

    rank: ClassVar[int] = 3
    dtype: Literal["bf16", "fp16"]

    def __post_init__(self) -> None:
        _check_dtype(self)

    def label(self, step: TrainingStep | None = None) -> str:
        return f"{self.dtype} autocast"

    def clash(self, other: Strategy) -> str | None:
        if isinstance(other, LowPrecision):
            return "autocast works on float32 weights, and pure low precision leaves none: choose one"
        return None

    @contextlib.contextmanager
    def install(self, runner: Runner) -> Iterator[None]:
        device = runner.step.device
        _check_support(self.dtype, device)
        _note_complex(runner)
        runner.around_forward = functools.partial(torch.autocast, device.type, dtype=DTYPES[self.dtype])
        if self.dtype == "fp16":
            runner.scaler = torch.amp.GradScaler(device.type)
        yield


@dataclass(frozen=True, repr=False)
class LowPrecision(Strategy):
    """Everything in "bf16" or "fp16": parameters, buffers, the batch's floating tensors, optimizer state (its counters
    aside) and so the gradients; no master weights, so that small updates are lost to rounding. It works on copies: at
    the end the step has its own tensors back, untouched. Complex tensors stay complex."""

    rank: ClassVar[int] = 4
    dtype: Literal["bf16", "fp16"]

    def __post_init__(self) -> None:
        _check_dtype(self)

    def label(self, step: TrainingStep | None = None) -> str:
        return f"pure {self.dtype}"

    @contextlib.contextmanager
    def install(self, runner: Runner) -> Iterator[None]:
        step = runner.step
        _check_support(self.dtype, step.device)
        _note_complex(runner)
        tensors = [*step.model.parameters(), *step.model.buffers()]
        if isinstance(step.loss_fn, nn.Module):
            tensors += [*step.loss_fn.parameters(), *step.loss_fn.buffers()]
        tensors += [tensor for tensor in nest.tensors(step.batch) if tensor.is_floating_point()]
        state = _state(step.optimizer)
        with _own_state(step.optimizer), _lowered(tensors, state, DTYPES[self.dtype]):
            for module in step.model.modules():
                if isinstance(module, nn.RNNBase):
                    module.flatten_parameters()
            yield


def _note_complex(runner: Runner) -> None:
    root = unwrapped(runner.step.model)
    named = [*root.named_parameters(), *root.named_buffers()]
    if complex_names := [name for name, tensor in named if tensor.is_complex()]:
        runner.notes.append(f"complex tensors stay complex: {', '.join(complex_names)}")


def _check_dtype(strategy: MixedPrecision | LowPrecision) -> None:
    if strategy.dtype not in DTYPES:
        raise MemlabError(f"{strategy!r}: give 'bf16' or 'fp16'")


def _check_support(dtype: str, device: torch.device) -> None:
    if dtype == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise MemlabError(
            f"bf16 is only emulated on {torch.cuda.get_device_name(device)}, slowly and with no saving: use 'fp16'"
        )


@contextlib.contextmanager
def _lowered(tensors: list[torch.Tensor], state: list[tuple[torch.Tensor, bool]], dtype: torch.dtype) -> Iterator[None]:
    """Each tensor holds a copy of its values, floating ones in `dtype`, counters as they are, while this is open.
    Tensors that are the same view of one storage stay so. Originals on a device wait in host memory, or they would be
    measured too."""
    distinct = {id(tensor): tensor for tensor in (*tensors, *(tensor for tensor, _ in state))}.values()
    views = {id(tensor): view_of(tensor) for tensor in distinct}
    homes = {views[id(tensor)]: tensor.device for tensor in distinct}
    originals: dict[Hashable, torch.Tensor] = {}
    copies: dict[Hashable, torch.Tensor] = {}
    counters = {id(tensor) for tensor, counts in state if counts}
    try:
        for tensor in distinct:
            view = views[id(tensor)]
            if view not in originals:
                lower = tensor.is_floating_point() and id(tensor) not in counters
                copies[view] = tensor.data.to(dtype if lower else tensor.dtype, copy=True)
                originals[view] = tensor.data.cpu()
            tensor.data = copies[view]
        copies.clear()
        yield
    finally:
        restored = {view: original.to(homes[view]) for view, original in originals.items()}
        for tensor in distinct:
            if (view := views[id(tensor)]) in restored:
                tensor.data = restored[view]


def _state(optimizer: Optimizer | None) -> list[tuple[torch.Tensor, bool]]:
    """The tensors of an optimizer's state, and whether each counts steps: one number for a parameter of many."""
    return [
        (value, name == "step" or (not value.dim() and bool(parameter.dim())))
        for parameter, own in ({} if optimizer is None else optimizer.state).items()
        for name, value in own.items()
        if isinstance(value, torch.Tensor)
    ]


@contextlib.contextmanager
def _own_state(optimizer: Optimizer | None) -> Iterator[None]:
    """At the end the optimizer has the state entries that it had at the beginning."""
    state: Any = {} if optimizer is None else optimizer.state
    before = {parameter: dict(own) for parameter, own in state.items()}
    try:
        yield
    finally:
        for parameter in list(state):
            if parameter not in before:
                del state[parameter]
            else:
                state[parameter].clear()
                state[parameter].update(before[parameter])
