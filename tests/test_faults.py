"""An exception at every operator of a step, under every strategy: nothing changes, nothing stays, nothing lives on."""

from __future__ import annotations

import contextlib
import gc
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import memlab
from memlab.strategies import Runner
from tests.truth import HOOK_REGISTRIES

MOST_OPERATORS = 200
SAMPLES = 6


class Fault(Exception):
    """Raised on purpose."""


class Block(nn.Module):
    """Something of everything that can be left half done: a mode, hooks, running statistics, masks, a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.drop(torch.relu_(self.norm(self.linear(x))))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 1)
        self.seen: list[tuple[int, ...]] = []  # a history that each forward pass grows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(tuple(x.shape))
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


STRATEGIES: dict[str, memlab.Strategy] = {
    "plain": memlab.Baseline(),
    "checkpoint": memlab.Checkpoint(),
    "micro-batches": memlab.MicroBatch(count=2),
    "bf16": memlab.MixedPrecision("bf16"),
    "fp16": memlab.MixedPrecision("fp16"),
    "pure bf16": memlab.LowPrecision("bf16"),
    "in backward": memlab.OptimizerInBackward(),
    "sum": memlab.Checkpoint() + memlab.MicroBatch(count=2) + memlab.MixedPrecision("bf16"),
}


def _step() -> memlab.TrainingStep:
    """Under way: gradients stand, the optimizer has its state, one module is in eval mode, one parameter is frozen."""
    model = Net()
    model.blocks[1].norm.eval()
    model.blocks[0].linear.bias.requires_grad_(False)
    model.head.register_forward_hook(lambda module, inputs, output: None)
    batch = torch.randn(SAMPLES, 8), torch.randn(SAMPLES, 1)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), foreach=False)
    step = memlab.TrainingStep(model, batch, nn.MSELoss(), optimizer)
    step.loss().backward()
    optimizer.step()
    return step


class Failing(TorchDispatchMode):
    """Raises at the operator numbered `at`; with None it only counts."""

    def __init__(self, at: int | None = None, error: type[BaseException] = Fault) -> None:
        super().__init__()
        self.at, self.error, self.count = at, error, 0
        self.made: list[weakref.ref[Any]] = []  # storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        number, self.count = self.count, self.count + 1
        if number == self.at:
            raise self.error("on purpose")
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.made.append(weakref.ref(out.untyped_storage()))
        return out


# -- what must be as it was --------------------------------------------------------------------------------------------


def _state(step: memlab.TrainingStep) -> Any:
    """All that a step could change, by value."""
    optimizer = step.optimizer
    assert optimizer is not None
    network: Any = step.model
    return {
        "model": [t.detach().clone() for t in (*network.parameters(), *network.buffers())],
        "gradients": [None if p.grad is None else p.grad.clone() for p in network.parameters()],
        "requires_grad": [p.requires_grad for p in network.parameters()],
        "modes": [module.training for module in network.modules()],
        "counters": [block.calls for block in network.blocks],
        "history": list(network.seen),
        "optimizer": [
            {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in own.items()}
            for own in optimizer.state.values()
        ],
        "groups": [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups],
        "batch": [tensor.clone() for tensor in step.batch],
        "random": [torch.get_rng_state(), repr(random.getstate()), repr(np.random.get_state())],
    }


def _identities(step: memlab.TrainingStep) -> list[int]:
    owned = [*step.model.parameters(), *(p.grad for p in step.model.parameters()), *step.model.buffers(), *step.batch]
    return [0 if tensor is None else id(tensor) for tensor in owned]


def _installed(step: memlab.TrainingStep) -> Any:
    """All that an instrument or a strategy could leave behind."""
    modules = [
        (
            "forward" in vars(module),
            len(module._forward_hooks),
            len(module._forward_pre_hooks),
            len(module._backward_hooks),
            len(module._backward_pre_hooks),
        )
        for module in step.model.modules()
    ]
    return (
        [dict(registry) for registry in HOOK_REGISTRIES],
        modules,
        [bool(p._backward_hooks or p._post_accumulate_grad_hooks) for p in step.model.parameters()],
        torch.autograd._engine_run_backward,
        torch.get_rng_state,
        torch.utils._python_dispatch._get_current_dispatch_mode(),
        torch.overrides._get_current_function_mode_stack(),
        torch._C._autograd._profiler_enabled(),
        torch._C._autograd._saved_tensors_hooks_is_enabled(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(),
    )


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


def _changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name in before if not _same(before[name], after[name])]


def _figures(step: memlab.TrainingStep, strategy: memlab.Strategy) -> Any:
    trace = memlab.measure(step, strategy, allocator=False)
    return trace.tensor_peak_bytes, trace.saved_bytes, len(trace.allocations), trace.by_category("tensor_peak")


# -- failing -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _in_runs(mode: Failing, chosen: Callable[[int, Runner], bool]) -> Iterator[list[int]]:
    """`mode` on, beneath the instruments, during the runs of a step that are chosen by their number (from 1) or their
    runner. Yields a list that fills with the number of operators in each chosen run."""
    original, counts, runs = Runner.run, [], 0

    def run(self: Runner, **options: Any) -> None:
        nonlocal runs
        runs += 1
        if not chosen(runs, self):
            return original(self, **options)
        before = mode.count
        with mode:
            original(self, **options)
        counts.append(mode.count - before)

    Runner.run = run  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        Runner.run = original  # type: ignore[method-assign]


def _counts(run: Callable[[], Any]) -> list[int]:
    """How many operators each run of the step in `run()` has."""
    with _in_runs(Failing(), lambda number, runner: True) as counts:
        run()
    return counts


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """What dies inside dies because nothing refers to it."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _raised(error: type[BaseException], run: Callable[[], Any]) -> bool:
    """Whether `run()` ends by the fault. Keeps no traceback, which would keep tensors."""
    try:
        run()
    except error as raised:
        return str(raised) == "on purpose"
    return False


