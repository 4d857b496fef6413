"""`record` around bare code: against formulas, the allocator, and each step recorded alone."""

import copy

import pytest
import torch
from torch import nn

import memlab
from memlab import zoo
from tests.truth import allocator_peak, distinct_bytes, resident_bytes, state_tensors


def _gpt():
    """A model, its batch, its optimizer and its step, as a user writes them."""
    model, batch = zoo.GPT(width=32, depth=2, heads=2, context=16), zoo.text_batch(4, 16)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step():
        loss = zoo.gpt_loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return model, batch, optimizer, step


def _at_the_end(trace, category):
    return sum(a.nbytes for a in trace.allocations if a.category == category and a.freed is None)


# -- bare code ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("told", [False, True], ids=["bare", "told"])
@pytest.mark.parametrize("steps_before", [0, 1], ids=["first step", "steady"])
def test_the_peak_is_the_allocators_and_every_byte_has_its_name(steps_before, told):
    model, batch, optimizer, step = _gpt()
    for _ in range(steps_before):
        step()
    older = resident_bytes(model, optimizer, batch)
    arguments = (model, optimizer, batch) if told else ()
    with memlab.record(*arguments, allocator=True) as trace:
        step()
    with memlab.record(*arguments) as tensors:
        step()
    assert trace.tensor_peak_bytes <= tensors.peak_bytes  # where that is the second step, it has state from the start
    if steps_before:
        assert tensors.peak_bytes == trace.tensor_peak_bytes
        assert trace.peak_bytes == older + allocator_peak(step)
    assert "other" not in trace.by_category()
    for phase in ("forward", "backward", "optimizer"):
        top = trace.by_category(phase)
        assert top["parameters"] == distinct_bytes(model.parameters())
        assert top["batch"] == distinct_bytes(batch)
        if steps_before or phase == "optimizer":
            assert top["optimizer state"] == distinct_bytes(state_tensors(optimizer))
    assert trace.by_category("optimizer")["gradients"] == distinct_bytes(model.parameters())
    named = {a.name: a.nbytes for a in trace.allocations if a.category == "parameters"}
    assert named == {name: p.untyped_storage().nbytes() for name, p in model.named_parameters()}


def test_the_same_as_measured():
    model, batch, optimizer, step = _gpt()
    step()
    with memlab.record(model, optimizer, batch, allocator=True) as recorded:
        step()
    measured = memlab.measure(memlab.TrainingStep(model, batch, zoo.gpt_loss, optimizer))
    assert recorded.by_category() == measured.by_category()
    assert recorded.by_phase() == measured.by_phase()
    assert recorded.by_module() == measured.by_module()
    assert recorded.saved_bytes == measured.saved_bytes
    assert [t.slot for t in recorded.saved] == [t.slot for t in measured.saved]


def test_what_is_written_into_and_older_is_there_from_the_start():
    average, scale = torch.zeros(1000), torch.ones(1000)
    for allocator in (False, True):
        with memlab.record(allocator=allocator) as trace:
            average.mul_(scale)
        assert [(a.nbytes, a.born) for a in trace.allocations if a.category != "workspace"] == [(4000, 0)]


def test_older_gradients_are_gradients_from_the_start():
    model = nn.Linear(64, 64)
    model(torch.ones(2, 64)).sum().backward()
    with memlab.record(model) as trace:
        model(torch.ones(2, 64)).sum().backward()
    assert trace.by_category("forward")["gradients"] == (64 * 64 + 64) * 4


def test_views_and_ties_count_once():
    model = zoo.GPT(width=32, depth=1, heads=2, context=16, tied=True)
    with memlab.record(model) as trace:
        zoo.gpt_loss(model, zoo.text_batch(2, 16)).backward()
    assert _at_the_end(trace, "parameters") == distinct_bytes(model.parameters())
    assert _at_the_end(trace, "gradients") == distinct_bytes(model.parameters())


def test_frozen_parameters_and_parameters_outside_modules():
    frozen, free = nn.Linear(8, 8).requires_grad_(False), nn.Parameter(torch.ones(8, 8))
    with memlab.record() as trace:
        (frozen(torch.ones(2, 8)) @ free).sum().backward()
    assert trace.by_category("forward")["parameters"] == (64 + 8 + 64) * 4
    assert _at_the_end(trace, "gradients") == 256


