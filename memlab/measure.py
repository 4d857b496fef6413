"""A training step and a strategy in, a `Trace` out; and everything as it was before.

A `Stage` is where steps are run: it warms the step up once, notes the state from which every strategy starts, and puts
the user's own state back at the end. `measure` runs one strategy on it under the instruments.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch

from . import allocator as allocator_
from . import release
from .errors import MemlabError
from .flops import work
from .record import Recorder
from .state import State, snapshot
from .step import TrainingStep
from .strategies import Baseline, Runner, Strategy
from .trace import Trace
from .units import format_bytes

_IN_WORDS = {
    "CopySlices": "an in-place write to a view (CopySlices)",
    "DifferentiableGraphBackward": "TorchScript (DifferentiableGraphBackward)",
}
_MOST_WARM_UPS = 20  # fp16 loss scaling halves its scale from 2**16 at each overflow


class Stage:
    """Runs a step again and again from one start. A context manager; at its end the user's state is put back.

    With `steady` the start is that of a training run under way: one plain step has made the optimizer's state (and
    whatever libraries make at their first call); its effect on parameters, buffers and random streams is undone.
    Without it, the start is the user's own state.
    """

    def __init__(self, step: TrainingStep, steady: bool = True) -> None:
        self.step = step
        self._steady = steady
        self._users: State | None = None
        self._start: State | None = None
        self._compiled = bool(compiled_modules(step)) or any(
            isinstance(module, torch.jit.ScriptModule) for module in step.model.modules()
        )
        self._rehearsed: set[str] = set()
        self._first_node = torch._C._autograd._get_sequence_nr()

    def __enter__(self) -> Stage:
        step = self.step
        if step.device.type == "meta":
            raise MemlabError(
                "the model is on the meta device, which holds shapes and no numbers: build it on a device that "
                "computes, or move it there with model.to_empty(device='cpu') and initialise it"
            )
        self._users = step.snapshot()
        try:
            self._without_gradients()
            if self._steady:
                learned, known = snapshot(step.model, step.batch, step.loss_fn), dict(step.named_parameters())
                with Baseline().applied(step) as runner:
                    runner.run()
                _refuse_new({name for name, _ in step.named_parameters()} - known.keys())
                learned.restore()
                self._without_gradients()
            self._start = step.snapshot()
        except BaseException:
            self._users.restore()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        assert self._users is not None
        if error is not None:
            self.release_graphs()
        self._users.restore()
        self._users = self._start = None

    @contextlib.contextmanager
    def applied(self, strategy: Strategy) -> Iterator[Runner]:
        """The strategy applied at the common start, ready for one `run`; everything is undone afterwards."""
        assert self._start is not None, "enter the stage first"
        self._start.restore()
        try:
            if self._compiled and repr(strategy) not in self._rehearsed:
                self._rehearse(strategy)
            with strategy.applied(self.step) as runner:
                for _ in range(_MOST_WARM_UPS if runner.scales_loss else 0):
                    runner.run()
                    self._start.restore()
                    if not runner.skipped:
                        break
                if runner.skipped:
                    runner.notes.append(
                        f"{_MOST_WARM_UPS} steps in a row were skipped, their scaled gradients overflowed: no update "
                        "happens, and the optimizer's memory is not that of a training run"
                    )
                yield runner
        finally:
            self._start.restore()

    def release_graphs(self) -> None:
        """After an error: let go of all graphs made here. Those of checkpointed regions would stay for good."""
        release.graphs(self._first_node)

    def _rehearse(self, strategy: Strategy) -> None:
        """Have modules compiled for this strategy's shapes and types while no instrument looks on: what is compiled
        under one stays as it then was."""
        assert self._start is not None
        with strategy.applied(self.step) as runner:
            runner.run()
        self._start.restore()
        self._rehearsed.add(repr(strategy))

    def _without_gradients(self) -> None:
        for _, parameter in self.step.named_parameters():
            parameter.grad = None


def measure(
    step: TrainingStep,
    strategy: Strategy | None = None,
    *,
    allocator: bool = True,
    steady: bool = True,
    sources: bool = False,
) -> Trace:
    """Run one training step for real, where the model lives, and return its `Trace`.

    >>> import torch, memlab
    >>> step = memlab.TrainingStep(torch.nn.Linear(64, 8), (torch.ones(32, 64), torch.ones(32, 8)), torch.nn.MSELoss())
    >>> memlab.measure(step).by_category()["parameters"]
    2080

    Parameters
    ----------
    step:      what is trained
    strategy:  how; default `Baseline()`, the plain step
    allocator: listen to the device's allocator: workspace inside operators is seen and `peak_bytes` is the
               allocator's own, to the byte. False is cheaper and counts tensors alone
    steady:    what a training run pays: optimizer state exists. False measures the first step
    sources:   also note the line of your code behind each allocation (slower)

    The model, optimizer, gradients, batch and random streams are afterwards as before. Raises `MemlabError` for a step
    that cannot be trained (no scalar loss, no gradient, NaN) or a strategy that cannot run on it; your code's own
    exceptions pass unchanged.
    """
    strategy = checked("measure", step, strategy)
    refuse(allocator)
    with Stage(step, steady) as stage:
        return trace(stage, strategy, allocator=allocator, sources=sources)


def trace(stage: Stage, strategy: Strategy, *, allocator: bool = True, sources: bool = False) -> Trace:
    """Measure one strategy on a stage."""
    return traced(stage, strategy, refuse_nan, allocator=allocator, sources=sources)


def traced(stage: Stage, strategy: Strategy, check: Callable[[Runner], None], **instruments: Any) -> Trace:
    """One strategy run on a stage under the `Recorder`'s `instruments`, and checked."""
    step = stage.step
    with stage.applied(strategy) as runner:
        gc.collect()  # garbage of earlier steps would be released in the middle of this one
        recorder = Recorder(step.model, step.optimizer, runner.batch, device=step.device, measures=work, **instruments)
        recorder.start()
        try:
            for root in list(step.roots.values())[1:]:
                recorder.adopt(root)
            runner.run()
        finally:
            recorder.stop()
        check(runner)
        notes = list(runner.notes)
        absent = [] if step.optimizer is not None else ["optimizer state: the step has no optimizer"]
        if compiled := compiled_modules(step):
            notes.append(f"{', '.join(compiled)} runs compiled and is measured so, as one unit")
            absent.append("single operators and modules inside compiled code")
        notes += own_checkpointing(step)
        made = recorder.trace(strategy=strategy.label(step), notes=notes, absent=absent)
        return dataclasses.replace(made, notes=(*made.notes, *_of_unseen(made)))


