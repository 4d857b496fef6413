"""Recording and measuring change nothing: numbers, random streams, what is alive, installed and refused."""

import contextlib
import gc
import random
import weakref

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdRef

import memlab
from tests.truth import HOOK_REGISTRIES, distinct_bytes

RECORDERS = {
    "without": contextlib.nullcontext,
    "recorded": memlab.record,
    "with sources": lambda: memlab.record(sources=True),
    "with allocator": lambda: memlab.record(allocator=True),
}
INSTRUMENTS = list(RECORDERS)[1:]


class Net(nn.Module):
    """Something of everything: BatchNorm, dropout, a checkpointed block, an in-place write, a hook."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True))
        self.block = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Tanh())
        self.head = nn.Linear(16, 1)
        self.fail_in = ""

    def forward(self, x):
        x = self.stem(x)
        if self.fail_in == "backward":
            x.register_hook(self.fail)
        x = checkpoint(self.again, x, use_reentrant=False)
        if self.fail_in == "forward":
            self.fail(x)
        return self.head(x)

    def again(self, x):
        if self.fail_in == "recompute" and torch._C._current_graph_task_id() != -1:
            self.fail(x)
        return self.block(x)

    def fail(self, *_):
        raise self.error("on purpose")


def _trained(recorder):
    """Two training steps; all that they leave."""
    torch.manual_seed(1)
    model, x = Net(), torch.randn(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    left = []
    for _ in range(2):
        with recorder():
            loss = model(x).square().mean()
            loss.backward()
            left += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
    return [*left, *model.state_dict().values(), torch.get_rng_state()]


def _installed():
    """All that an instrument could leave behind."""
    return (
        [dict(registry) for registry in HOOK_REGISTRIES],
        torch.autograd._engine_run_backward,
        torch.get_rng_state,
        torch.utils._python_dispatch._get_current_dispatch_mode(),
        torch.overrides._get_current_function_mode_stack(),
        torch._C._autograd._profiler_enabled(),
        torch._C._autograd._saved_tensors_hooks_is_enabled(),
        torch.is_grad_enabled(),
    )


@pytest.mark.parametrize("instrument", INSTRUMENTS)
def test_not_a_bit_changes(instrument):
    plain, recorded = _trained(RECORDERS["without"]), _trained(RECORDERS[instrument])
    assert len(plain) == len(recorded)
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))


@contextlib.contextmanager
def without_collector():
    """What dies inside dies because nothing refers to it."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("fail_in", ["", "forward", "backward", "recompute"])
@pytest.mark.parametrize("instrument", INSTRUMENTS)
def test_nothing_stays_installed_and_nothing_alive(instrument, fail_in, error):
    model, x = Net(), torch.randn(8, 8)
    model.fail_in, model.error = fail_in, error
    died = []

    def step():
        out = model(x)
        died.append(weakref.ref(out.untyped_storage()))
        out.sum().backward()

    model.stem.register_forward_hook(lambda module, inputs, out: died.append(weakref.ref(out.untyped_storage())))
    before = _installed()
    with without_collector():
        with contextlib.suppress(error), RECORDERS[instrument]() as trace:
            step()
        assert _installed() == before
        assert died
        assert all(reference() is None for reference in died)
    assert trace.peak_bytes > 0


@pytest.mark.parametrize("instrument", INSTRUMENTS)
def test_recording_again_and_again_does_not_grow(instrument):
    model, x = Net(), torch.randn(8, 8)
    optimizer = torch.optim.Adam(model.parameters())

    def alive():
        gc.collect()
        return distinct_bytes(found for found in gc.get_objects() if type(found) in (torch.Tensor, nn.Parameter))

    def run():
        with RECORDERS[instrument]():
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    run()
    first = alive()
    for _ in range(10):
        run()
    assert alive() == first


def test_a_trace_holds_no_tensor():
    with memlab.record(allocator=True, sources=True) as trace:
        Net()(torch.ones(2, 8)).sum().backward()
    pending, seen = [trace], set()
    while pending:
        found = pending.pop()
        if id(found) not in seen and not isinstance(found, type):
            seen.add(id(found))
            assert not isinstance(found, torch.Tensor | nn.Module | torch.autograd.graph.Node)
            pending += gc.get_referents(found) if not callable(found) else []


@pytest.mark.parametrize("instrument", INSTRUMENTS)
def test_an_illegal_edit_is_still_an_error(instrument):
    x = torch.ones(3, requires_grad=True)
    with RECORDERS[instrument]():
        y = x.exp()
        y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    assert x.grad is None