@pytest.mark.parametrize("told", [False, True])
def test_modules_that_take_their_shape_at_their_first_call(told):
    model = nn.Sequential(nn.LazyLinear(16), nn.LazyBatchNorm1d())
    with memlab.record(*[model][:told]) as trace:
        model(torch.ones(8, 4)).sum().backward()
    assert _at_the_end(trace, "parameters") == _at_the_end(trace, "gradients") == distinct_bytes(model.parameters())


def test_a_forward_pass_without_gradients_saves_nothing_and_says_what_it_cannot_see():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    with memlab.record(model, batch=torch.ones(4, 8)) as trace, torch.no_grad():
        model(torch.ones(4, 8))
    assert trace.saved == ()
    assert trace.saved_bytes == 0
    assert list(trace.by_phase()) == ["forward"]
    for missing in ("workspace", "optimizer state", "saved for backward"):
        assert any(missing in sentence for sentence in trace.absent)


def test_nothing_at_all():
    with memlab.record() as trace:
        pass
    assert (trace.peak_bytes, trace.by_category(), trace.by_phase(), trace.timeline()) == (0, {}, {}, [])
    assert trace.steps == (trace,)


def test_a_backward_of_what_ran_before():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    loss = model(torch.ones(2, 8)).sum()
    with memlab.record(model) as trace:
        loss.backward()
        model(torch.ones(2, 8)).sum().backward()
    assert [tensor.micro_batch for tensor in trace.saved] == [0, 0, 1, 1]


# -- several steps -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("allocator", [False, True])
def test_each_of_several_steps_is_that_step_recorded_alone(allocator):
    models = [nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, 1)) for width in (8, 64, 32)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]

    def step(model, optimizer, x):
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    x = torch.ones(16, 16)
    for model, optimizer in zip(models, optimizers, strict=True):
        step(model, optimizer, x)
    alone = []
    for model, optimizer in zip(models, optimizers, strict=True):
        with memlab.record(nn.ModuleList(models), allocator=allocator) as trace:
            step(model, optimizer, x)
        alone.append(trace)
    with memlab.record(nn.ModuleList(models), allocator=allocator) as trace:
        for model, optimizer in zip(models, optimizers, strict=True):
            step(model, optimizer, x)
    assert len(trace.steps) == 3
    resident = {a.name: a.nbytes for a in trace.allocations if a.category == "optimizer state" and a.born == 0}
    assert resident  # all of it is older, and each recording alone knows its own only
    everything = sum(distinct_bytes(state_tensors(optimizer)) for optimizer in optimizers)
    for part, whole, optimizer in zip(trace.steps, alone, optimizers, strict=True):
        unknown = everything - distinct_bytes(state_tensors(optimizer))
        assert part.peak_bytes == whole.peak_bytes + unknown
        assert part.by_phase() == {phase: top + unknown for phase, top in whole.by_phase().items()}
        assert part.saved_bytes == whole.saved_bytes
        assert part.peak.place.operator == whole.peak.place.operator
    assert max(part.peak_bytes for part in trace.steps) == trace.peak_bytes


def test_optimizers_that_step_together_make_one_step_and_in_turn_make_two():
    one, two = nn.Linear(8, 8), nn.Linear(8, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, two)]

    def together():
        two(one(torch.ones(2, 8))).sum().backward()
        for optimizer in optimizers:
            optimizer.step()

    def in_turn():  # as adversarial networks are trained
        two(one(torch.ones(2, 8)).detach()).sum().backward()
        optimizers[1].step()
        two(one(torch.ones(2, 8))).sum().backward()
        optimizers[0].step()

    for run, steps in ((together, 1), (in_turn, 2)):
        with memlab.record() as trace:
            for _ in range(2):
                run()
        assert len(trace.steps) == 2 * steps


# -- use and misuse ----------------------------------------------------------------------------------------------------


def test_a_decorator_puts_the_trace_on_the_function():
    @memlab.record()
    def train(width, *, depth=1):
        """Its words."""
        return sum(nn.Linear(width, width)(torch.ones(1, width)).sum() for _ in range(depth))

    assert (train.__name__, train.__doc__) == ("train", "Its words.")
    for width in (4, 8):
        assert train(width, depth=2).requires_grad
        assert train.trace.by_category()["parameters"] == 2 * (width * width + width) * 4


def test_a_decorator_without_brackets_asks_for_them():
    with pytest.raises(memlab.MemlabError, match=r"takes a module, not function.*needs its brackets: `@memlab.record"):

        @memlab.record
        def train():
            pass