def compiled_modules(step: TrainingStep) -> list[str]:
    """Names of the modules that run compiled."""
    return [
        step.module_names.get(id(module), type(module).__name__)
        for module in step.model.modules()
        if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
    ]


def _of_unseen(traced: Trace) -> list[str]:
    """A note on saved tensors that are assumed, not seen."""
    unseen = [tensor for tensor in traced.saved if tensor.state == "unseen"]
    if not unseen:
        return []
    nodes = sorted({tensor.operator for tensor in unseen})
    at_entry = collections.Counter[int]()
    for tensor in unseen:
        at_entry[tensor.entry] += tensor.storage_bytes
    most = format_bytes(max(at_entry.values()))
    which = ", ".join(_IN_WORDS.get(node, node) for node in nodes)
    return [
        f"{which} shows nobody what it saved: {most} that are alive when backward begins, and that nothing else "
        "explains, are counted as saved"
    ]


def own_checkpointing(step: TrainingStep) -> list[str]:
    """A note where the model checkpoints by itself, as Hugging Face's models do when told to."""
    switched = [module for module in step.model.modules() if getattr(module, "gradient_checkpointing", False) is True]
    if not switched:
        return []
    where = ", ".join(dict.fromkeys(type(module).__name__ for module in switched))
    if not any(module.training for module in switched):
        return [
            f"the model's own gradient checkpointing ({where}) is on but without effect: the model is in eval mode, "
            "and it checkpoints in training only. Call model.train()"
        ]
    return [f"the model's own gradient checkpointing ({where}) is on: what is measured has it"]


def refuse(allocator: bool) -> None:
    """Raise where nothing can be measured now: under `torch.inference_mode`, or inside a running profiler."""
    if torch.is_inference_mode_enabled():
        raise MemlabError("torch.inference_mode is on, and nothing can be trained under it: leave that block")
    if not torch.is_grad_enabled():
        raise MemlabError("gradients are switched off (torch.no_grad): leave that block to measure a training step")
    if allocator:
        allocator_.refuse_running_profiler()


def _refuse_new(names: set[str]) -> None:
    if names:
        raise MemlabError(
            f"the first step made parameters, {', '.join(sorted(names)[:4])}, which no optimizer made before can "
            "know: run the model once, then make the optimizer and the TrainingStep"
        )


def refuse_nan(runner: Runner) -> None:
    """Raise where the last run's loss is not a number; says in which micro-batch."""
    numbers = runner.not_numbers()
    if not numbers:
        return
    where = ""
    if runner.micro_batches is not None:
        where = f" in micro-batch {', '.join(map(str, numbers))} of {len(runner.micro_batches)}"
    raise MemlabError(
        f"the loss is NaN{where}, so nothing that is measured or compared here would mean anything: look for a mean "
        "over an empty selection, a division by zero or a log of zero in the loss "
        "(torch.autograd.set_detect_anomaly(True) names the operator), or lower the learning rate"
    )


def checked(name: str, step: TrainingStep, strategy: Strategy | None) -> Strategy:
    """The strategy that is meant, or an error for what is none."""
    if not isinstance(step, TrainingStep):
        raise MemlabError(
            f"{name}() takes a TrainingStep, not {type(step).__name__}: memlab.TrainingStep(model, batch, loss_fn)"
        )
    if strategy is None:
        return Baseline()
    if not isinstance(strategy, Strategy):
        raise MemlabError(
            f"{strategy!r} is no strategy: choose among memlab.Baseline(), Checkpoint(), MicroBatch(count=4), "
            'MixedPrecision("bf16"), LowPrecision("bf16"), OptimizerInBackward() and their sums'
        )
    return strategy
