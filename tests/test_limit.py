"""`limit`: it raises exactly where a count by brute force goes over, says why, and leaves nothing behind."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import sys
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import memlab
from memlab import zoo
from tests.truth import allocator_peak, resident_bytes, state_tensors

# -- truth -------------------------------------------------------------------------------------------------------------


class Count(TorchDispatchMode):
    """After each operator, its name and the bytes of all storages alive: those from before and all it has seen."""

    def __init__(self, older=()):
        super().__init__()
        self.seen, self.after = {}, []
        self.older = {self._meet(tensor)._cdata for tensor in older}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._meet(tensor)
        self.after.append((func.name().partition(".")[0].removeprefix("aten::"), self.in_use()))
        return out

    def _meet(self, tensor):
        storage = tensor.untyped_storage()
        if self.seen.get(storage._cdata, lambda: None)() is not storage:
            self.seen[storage._cdata] = weakref.ref(storage)
        return storage

    def in_use(self):
        return sum(storage.nbytes() for storage in (ref() for ref in self.seen.values()) if storage is not None)

    def peak(self):
        return max(nbytes for _, nbytes in self.after)

    def left(self):
        """Bytes of what was made inside and is alive still."""
        alive = [ref() for ref in self.seen.values()]
        return sum(s.nbytes() for s in alive if s is not None and s._cdata not in self.older)


class Block(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self, width=16, inner=128, depth=3, checkpointed=False):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, inner) for _ in range(depth))
        self.checkpointed = checkpointed

    def forward(self, x):
        for block in self.blocks:
            if self.checkpointed:  # random states are made outside operators, where a count of these cannot see them
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x)
        return x


class Case:
    """A training step as a user writes it, with marks where its parts begin, and what it holds from the start."""

    def __init__(self, samples=128, optimizer=torch.optim.SGD, **options):
        self.model, self.x = Net(**options), torch.randn(samples, 16)
        self.optimizer = optimizer(self.model.parameters(), lr=0.01)
        self.loss = None

    def step(self, mark=lambda: None):
        self.loss = self.model(self.x).square().mean()
        mark()
        self.loss.backward()
        mark()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def resident(self):
        return [*self.model.parameters(), self.x, *state_tensors(self.optimizer)]

    def known(self):
        return {"model": self.model, "optimizer": self.optimizer, "batch": self.x}

    def counted(self):
        """(name, bytes) after each operator of a copy's step, in three parts: forward, backward, optimizer."""
        self.loss = None
        case, ends = copy.deepcopy(self), []
        with Count(case.resident()) as count:
            case.step(lambda: ends.append(len(count.after)))
        return count.after[: ends[0]], count.after[ends[0] : ends[1]], count.after[ends[1] :]


def _top(part):
    return max(nbytes for _, nbytes in part)


# One for each phase: a step, and a budget under which it stops there, given what each of its parts needs.
PHASES = {
    "forward": (lambda: Case(), lambda f, b, o: _top(f) - 1),
    "backward": (lambda: Case(), lambda f, b, o: _top(f)),
    "recompute": (lambda: Case(checkpointed=True), lambda f, b, o: _top(f)),
    "optimizer": (
        lambda: Case(samples=2, optimizer=lambda p, lr: torch.optim.AdamW(p, lr, foreach=True)),
        lambda f, b, o: max(_top(f), _top(b)),
    ),
}
every_phase = pytest.mark.parametrize("phase", PHASES)


def _stopped(budget, run, **known):
    """The error with which a limit stops `run`."""
    with pytest.raises(memlab.OutOfMemoryError) as caught, memlab.limit(budget, **known):
        run()
    return caught.value


def _stopped_in(phase, **more):
    """A step stopped in a phase: the case, the error, and the count of the whole step."""
    make, budget = PHASES[phase]
    case = make()
    parts = case.counted()
    error = _stopped(budget(*parts), case.step, **case.known(), **more)
    return case, error, [row for part in parts for row in part]