def _alive(mode: Failing, step: memlab.TrainingStep) -> int:
    """Storages made in the failed run that live on, without those of the step itself."""
    mine = {id(t.untyped_storage()) for t in _owned(step)}
    return sum(reference() is not None and id(reference()) not in mine for reference in mode.made)


def _owned(step: memlab.TrainingStep) -> list[torch.Tensor]:
    assert step.optimizer is not None
    gradients = [p.grad for p in step.model.parameters() if p.grad is not None]
    state = [v for own in step.optimizer.state.values() for v in own.values() if isinstance(v, torch.Tensor)]
    return [*step.model.parameters(), *step.model.buffers(), *step.batch, *gradients, *state]


def _spread(count: int, most: int) -> list[int]:
    return sorted({round(k * (count - 1) / max(most - 1, 1)) for k in range(min(most, count))})


@pytest.mark.parametrize("allocator", [False, True], ids=["tensors", "allocator"])
@pytest.mark.parametrize("error", [Fault, KeyboardInterrupt])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_failed_measure_leaves_all_as_it_was(name: str, error: type[BaseException], allocator: bool) -> None:
    step, strategy = _step(), STRATEGIES[name]
    figures = _figures(step, strategy)
    counts = _counts(lambda: memlab.measure(step, strategy, allocator=False))
    thorough = error is Fault and not allocator
    if name == "plain":
        assert counts[-1] <= MOST_OPERATORS
    indices = range(counts[-1]) if thorough else _spread(counts[-1], 6)
    before, identities, installed = _state(step), _identities(step), _installed(step)
    for at in indices:
        mode = Failing(at, error)
        with _without_collector():
            with _in_runs(mode, lambda number, runner: number == len(counts)):  # those before it warm up
                assert _raised(error, lambda: memlab.measure(step, strategy, allocator=allocator)), at
            assert not _alive(mode, step), at
        assert _changed(before, _state(step)) == [], at
        assert _installed(step) == installed, at
        assert _identities(step) == identities, at
    assert _figures(step, strategy) == figures


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_failed_warm_up_leaves_all_as_it_was(name: str) -> None:
    step, strategy = _step(), STRATEGIES[name]
    counts = _counts(lambda: memlab.measure(step, strategy, allocator=False))
    before, installed = _state(step), _installed(step)
    for warm_up, count in enumerate(counts[:-1], start=1):
        for at in _spread(count, 6):
            with _in_runs(Failing(at), lambda number, runner, wanted=warm_up: number == wanted):  # type: ignore[misc]
                assert _raised(Fault, lambda: memlab.measure(step, strategy, allocator=False)), (warm_up, at)
            assert _changed(before, _state(step)) == [], (warm_up, at)
            assert _installed(step) == installed, (warm_up, at)


