"""One step run for its numbers: the loss, gradients, parameters, buffers and other state that it leaves.

`run_once` runs a strategy on a stage and returns an `Outcome`; with `mean=True` every random draw is replaced by its
mean, so that steps which draw in another order can be compared.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from . import nest
from .clock import clean_name
from .flops import FlopCounter
from .kept import Kept, kept
from .means import Means, differ, global_streams
from .measure import Stage, refuse_nan
from .modes import LightMode
from .step import TrainingStep
from .strategies import Strategy
from .walk import stream, walk

Tensors: TypeAlias = dict[str, torch.Tensor]
Gradients: TypeAlias = dict[str, torch.Tensor | None]


@dataclass(frozen=True)
class Outcome:
    """What one step left, in host memory, and how it came to that.

    Names of what the model holds are the model's; those of modules that `loss_fn` holds begin with their class. `kept`
    is what modules keep outside parameters and buffers. `gradients` has None where a parameter got none; `trained` has
    the names of the parameters that the optimizer, or a hook of the user's, is to update.
    """

    loss: float
    loss_scale: float  # of the losses of micro-batches, which may cancel
    gradients: Gradients
    parameters: Tensors
    trained: frozenset[str]
    buffers: Tensors
    kept: Kept
    touched: frozenset[str]  # the buffers that the step changed
    drew_random: bool  # from torch's generators, global or held
    drew_own: bool  # from generators that the step holds, or numpy's or Python's: checkpointing restores none of them
    still: float  # share of the elements with a gradient that the update did not change
    no_mean: frozenset[str] = frozenset()  # operators that drew and could not be replaced by their mean
    lowest: torch.dtype | None = None  # lowest floating type an operator computed in
    flops: int = 0


def run_once(stage: Stage, strategy: Strategy, *, mean: bool = False) -> Outcome:
    """Run one step under a strategy and keep what it left. `mean=True` replaces random draws by their means."""
    step = stage.step
    caught: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def catch(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        caught[id(parameter)] = parameter, _host(gradient)

    flops, watch, means = FlopCounter(), _Watch(), Means() if mean else None
    with stage.applied(strategy) as runner, flops, watch, means or contextlib.nullcontext():
        streams = _Streams(step)
        start = {name: parameter.detach().clone() for name, parameter in step.named_parameters()}
        start_buffers = _buffers(step)
        runner.run(catch=catch)
        drew_torch, drew_held, drew_outside = streams.moved()
        refuse_nan(runner)
        roots = step.roots
        parameters = {p + clean_name(n): t for p, root in roots.items() for n, t in root.named_parameters()}
        groups = [] if step.optimizer is None else step.optimizer.param_groups
        updated = {id(p) for group in groups for p in group["params"]}
        updated |= {id(p) for p in parameters.values() if p._post_accumulate_grad_hooks}
        buffers = _buffers(step)
        # A parameter may have been made by the step itself.
        gradients: Gradients = {name: caught.get(id(p), (p, None))[1] for name, p in step.named_parameters()}
        return Outcome(
            loss=float(runner.loss),
            loss_scale=sum(abs(float(loss)) for loss in runner.losses),
            gradients=gradients,
            parameters={name: _host(parameter) for name, parameter in parameters.items()},
            trained=frozenset(name for name, p in parameters.items() if id(p) in updated and p.requires_grad),
            buffers=buffers,
            kept=kept(roots),
            touched=frozenset(name for name, t in buffers.items() if not _equal(t, start_buffers.get(name))),
            drew_random=drew_torch or drew_held or watch.drew,
            drew_own=drew_held or drew_outside,
            still=_still(step, start, gradients),
            no_mean=frozenset(means.no_mean if means else ()),
            lowest=watch.lowest,
            flops=flops.total,
        )


def _buffers(step: TrainingStep) -> Tensors:
    return {p + clean_name(n): _host(buffer) for p, root in step.roots.items() for n, buffer in root.named_buffers()}


def _equal(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    return other is not None and torch.equal(one, other)


def _host(tensor: torch.Tensor) -> torch.Tensor:
    """A dense copy in host memory, in double precision."""
    dense = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    wide = torch.complex128 if dense.is_complex() else torch.float64
    dtype = wide if dense.is_complex() or dense.is_floating_point() else dense.dtype
    return dense.to(device="cpu", dtype=dtype, copy=True)


class _Streams:
    """The random streams that a step can draw from, as they are now; `moved` tells which were drawn from since:
    torch's global ones, generators of torch's that the step holds, numpy's and Python's."""

    def __init__(self, step: TrainingStep) -> None:
        held = [(isinstance(f, torch.Generator), s[0]) for f in walk(step.model, step.loss_fn) if (s := stream(f))]
        numpy, cuda = sys.modules.get("numpy"), step.device.type == "cuda"
        torchs: list[Callable[[], Any]] = [torch.get_rng_state]
        others: list[Callable[[], Any]] = [random.getstate, *(read for of_torch, read in held if not of_torch)]
        if cuda:
            torchs.append(functools.partial(torch.cuda.get_rng_state, step.device))
        if numpy is not None:
            others.append(numpy.random.get_state)
        self._readers = torchs, [read for of_torch, read in held if of_torch], others
        self._before = self._read()

    def moved(self) -> tuple[bool, bool, bool]:
        torchs, held, others = (before != now for before, now in zip(self._before, self._read(), strict=True))
        return torchs, held, others

    def _read(self) -> list[str]:
        states = [[read() for read in readers] for readers in self._readers]
        return [repr([s.tolist() if isinstance(s, torch.Tensor) else s for s in of_kind]) for of_kind in states]


def _still(step: TrainingStep, start: Tensors, gradients: Gradients) -> float:
    stayed = due = 0
    for name, parameter in step.named_parameters():
        gradient = gradients.get(name)
        if gradient is not None and name in start and gradient.shape == parameter.shape:
            has = gradient != 0
            due += int(has.sum())
            stayed += int((has & (_host(parameter) == _host(start[name]))).sum())
    return stayed / due if due and step.optimizer is not None else 0.0


class _Watch(LightMode):
    """Notes the lowest floating type that operators compute in (`lowest`), and whether one drew random numbers
    (`drew`), which the streams do not tell where the forward pass puts them back itself."""

    def __init__(self) -> None:
        super().__init__()
        self.lowest: torch.dtype | None = None
        self.drew = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = global_streams() if torch.Tag.nondeterministic_seeded in func.tags and not self.drew else []
        out = func(*args, **(kwargs or {}))
        self.drew |= bool(before) and any(map(differ, before, global_streams()))
        for tensor in nest.tensors(out):
            if tensor.is_floating_point() and tensor.dim():
                self.lowest = max(tensor.dtype, self.lowest or tensor.dtype, key=lambda dtype: torch.finfo(dtype).eps)
        return out