# -- when --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("told", [True, False], ids=["told", "bare"])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(
    "optimizer", [torch.optim.SGD, lambda p, lr: torch.optim.AdamW(p, lr, foreach=True)], ids=["sgd", "adamw"]
)
def test_at_the_peak_it_passes_and_one_byte_below_it_raises(optimizer, checkpointed, told):
    case = Case(optimizer=optimizer, checkpointed=checkpointed)
    case.step()  # the optimizer's state exists from here on
    parts = case.counted()
    peak = max(map(_top, parts))
    assert peak == resident_bytes(case.model, case.optimizer, [case.x]) + allocator_peak(case.step)
    known = case.known() if told else {}
    with memlab.limit(peak, **known) as trace:
        case.step()
    assert trace.tensor_peak_bytes == peak
    assert _stopped(peak - 1, case.step, **known).trace.tensor_peak_bytes == peak


def test_a_gradient_that_autograd_alone_adds_in_place_counts_once():
    """Under any instrument the sum is new memory for a moment; the limit is that of a program that nobody watches."""
    x, weight = torch.ones(1000, requires_grad=True), torch.ones(1000)

    def run():
        hidden = x.exp()
        ((hidden * weight).sum() + (hidden * weight).sum()).backward()
        x.grad = None

    peak = x.nbytes + weight.nbytes + allocator_peak(run)
    with Count([x, weight]) as count:
        run()
    assert count.peak() >= peak + x.nbytes
    with memlab.limit(peak, batch=[x, weight]) as trace:
        run()
    assert trace.tensor_peak_bytes == peak
    assert _stopped(peak - 1, run, batch=[x, weight]).trace.tensor_peak_bytes == peak