def test_the_trace_cannot_be_read_before_the_end():
    with memlab.record() as trace:
        torch.ones(3)
        for read in (lambda: trace.peak_bytes, lambda: trace.saved, lambda: trace.explain()):
            with pytest.raises(memlab.MemlabError, match="not complete: it can be read after the `with"):
                read()
        assert isinstance(trace, memlab.Trace)
        assert repr(trace) == str(trace) == "<Trace: recording>"
    assert trace.peak_bytes == 12
    assert type(trace) is memlab.Trace


def test_a_recorder_can_be_used_again_but_not_within_itself():
    recorder = memlab.record()
    for size in (1, 2):
        with recorder as trace:
            torch.ones(size)
            with pytest.raises(memlab.MemlabError, match="already recording: make a new one"), recorder:
                pass
        assert trace.peak_bytes == 4 * size


def test_recordings_nest():
    with memlab.record() as outer:
        a = torch.ones(10)
        with memlab.record() as inner:
            b = a * a
        c = b * b
    assert (outer.peak_bytes, inner.peak_bytes) == (120, 40)
    assert [o.place.operator for o in outer.operators] == ["aten::ones", "aten::mul", "aten::mul"]
    assert [o.place.operator for o in inner.operators] == ["aten::mul"]
    del c


def test_an_early_end_is_told():
    with pytest.raises(TypeError), memlab.record() as trace:
        torch.ones(10).exp("no such argument")
    assert trace.peak_bytes == 40
    assert any("ended early, by TypeError" in note for note in trace.notes)


def test_what_it_cannot_record_is_refused_and_can_be_tried_again():
    recorder = memlab.record(allocator=True)
    with torch.inference_mode(), pytest.raises(memlab.MemlabError, match=r"inference_mode is on.*torch\.no_grad"):
        recorder.__enter__()
    with torch.profiler.profile(), pytest.raises(memlab.MemlabError, match="profiler is already running"):
        recorder.__enter__()
    with (
        pytest.raises(memlab.MemlabError, match="a profiler is already running"),
        recorder,
        memlab.record(allocator=True),
    ):
        pass
    with torch.profiler.profile(), memlab.record() as trace:
        torch.ones(10)
    assert trace.peak_bytes == 40


def test_a_profiler_started_within_is_told_and_all_is_undone():
    before = torch.autograd._engine_run_backward
    message = r"a profiler was started.*pass allocator=False"
    with pytest.raises(memlab.MemlabError, match=message), memlab.record(allocator=True), torch.profiler.profile():
        torch.ones(10)
    assert torch.autograd._engine_run_backward is before
    with memlab.record(allocator=True) as trace:
        torch.ones(10)
    assert trace.peak_bytes == 40


def _loaded(tensor, file):
    torch.save(tensor, file)
    return torch.load(file)


@pytest.mark.parametrize("again", [lambda tensor, file: copy.deepcopy(tensor), _loaded], ids=["deepcopy", "load"])
def test_what_is_copied_or_loaded_is_made_when_it_is(again, tmp_path):
    def run():
        tensor = torch.ones(1000)
        for number in range(3):
            tensor = again(tensor, tmp_path / f"{number}.pt") * 2

    for allocator in (False, True):
        with memlab.record(allocator=allocator) as trace:
            run()
        assert trace.tensor_peak_bytes == 3 * 4000  # the tensor, what was made of it, and the product
        assert "other" not in trace.by_category("tensor_peak")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_unusual_tensors_are_trained_on_as_without_it():
    rows, layer = nn.Embedding(100, 16, sparse=True), nn.Linear(16, 4)
    ragged = torch.nested.nested_tensor([torch.ones(2, 16), torch.ones(3, 16)])
    model = nn.ModuleList([rows, layer])

    def gradients():
        model.zero_grad()
        loss = layer(rows(torch.arange(8))).sum() + torch.nested.to_padded_tensor(layer(ragged), 0.0).sum()
        loss = loss + torch.func.vmap(layer)(torch.ones(3, 16)).sum()
        loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    without = gradients()
    with memlab.record() as trace:
        within = gradients()
    assert all(torch.equal(a.to_dense(), b.to_dense()) for a, b in zip(within, without, strict=True))
    assert _at_the_end(trace, "gradients") == 8 * (16 * 4 + 8) + (16 * 4 + 4) * 4
