"""A training step and a strategy in, a `Trace` out, with nothing computed: no weights, no arithmetic, no GPU.

The step runs on fake tensors (`simulation/`), for a GPU with CUDA's choices in place of the CPU's, under the
same instruments as in `measure`.

Rule 1. What is simulated is a step of a training run under way: a plain step comes first, which makes the optimizer's
        state. So a simulation runs two steps.
Rule 2. The user's step stays as it is: models that exist are copied without their weights, callables build anew.
Rule 3. A simulated GPU keeps every tensor that is not on the CPU by its nature (the states of random streams are).
Rule 4. Garbage is collected before a step is watched (`measure.traced`). What was there before the simulation is none
        of its tensors, and to look through all of it takes a tenth as long as a simulation: it is left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Iterator
from typing import Literal, TypeAlias, get_args

from . import limit
from .assemble import UNLISTENED
from .errors import MemlabError
from .measure import Stage, checked, traced
from .modes import unseen
from .simulation.as_cuda import absent as not_emulated
from .simulation.as_cuda import as_cuda
from .simulation.fake import FakeMode, faked
from .simulation.faking import explained, faking
from .step import TrainingStep
from .strategies import Strategy
from .trace import Allocation, Trace

Device: TypeAlias = Literal["cuda", "cpu"]

_FROZEN_BY_PYTHON = 1000  # objects, generously: 3.12 starts with some hundreds
_BLOCK = 512  # bytes: the caching allocator on CUDA hands out multiples of it (c10/cuda/CUDACachingAllocator.cpp)


def simulate(
    step: TrainingStep,
    strategy: Strategy | None = None,
    device: Device = "cuda",
    *,
    steady: bool = True,
    sources: bool = False,
) -> Trace:
    """What one training step would do to memory, without running it: no weights, no computation, no GPU.

    >>> import torch, memlab
    >>> def build():
    ...     return torch.nn.Sequential(*[torch.nn.Linear(50_000, 50_000, bias=False) for _ in range(4)])
    >>> batch = torch.empty(8, 50_000, device="meta")
    >>> step = memlab.TrainingStep(build, batch, lambda model, x: model(x).sum(), torch.optim.SGD)
    >>> memlab.simulate(step).by_category()["parameters"]
    40000000000

    Parameters
    ----------
    step:     what is trained. A model given as a callable is built on tensors without data, so that 70 billion
              parameters need no memory; a model that exists is copied without its weights and stays as it is
    strategy: how; default `Baseline()`, the plain step
    device:   "cuda": as on a GPU of compute capability 8.0 or later, wherever the model is now. "cpu": exactly the
              tensor bytes that `measure` gives on a CPU
    steady:   what a training run pays: optimizer state exists. False simulates the first step
    sources:  also note the line of your code behind each allocation

    The trace has `source == "simulated"`; its `absent` lists what is not modelled, workspace among it, so that its
    `tensor_peak_bytes` is the figure to trust, and `peak_bytes` on "cuda" has the allocator's rounding besides.
    Micro-batches are weighted equally. Raises `MemlabError` for a step that steers by its data (the message names your
    line), and for a strategy that cannot run on it.
    """
    strategy = checked("simulate", step, strategy)
    with simulation(step, device, steady) as (stage, mode):
        trace = simulated(stage, mode, strategy, device, sources=sources)
    return trace


@contextlib.contextmanager
def simulation(step: TrainingStep, device: Device, steady: bool = True) -> Iterator[tuple[Stage, FakeMode]]:
    """A stage of fake tensors: strategies can be run on it while the block is open, and nothing real."""
    if device not in get_args(Device):
        raise MemlabError(f"device is {device!r}: there is 'cuda' (a GPU of compute capability 8.0 or later) and 'cpu'")
    as_there = as_cuda if device == "cuda" else contextlib.nullcontext
    with unseen(), _new_garbage_alone(), faking() as mode, as_there(mode):
        step = faked(step, mode)
        step.weight = None  # it may ask for data
        with Stage(step, steady) as stage:
            yield stage, mode


def simulated(stage: Stage, mode: FakeMode, strategy: Strategy, device: Device, *, sources: bool = False) -> Trace:
    """One strategy on a stage of fake tensors."""
    on_gpu = device == "cuda"
    mode.notes.clear()
    with explained():
        made = traced(
            stage, strategy, lambda _: None, allocator=False, sources=sources, host="host" if on_gpu else "cpu"
        )
    absent = [sentence for sentence in made.absent if sentence != UNLISTENED]  # nothing is allocated to listen to
    absent += not_emulated if on_gpu else ["workspace inside operators, which varies with the processor"]
    if on_gpu and any(tensor.state == "offloaded" for tensor in made.saved):
        absent.append("offloading: what `save_on_cpu` moves to the host's memory is counted as if it stayed on the GPU")
    made = dataclasses.replace(
        made,
        source="simulated",
        allocations=(*made.allocations, *_rounding(made)) if on_gpu else made.allocations,
        notes=(*made.notes, *mode.notes),
        absent=tuple(absent),
        provenance={**made.provenance, "device": device, "simulated": True},
    )
    limit.refuse(made)
    return made


@contextlib.contextmanager
def _new_garbage_alone() -> Iterator[None]:
    """Rule 4."""
    if gc.get_freeze_count() > _FROZEN_BY_PYTHON:  # by somebody else, to be left as it is
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _rounding(trace: Trace) -> Iterator[Allocation]:
    """What the caching allocator adds to each storage."""
    for allocation in trace.allocations:
        if rest := -allocation.nbytes % _BLOCK:
            yield dataclasses.replace(
                allocation, nbytes=rest, category="rounding", storage=None, name="", dtype="", shape=()
            )