@given(st.data())
@settings(max_examples=50)
def test_it_raises_exactly_where_the_count_goes_over(data):
    case = Case(
        samples=data.draw(st.sampled_from([1, 7, 64])),
        optimizer=data.draw(st.sampled_from([torch.optim.SGD, torch.optim.Adam])),
        inner=data.draw(st.sampled_from([8, 32])),
        checkpointed=data.draw(st.booleans()),
    )
    rows = [row for part in case.counted() for row in part]
    peak = max(nbytes for _, nbytes in rows)
    budget = data.draw(st.integers(1, peak * 5 // 4))
    if budget >= peak:
        with memlab.limit(budget, **case.known()):
            case.step()
        return
    older = resident_bytes(case.model, case.optimizer, [case.x])
    found = _stopped(budget, case.step, **case.known()).trace.tensor_peak
    first = next(row for row in rows if row[1] > budget) if older <= budget else ("", older)
    assert (found.operator.removeprefix("aten::"), found.nbytes) == first


def test_a_model_too_large_by_itself_is_refused_before_anything_runs():
    case, ran = Case(), []
    older = resident_bytes(case.model, case.optimizer, [case.x])
    error = _stopped(older - 1, lambda: ran.append(1), **case.known())
    assert not ran
    assert error.requested == 0
    assert "were in use before anything ran, 1 B too much." in str(error)
    assert "The peak is in the state before the step, where none of them is alive." in str(error)
    with memlab.limit(older, **case.known()):
        ran.append(1)
    assert ran


def test_what_is_recognised_late_counts_from_the_start():
    """A large parameter, met when its module is called, shows that an operator before that was too much already. What
    is met when nothing runs any more shows at the end of the block."""
    model, x = nn.Linear(256, 256), torch.ones(1, 256)

    def run():
        x.exp()
        model(x)

    error = _stopped(257 * 1024 + 1023, run)
    assert error.trace.tensor_peak_bytes == 257 * 1024 + 1024
    assert "exp needed 1.00 KiB in the forward pass, with 257 KiB in use: 1 B too much. This is known only" in str(
        error
    )
    error = _stopped(257 * 1024 - 1, torch.optim.SGD(model.parameters(), lr=0.1).step)
    assert "recognised late: pass model=, optimizer= and batch= to limit()" in str(error)


def test_an_update_whose_state_is_met_too_late_does_not_begin():
    case = Case(samples=2, optimizer=torch.optim.Adam)
    case.step()
    parts = case.counted()
    before = [parameter.clone() for parameter in case.model.parameters()]
    budget = max(map(_top, parts[:2])) - resident_bytes(nn.Module(), case.optimizer, [])
    assert "The update had begun" not in str(_stopped(budget, case.step))
    assert all(torch.equal(a, b) for a, b in zip(case.model.parameters(), before, strict=True))


@pytest.mark.parametrize(
    "budget", ["lots", "", "0.5 parsecs", -1, "-1 MiB", 0.8, float("nan"), None, True, [1], 0, "0 GiB"]
)
def test_a_budget_that_is_none_is_refused(budget):
    with pytest.raises(memlab.MemlabError, match=r"is no number of bytes|leaves room for nothing") as caught:
        memlab.limit(budget)
    assert repr(budget) in str(caught.value)
    assert "'512 MiB'" in str(caught.value)


def test_budgets_are_read_as_everywhere():
    for budget in ("1 KiB", 1024, 1024.0, "0.001 MiB"):
        assert _stopped(budget, lambda: torch.ones(2048, dtype=torch.uint8)).budget in (1024, 1048)


def test_a_model_that_is_none_is_refused():
    with pytest.raises(memlab.MemlabError, match="takes a module as model=, not str"):
        memlab.limit("1 MiB", model="gpt")


# -- what it says ------------------------------------------------------------------------------------------------------

PLACES = {
    "forward": ("tanh", "the forward pass", "blocks.2", r" \(test_limit.py:\d+ in forward\)"),
    "backward": ("mm", "the backward pass", "blocks.2.down", r" \(called from test_limit.py:\d+ in step\)"),
    "recompute": ("tanh", "the recomputation during backward", "blocks.2", r" \(test_limit.py:\d+ in forward\)"),
    "optimizer": ("zeros_like", "the optimizer step", "", r" \(test_limit.py:\d+ in step\)"),
}


@every_phase
def test_it_names_operator_phase_module_and_line(phase):
    _, error, rows = _stopped_in(phase)
    name, nbytes = next(row for row in rows if row[1] > error.budget)
    operator, where, module, line = PLACES[phase]
    assert (error.trace.tensor_peak.phase, error.trace.tensor_peak.module) == (phase, module)
    assert error.trace.tensor_peak.operator == f"aten::{operator}" == f"aten::{name}"
    assert error.trace.tensor_peak_bytes == nbytes
    size = re.escape(memlab.units.format_bytes(error.requested))
    used = re.escape(memlab.units.format_bytes(nbytes - error.requested))
    inside = f", in {module}" if module else ""
    first = str(error).splitlines()[0]
    assert re.search(f": {operator} needed {size} in {where}{inside}{line}, with {used} in use: .* too much.$", first)


def test_it_names_the_line_of_the_forward_pass_on_request():
    _, error, _ = _stopped_in("backward", sources=True)
    assert re.search(r"in blocks.2.down \(test_limit.py:\d+ in forward\), with", str(error))


def test_the_message():
    model, x = nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 256)), torch.ones(64, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    error = _stopped("2.5 MiB", lambda: model(x).sum().backward(), model=model, optimizer=optimizer, batch=x)
    lines = str(error).splitlines()
    assert lines[0].startswith("Out of a memory limit of 2.50 MiB: tanh needed 256 KiB in the forward pass, in 1 (")
    assert lines[0].endswith("), with 2.32 MiB in use: 69.0 KiB too much.")
    assert lines[1:6] == [
        "Largest holders of what was in use:",
        "- 0.weight (parameters): 1.00 MiB",
        "- 2.weight (parameters): 1.00 MiB",
        "- 0 (temporaries): 256 KiB",
        "- batch[0] (batch): 64.0 KiB",
    ]
    assert lines[6] == "- 0.bias (parameters): 4.00 KiB"
    assert lines[7].startswith("How far each technique could lower the peak, at most (a bound:")
    bounds = dict(re.fullmatch(r"- (\S+).*? \(.*?\): (.*)", line).groups() for line in lines[8:12])
    for technique in ("Checkpoint", "MicroBatch,"):  # the first layer's output might be about to be saved as well
        assert bounds[technique].startswith("512 KiB (19 %). Without them the peak would be 2.07 MiB, in the forward")
    assert bounds["OptimizerInBackward"] == (
        "cannot move it. The peak is in the forward pass, where none of them is alive."
    )
    assert lines[12].startswith(
        "Of all techniques only LowPrecision makes parameters, buffers and optimizer state smaller"
    )
    assert lines[13:] == [
        "All of this is about what ran up to here. The rest of the block did not run, and may have needed more."
    ]


def test_checkpointing_is_said_not_to_help_in_the_optimizer():
    _, error, _ = _stopped_in("optimizer")
    assert "- Checkpoint (activations): cannot move it. The peak is in the optimizer step" in str(error)
    assert "The update had begun: some parameters may be changed and others not." in str(error)


def test_gradients_that_may_be_half_added_are_named():
    case = Case()
    case.model(case.x).square().mean().backward()
    older = [parameter.grad for parameter in case.model.parameters()]
    forward, _, _ = case.counted()
    budget = _top(forward) + sum(gradient.nbytes for gradient in older)
    error = _stopped(budget, lambda: case.model(case.x).square().mean().backward(), **case.known())
    assert "Gradients older than this block may have been added to: clear them before the next step." in str(error)
    assert all(p.grad is gradient for p, gradient in zip(case.model.parameters(), older, strict=True))


def test_a_cut_trace_knows_what_autograd_holds():
    """As the whole step shows it, but for what the operator in progress was given and made."""
    model, batch = zoo.GPT(width=32, depth=1, heads=2, context=16, dropout=0.1), zoo.text_batch(4, 16)
    with memlab.limit("1 GiB", model=model, batch=batch) as whole:
        zoo.gpt_loss(model, batch).backward()
    model.zero_grad()
    top, stops = 0, 0
    for point in whole.timeline():
        if point.nbytes > top and point.place.phase == "forward" and point.operator_number % 3 == 1:
            cut = _stopped(top, lambda: zoo.gpt_loss(model, batch), model=model, batch=batch).trace.peak
            saved = {a.storage for a in whole.alive(cut.tick) if a.category == "activations"}
            called = {a.storage for a in cut.allocations if a.category == "activations"}
            assert called <= saved
            assert len(saved - called) <= 2
            stops += 1
        top = max(top, point.nbytes)
    assert stops >= 8


def test_the_error_is_pytorchs_and_ours():
    assert issubclass(memlab.OutOfMemoryError, torch.OutOfMemoryError)
    assert issubclass(memlab.OutOfMemoryError, memlab.MemlabError)
    for kind in (torch.OutOfMemoryError, RuntimeError, memlab.MemlabError):
        with pytest.raises(kind, match=r"^Out of a memory limit of 1\.00 KiB: ones"), memlab.limit("1 KiB"):
            torch.ones(1024)
    _, error, _ = _stopped_in("backward")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.budget, again.requested) == (str(error), error.budget, error.requested)
    assert str(type(error)(str(error))) == str(error)  # how frameworks carry errors between threads
    assert repr(type(error)) == "<class 'memlab.OutOfMemoryError'>"


