"""One step run for its numbers: the loss, gradients, buffers and parameters that it leaves, in host memory.

`run_once` runs a strategy on a stage and returns an `Outcome`; with `mean=True` every random draw is replaced by its
mean, so that steps which draw in another order can be compared.
"""

from __future__ import annotations

import contextlib
import random
import sys
from dataclasses import dataclass
from typing import Any

import torch

from . import nest
from .clock import clean_name, unwrapped
from .flops import FlopCounter
from .measure import Stage, refuse_nan
from .modes import LightMode
from .step import TrainingStep
from .strategies import Strategy


@dataclass(frozen=True)
class Outcome:
    """What one step left: loss, gradients (None where a parameter got none), buffers and updated parameters, all in
    host memory, and whether it drew random numbers."""

    loss: float
    gradients: dict[str, torch.Tensor | None]
    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    drew_random: bool  # from torch's generators
    drew_outside: bool  # from numpy's or Python's, which checkpointing does not restore
    still: float  # share of the elements with a gradient that the update did not change
    lowest: torch.dtype | None = None  # lowest floating type an operator computed in
    flops: int = 0


def run_once(stage: Stage, strategy: Strategy, *, mean: bool = False) -> Outcome:
    """Run one step under a strategy and keep what it left. `mean=True` replaces random draws by their means."""
    step = stage.step
    gradients: dict[str, torch.Tensor | None] = {}
    names = {id(parameter): name for name, parameter in step.named_parameters()}

    def catch(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        gradients[names[id(parameter)]] = _host(gradient)

    flops, precision = FlopCounter(), _LowestPrecision()
    with stage.applied(strategy) as runner, flops, precision, _Means() if mean else contextlib.nullcontext():
        before, outside = _random_states(step.device), _outside_states()
        start = {name: parameter.detach().clone() for name, parameter in step.named_parameters()}
        runner.run(catch=catch)
        drew = any(not torch.equal(a, b) for a, b in zip(before, _random_states(step.device), strict=True))
        refuse_nan(runner)
        root = unwrapped(step.model)
        return Outcome(
            loss=float(runner.loss),
            gradients={name: gradients.get(name) for name in names.values()},
            parameters={name: _host(parameter) for name, parameter in step.named_parameters()},
            buffers={clean_name(name): _host(buffer) for name, buffer in root.named_buffers()},
            drew_random=drew,
            drew_outside=outside != _outside_states(),
            still=_still(step, start, gradients),
            lowest=precision.lowest,
            flops=flops.total,
        )


def _host(tensor: torch.Tensor) -> torch.Tensor:
    """A dense copy in host memory, in double precision."""
    dense = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    wide = torch.complex128 if dense.is_complex() else torch.float64
    dtype = wide if dense.is_complex() or dense.is_floating_point() else dense.dtype
    return dense.to(device="cpu", dtype=dtype, copy=True)


def _random_states(device: torch.device) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def _outside_states() -> tuple[str, str]:
    numpy = sys.modules.get("numpy")
    return repr(random.getstate()), "" if numpy is None else repr(numpy.random.get_state())


def _still(step: TrainingStep, start: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor | None]) -> float:
    stayed = due = 0
    for name, parameter in step.named_parameters():
        gradient = gradients.get(name)
        if gradient is not None and gradient.shape == parameter.shape:
            has = gradient != 0
            due += int(has.sum())
            stayed += int((has & (parameter.detach() == start[name]).to("cpu")).sum())
    return stayed / due if due and step.optimizer is not None else 0.0


class _LowestPrecision(LightMode):
    """Notes the lowest floating type that operators compute in (`lowest`)."""

    def __init__(self) -> None:
        super().__init__()
        self.lowest: torch.dtype | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in nest.tensors(out):
            if tensor.is_floating_point() and tensor.dim():
                self.lowest = max(tensor.dtype, self.lowest or tensor.dtype, key=lambda dtype: torch.finfo(dtype).eps)
        return out


class _Means(LightMode):
    """Replaces every random draw by its mean: dropout keeps everything at its expected size."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name().removeprefix("aten::").partition(".")[0]
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        out = func(*args, **kwargs)
        if name in ("rand", "rand_like"):
            return out.fill_(0.5)
        if name in ("randn", "randn_like"):
            return out.zero_()
        if name == "bernoulli":
            return out.copy_(args[1] if len(args) > 1 and isinstance(args[1], float) else args[0])
        if name == "bernoulli_":
            probability = args[1] if len(args) > 1 else 0.5
            return out.copy_(probability) if isinstance(probability, torch.Tensor) else out.fill_(probability)
        if name == "uniform_":
            low, high = [*args[1:3], 0.0, 1.0][:2] if len(args) > 2 else (0.0, 1.0)
            return out.fill_((low + high) / 2)
        if name == "normal_":
            return out.fill_(args[1] if len(args) > 1 else 0.0)
        return out