@pytest.mark.parametrize("name", list(STRATEGIES)[1:])
def test_in_a_comparison_it_becomes_a_row_and_the_others_are_as_without_it(name: str) -> None:
    step, strategy = _step(), STRATEGIES[name]
    other = memlab.MicroBatch(count=3)
    plain, good = memlab.compare(step, [other], repeats=0).rows
    before, installed = _state(step), _installed(step)
    for at in _spread(100, 3):
        with _in_runs(Failing(at), lambda number, runner: runner.name == str(strategy)):
            rows = memlab.compare(step, [strategy, other], repeats=0).rows
        assert rows[1].error == "Fault: on purpose", at
        assert rows[1].trace is rows[1].equivalent is None
        for row, expected in zip((rows[0], rows[2]), (plain, good), strict=True):
            assert row.error is None
            assert row.tensor_peak_bytes == expected.tensor_peak_bytes
            assert (row.equivalent, row.gradient_difference) == (expected.equivalent, expected.gradient_difference)
        assert _changed(before, _state(step)) == [], at
        assert _installed(step) == installed, at


@pytest.mark.parametrize(
    ("error", "name"), [(Fault, "plain"), (KeyboardInterrupt, "plain"), (KeyboardInterrupt, "sum")]
)
def test_a_plain_step_that_fails_ends_the_comparison_and_so_does_an_interrupt(
    error: type[BaseException], name: str
) -> None:
    step, strategy = _step(), STRATEGIES[name]
    before, installed = _state(step), _installed(step)
    for at in _spread(100, 3):
        with _in_runs(Failing(at, error), lambda number, runner: runner.name == str(strategy)):
            assert _raised(error, lambda: memlab.compare(step, [strategy], repeats=0)), at
        assert _changed(before, _state(step)) == [], at
        assert _installed(step) == installed, at


@pytest.mark.parametrize("error", [Fault, KeyboardInterrupt])
@pytest.mark.parametrize("options", [{}, {"allocator": True}, {"sources": True}], ids=["plain", "allocator", "sources"])
def test_a_failed_block_is_recorded_and_nothing_stays(options: dict[str, bool], error: type[BaseException]) -> None:
    step = _step()
    optimizer = step.optimizer
    assert optimizer is not None

    def run(mode: Failing) -> None:
        with memlab.record(**options) as trace:
            traces.append(trace)
            with mode:
                step.loss().backward()
                optimizer.step()
                optimizer.zero_grad()

    traces: list[memlab.Trace] = []
    counting = Failing()
    run(counting)
    installed = _installed(step)
    for at in range(counting.count) if error is Fault and not options else _spread(counting.count, 12):
        mode = Failing(at, error)
        with _without_collector():
            assert _raised(error, lambda mode=mode: run(mode)), at  # type: ignore[misc]
            assert not _alive(mode, step), at
        assert any(f"the block ended early, by {error.__name__}" in note for note in traces[-1].notes)
        assert sum(traces[-1].by_category().values()) == traces[-1].peak_bytes
        assert _installed(step) == installed, at