# -- what it leaves ----------------------------------------------------------------------------------------------------


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("told", [True, False], ids=["told", "bare"])
@every_phase
def test_nothing_is_alive_afterwards_wherever_it_stops(phase, told):
    """Although the loss, the error and its traceback are."""
    make, budget = PHASES[phase]
    case = make()
    parts = case.counted()
    rows = [row for part in parts for row in part]
    levels = [nbytes for index, (_, nbytes) in enumerate(rows) if nbytes > max([n for _, n in rows[:index]], default=0)]
    phases = set()
    for level in [*levels[:: len(levels) // 4 or 1], budget(*parts) + 1]:
        with Count(case.resident()) as count:
            error = _stopped(level - 1, case.step, **(case.known() if told else {}))
        assert error.__traceback__ is not None
        assert count.left() == (0 if case.loss is None else case.loss.nbytes), error.trace.tensor_peak.place
        phases.add(error.trace.tensor_peak.phase)
        case.loss = None
    assert phase in phases


@every_phase
def test_no_instrument_is_left(phase):
    run_backward = torch.autograd._engine_run_backward
    _stopped_in(phase)
    assert torch.autograd._engine_run_backward is run_backward
    assert _get_current_dispatch_mode_stack() == []
    assert not module_hooks._global_forward_hooks
    assert not module_hooks._global_forward_pre_hooks
    assert not optimizer_hooks._global_optimizer_pre_hooks
    assert not optimizer_hooks._global_optimizer_post_hooks


@every_phase
def test_training_goes_on_as_if_the_limit_had_not_been_met(phase):
    """In the optimizer too, as it is stopped while its state is made, before any parameter moves."""
    torch.manual_seed(1)
    case, _, _ = _stopped_in(phase)
    torch.manual_seed(1)
    never = PHASES[phase][0]()
    assert all(parameter.grad is None for parameter in case.model.parameters())
    assert not state_tensors(case.optimizer)
    for _ in range(3):
        case.step()
        never.step()
    assert torch.equal(case.loss, never.loss)
    for a, b in zip(case.model.parameters(), never.model.parameters(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(state_tensors(case.optimizer), state_tensors(never.optimizer), strict=True):
        assert torch.equal(a, b)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.own = x + 1
        ctx.save_for_backward(x * 2)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


@pytest.mark.usefixtures("no_collector")
def test_the_graph_behind_a_variable_is_emptied_and_its_value_stays():
    """Saved tensors of operators, of a function of the user's and its ctx, behind views and in a checkpoint."""
    linear, x, kept = nn.Linear(8, 8), torch.randn(4, 3, 8), []

    def run():
        hidden = Twice.apply(linear(x).tanh().exp())
        hidden = checkpoint(lambda h: linear(h).exp(), hidden.sin().view(12, 8), use_reentrant=False)
        kept.append(linear(hidden.view(4, 3, 8)))
        torch.ones(2**20)

    with Count([*linear.parameters(), x]) as count:
        _stopped("64 KiB", run)
    (out,) = kept
    assert count.left() == out.untyped_storage().nbytes()
    assert torch.equal(out, linear(linear(((linear(x).tanh().exp()) * 2).sin()).exp()))
    for tensor in (out, out.sum()):
        with pytest.raises(memlab.MemlabError, match=r"inside a memlab\.limit block that ran out of memory"):
            tensor.sum().backward()
    assert linear.weight.grad is None
    linear(x).sum().backward()
    assert linear.weight.grad is not None


def test_graphs_and_gradients_from_before_are_left_alone():
    encoder, head, x = nn.Linear(8, 8), nn.Linear(8, 8), torch.ones(4, 8)
    head(x).sum().backward()
    before = head.weight.grad
    features = encoder(x).tanh()
    results = []
    _stopped("64 KiB", lambda: (results.append(head(features).exp()), torch.ones(2**20)), model=head)
    assert head.weight.grad is before
    with pytest.raises(memlab.MemlabError, match="run the forward pass again"):
        results[0].sum().backward()
    features.sum().backward()
    assert encoder.weight.grad is not None


def test_a_cell_of_a_notebook_runs_again(capsys):
    shells = pytest.importorskip("IPython.core.interactiveshell")
    shell = shells.InteractiveShell()
    shell.history_manager.enabled = False
    case = Case()
    forward, _, _ = case.counted()
    count = Count(case.resident())
    shell.user_ns.update(case=case, memlab=memlab, count=count, budget=_top(forward))
    cell = "with memlab.limit(budget, **case.known()):\n    hidden = case.model(case.x)\n    loss = hidden.sum()\n"
    with count:
        result = shell.run_cell(cell + "    loss.backward()")
    assert isinstance(result.error_in_exec, memlab.OutOfMemoryError)
    assert sys.last_traceback is not None
    assert "mm needed 64.0 KiB in the backward pass, in blocks.2.down" in capsys.readouterr().out
    assert count.left() == case.x.nbytes + 4  # hidden and loss, which the cell has named
    shell.run_cell("budget = 2**30")
    shell.run_cell(cell + "    loss.backward()").raise_error()
    assert case.model.blocks[0].up.weight.grad is not None
    shell.run_cell("del hidden, loss")
    sys.last_type = sys.last_value = sys.last_traceback = None


def test_an_error_of_the_users_own_passes_as_it_is():
    model, x, out = nn.Linear(8, 8), torch.ones(4, 8), []

    def run():
        out.append(model(x).exp().sum())
        out[0].backward(retain_graph=True)
        return 1 / 0

    with pytest.raises(ZeroDivisionError) as caught, memlab.limit("1 MiB"):
        run()
    assert [entry.name for entry in caught.traceback][-1] == "run"
    assert not hasattr(caught.value, "__notes__")
    assert model.weight.grad is not None
    out[0].backward()


# -- with others -------------------------------------------------------------------------------------------------------


def test_the_block_may_catch_it_and_go_on():
    model, x = nn.Linear(64, 64), torch.ones(1024, 64)
    sizes = []
    with memlab.limit("200 KiB", model=model) as trace:
        for size in (1024, 512, 256):
            try:
                model(x[:size]).exp().sum().backward()
            except torch.OutOfMemoryError as error:
                sizes.append((size, error.requested))
    assert sizes == [(1024, 2**18), (512, 2**17)]
    assert trace.tensor_peak_bytes > 200 * 1024
    assert model.weight.grad is not None


def test_what_cleans_up_may_run():
    """Above the budget, while the error is under way; below it the limit holds again, and tells of the second time."""
    cleaned = []

    def first():
        try:
            torch.ones(2**15)
        finally:
            cleaned.append(torch.ones(8).exp())

    with memlab.limit("100 KiB"):
        with pytest.raises(torch.OutOfMemoryError, match="ones needed 128 KiB"):
            first()
        with pytest.raises(torch.OutOfMemoryError, match=r"ones needed 64\.0 KiB .*, with 64\.0 KiB in use"):
            torch.add(torch.ones(2**14), torch.ones(2**14))
    assert len(cleaned) == 1


def test_the_tighter_of_two_limits_counts():
    for outer, inner, tighter in (("1 MiB", "64 KiB", 2**16), ("64 KiB", "1 MiB", 2**16)):
        with pytest.raises(memlab.OutOfMemoryError) as caught, memlab.limit(outer), memlab.limit(inner):
            torch.ones(2**15)
        assert caught.value.budget == tighter
        assert _get_current_dispatch_mode_stack() == []
    with memlab.limit("1 MiB"):
        _stopped("64 KiB", lambda: torch.ones(2**15))
        torch.ones(2**15)
        with pytest.raises(memlab.OutOfMemoryError):
            torch.ones(2**19)


@pytest.mark.parametrize("outside", [True, False])
def test_beside_record(outside):
    case = Case()
    blocks = [memlab.record(**case.known()), memlab.limit(_top(case.counted()[0]), **case.known())]
    first, second = blocks if outside else blocks[::-1]
    with pytest.raises(memlab.OutOfMemoryError), first as one, second as other:
        case.step()
    assert (one.peak.phase, other.peak.phase) == (("backward", "backward") if outside else ("backward", "forward"))
    with memlab.record(**case.known()) as trace:
        case.step()
    assert trace.steps == (trace,)


def test_as_a_decorator_it_releases_the_functions_own_variables():
    count = Count()

    @memlab.limit("64 KiB")
    def train():
        kept = torch.ones(2**12)
        return kept, torch.ones(2**15)

    with pytest.raises(memlab.OutOfMemoryError) as caught, count:
        train()
    assert count.left() == 0
    assert re.fullmatch(
        r"The calls that the block had made are released, with their variables: test_limit.py:\d+ in train",
        caught.value.__notes__[0],
    )


def test_around_measure_and_compare():
    """What memlab keeps for itself, and its proof, do not count; the user's state is put back."""
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 8))
    step = memlab.TrainingStep(model, (torch.randn(4, 64), torch.arange(4)), nn.CrossEntropyLoss(), torch.optim.SGD)
    peak = memlab.measure(step).tensor_peak_bytes
    before = copy.deepcopy(model.state_dict())
    known = {"model": model, "batch": step.batch}
    with memlab.limit(peak, **known):
        assert memlab.measure(step).tensor_peak_bytes == peak
    with memlab.limit(peak, **known):
        rows = memlab.compare(step, [memlab.OptimizerInBackward(), memlab.MicroBatch(count=2)], repeats=1).rows
    assert [row.proof for row in rows[:2]] == ["float64", "float64"]
    assert rows[2].error.startswith("Out of a memory limit of ")
    _stopped(peak - 1, lambda: memlab.measure(step), **known)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.cuda
def test_on_a_gpu():
    model, x = Net(width=16, inner=1024).cuda(), torch.randn(512, 16, device="cuda")
    with memlab.limit("1 GiB", model=model, batch=x) as trace:
        model(x).square().mean().backward()
    for parameter in model.parameters():
        parameter.grad = None
    error = _stopped(trace.by_phase()["forward"], lambda: model(x).square().mean().backward(), model=model, batch=x)
    assert "in the backward pass" in str(error)
    assert all(parameter.grad is None for parameter in model.parameters())