@pytest.mark.parametrize("instrument", INSTRUMENTS)
def test_a_second_backward_through_a_freed_graph_is_still_an_error(instrument):
    x = torch.ones(3, requires_grad=True)
    with RECORDERS[instrument]():
        y = x.exp().sum()
        y.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            y.backward()


def test_identities_survive():
    """No tensor is replaced by another, in gradients, state or parameters."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters())
    with memlab.record(model, optimizer):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    before = [WeakIdRef(t) for t in (*model.parameters(), *(p.grad for p in model.parameters()))]
    with memlab.record(model, optimizer):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    after = [*model.parameters(), *(p.grad for p in model.parameters())]
    assert [reference() for reference in before] == after


# -- compiled modules --------------------------------------------------------------------------------------------------


@pytest.fixture
def counter():
    torch._dynamo.reset()
    yield CompileCounter()
    torch._dynamo.reset()


@pytest.mark.parametrize("instrument", INSTRUMENTS)
@pytest.mark.filterwarnings("error:Using `torch.compile")
def test_a_compiled_module_stays_compiled(counter, instrument):
    ran = []

    def backend(graph, inputs):
        counter(graph, inputs)
        return lambda *args: ran.append(1) or graph(*args)

    model = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), backend=backend)
    x = torch.ones(2, 4)
    model(x).sum().backward()
    for times in (2, 3):
        with RECORDERS[instrument]() as trace:
            model(x).sum().backward()
        assert trace.saved_bytes > 0
        model(x)
        assert len(ran) == 2 * times - 1
    assert counter.frame_count == 1


@pytest.mark.parametrize("steady", [True, False])
@pytest.mark.filterwarnings("error:Using `torch.compile")
def test_a_compiled_module_is_measured_compiled_from_the_first_time(counter, steady):
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 1))
    step = memlab.TrainingStep(
        torch.compile(model, backend=counter), (torch.ones(2, 4), torch.ones(2, 1)), nn.MSELoss(), torch.optim.Adam
    )
    trace = memlab.measure(step, steady=steady)
    assert counter.frame_count == 1
    assert any("runs compiled" in note for note in trace.notes)
    step.loss()
    assert counter.frame_count == 1
    assert trace.by_category("optimizer")["parameters"] == distinct_bytes(model.parameters())


# -- measuring and comparing -------------------------------------------------------------------------------------------


def _state(step):
    """All that a step could change."""
    optimizer = step.optimizer.state_dict()
    return (
        [t.clone() for t in step.model.state_dict().values()],
        [None if p.grad is None else p.grad.clone() for p in step.model.parameters()],
        {key: {k: v.clone() for k, v in state.items()} for key, state in optimizer["state"].items()},
        [t.clone() for t in step.batch],
        torch.get_rng_state(),
        random.getstate(),
        [module.training for module in step.model.modules()],
    )


def _same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return a == b


STRATEGIES = [
    memlab.Checkpoint("block"),
    memlab.MicroBatch(count=3),
    memlab.MixedPrecision("bf16"),
    memlab.LowPrecision("bf16"),
    memlab.OptimizerInBackward(),
]


def _compare(step):
    return memlab.compare(step, STRATEGIES, repeats=1)


@pytest.mark.parametrize(("run", "trained"), [(memlab.measure, False), (memlab.measure, True), (_compare, True)])
def test_measuring_and_comparing_leave_all_as_it_was(run, trained):
    step = memlab.TrainingStep(Net(), (torch.randn(6, 8), torch.randn(6, 1)), nn.MSELoss(), torch.optim.AdamW)
    step.model.block.eval()
    if trained:
        step.loss().backward()
        step.optimizer.step()
    before, installed = _state(step), _installed()
    parameters = [id(p) for p in step.model.parameters()]
    gradients = [id(p.grad) for p in step.model.parameters()]
    run(step)
    assert _same(_state(step), before)
    assert _installed() == installed
    assert [id(p) for p in step.model.parameters()] == parameters
    assert [id(p.grad) for p in step.model.parameters()] == gradients


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("fail_in", ["forward", "backward", "recompute"])
def test_also_after_an_error_within(fail_in, error):
    step = memlab.TrainingStep(Net(), (torch.randn(6, 8), torch.randn(6, 1)), nn.MSELoss(), torch.optim.AdamW)
    before, installed = _state(step), _installed()
    step.model.fail_in, step.model.error = fail_in, error
    for run in (memlab.measure, _compare):
        with pytest.raises(error, match="on purpose"):
            run(step)
        assert _same(_state(step), before)
        assert _installed() == installed
