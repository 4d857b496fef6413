"""What grows from step to step is found: to the byte that the allocator counts, with its place and its holder."""

import gc
import inspect
import weakref
from collections import deque

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import memlab


@pytest.fixture(autouse=True, scope="module")
def everything_is_seen():
    """`gc.freeze`, by which the tests begin, hides what is there from the search for holders."""
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(16, 64), nn.Linear(64, 8)
        self.history = []

    def forward(self, x):
        return self.decoder(torch.tanh(self.encoder(x)))


X, Y = torch.ones(32, 16), torch.zeros(32, 8)
OUTPUT, HIDDEN = 32 * 8 * 4, 32 * 64 * 4  # bytes: of the output and of the difference to the target, of tanh's output


def loss_of(model):
    output = model(X)
    return output, (output - Y).square().mean()


def train(keep, steps=5, retain_graph=False, model=None):
    """A usual loop; `keep(model, output, loss)` is the line in it that a user should not have written."""
    model = model or Net()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        output, loss = loss_of(model)
        loss.backward(retain_graph=retain_graph)
        optimizer.step()
        optimizer.zero_grad()
        keep(model, output, loss)


def recorded(run, *args, **options):
    with memlab.record(sources=True) as trace:
        run(*args, **options)
    return trace


def left_by_a_step(run):
    """The allocator's own count: what the sixth step of `run(steps)` leaves with its result, above what five leave."""

    def left(steps):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            held = run(steps)  # alive until the profiler has stopped
        del held
        return sum(e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]")

    run(1)
    return left(6) - left(5)


def per_step(trace):
    return sum(growth.bytes_per_step for growth in trace.growth)


def holders(trace):
    return {growth.holder for growth in trace.growth}


# -- leaks -------------------------------------------------------------------------------------------------------------


def test_a_list_of_losses_with_their_graphs_retained():
    def run(steps=5):
        losses = []
        train(lambda model, output, loss: losses.append(loss), steps, retain_graph=True)
        return losses

    with memlab.record(sources=True) as trace:
        losses = run()
    assert per_step(trace) == left_by_a_step(run) == HIDDEN + OUTPUT + 4
    assert holders(trace) == {f"the local list `losses` of {test_a_list_of_losses_with_their_graphs_retained.__name__}"}
    del losses
    assert all(growth.through_graph for growth in trace.growth)
    largest, difference, loss = trace.growth
    assert (largest.bytes_per_step, largest.module, largest.operator) == (HIDDEN, "Net", "aten::tanh")
    assert (difference.bytes_per_step, difference.operator) == (OUTPUT, "aten::sub")
    assert (loss.bytes_per_step, loss.operator) == (4, "aten::mean")
    line = inspect.getsourcelines(Net.forward)[1] + 1
    assert largest.source == f"test_leaks.py:{line} in forward"


PASTED = """
import memlab
with memlab.record(sources=True) as trace:
    losses = []
    for _ in range(5):
        _, loss = loss_of(model)
        loss.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
"""


def test_bare_code_and_its_sentence():
    model = Net()
    space = {"loss_of": loss_of, "model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    exec(PASTED, space)
    trace = space["trace"]
    assert holders(trace) == {"the global list `losses`"}
    for text in (trace.explain(), str(trace), trace._repr_html_()):
        told = " ".join(text.split())
        assert "Memory grows by 9.00 KiB a step: tensors of past steps are kept with their graphs by the global" in told
        assert "the largest made by tanh in Net (test_leaks.py:" in told
        assert "Keep loss.item() or loss.detach() instead." in told


def test_losses_whose_graphs_are_gone_are_still_told_as_they_carry_nodes():
    losses = []
    trace = recorded(train, lambda model, output, loss: losses.append(loss))
    (growth,) = trace.growth
    assert (growth.bytes_per_step, growth.through_graph) == (4, True)


def test_a_running_total():
    def run(steps=5):
        model, total = Net(), 0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            loss_of(model)[1].backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss_of(model)[1]  # a validation loss, without `no_grad`
        return total

    assert recorded(run).growth == ()  # nothing holds the total when `run` has ended
    with memlab.record() as trace:
        total = run()
    assert per_step(trace) == left_by_a_step(run) == HIDDEN + OUTPUT
    assert holders(trace) == {f"the local tensor `total` of {test_a_running_total.__name__}"}
    assert all(growth.through_graph for growth in trace.growth)
    del total


def test_a_list_in_a_module():
    model = Net()
    trace = recorded(train, lambda net, output, loss: net.decoder.__dict__.setdefault("seen", []).append(output.data),
                     model=model)  # fmt: skip
    (growth,) = trace.growth
    assert growth.holder == "the list `seen` of the module `decoder`"
    assert (growth.bytes_per_step, growth.module, growth.operator) == (OUTPUT, "decoder", "aten::addmm")
    assert not growth.through_graph
    assert "Keep numbers (.item()), or only what is still needed instead." in " ".join(trace.explain().split())


class Logger:
    shared = {}  # noqa: RUF012 - the mistake

    def __init__(self):
        self.kept = []


def with_default(output, seen=[]):  # noqa: B006 - the mistake
    seen.append(output)


def a_closure():
    inner = []
    return lambda model, output, loss: inner.append(output)


def test_the_name_of_the_holder():
    logits, logger, nested, hooked = {}, Logger(), {"train": {"all": [()]}}, []
    logger_in_list = [logger]
    del logger

    def nest(model, output, loss):
        nested["train"]["all"].append((len(nested), output))

    def hook(module, inputs, output):
        hooked.append(output)

    with_hook = Net()
    with_hook.decoder.register_forward_hook(hook)
    here = test_the_name_of_the_holder.__name__
    for keep, model, holder in (
        (lambda model, output, loss: logits.update({len(logits): output}), None, f"the local dict `logits` of {here}"),
        (nest, None, f"the local dict `nested` of {here}"),
        (lambda model, output, loss: logger_in_list[0].kept.append(output), None, "the list `kept` of a Logger"),
        (lambda model, output, loss: Logger.shared.update({len(Logger.shared): output}), None,
         "the dict `shared` of the class Logger"),
        (lambda model, output, loss: with_default(output), None,
         "the list that is the default of `seen` of with_default"),
        (a_closure(), None, "the closure list `inner` of <lambda>"),
        (lambda model, output, loss: None, with_hook, f"the local list `hooked` of {here}"),
        (lambda model, output, loss: model.history.append(output), Net(), "the list `history` of the module `Net`"),
    ):  # fmt: skip
        trace = recorded(train, keep, model=model)
        assert holders(trace) == {holder}
        assert per_step(trace) == OUTPUT
    Logger.shared.clear()
    with_default.__defaults__[0].clear()


def test_a_state_that_is_carried_over_with_its_graph():
    def run(steps=5):
        state = torch.ones(32, 8)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            output, loss = loss_of(model)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            state = state * output.sigmoid()
        return state

    with memlab.record() as trace:
        state = run()
    assert holders(trace) == {
        f"the local tensor `state` of {test_a_state_that_is_carried_over_with_its_graph.__name__}"
    }
    assert per_step(trace) == left_by_a_step(run)
    del state


# -- what is no leak ---------------------------------------------------------------------------------------------------


def test_a_loop_that_keeps_what_it_may():
    model = Net()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    losses, values, last, cache, best = [], [], deque(maxlen=3), {}, []

    def keep(model, output, loss):
        losses.append(loss.detach())
        values.append(loss.item())
        last.append(output)
        average.update_parameters(model)
        if not cache:
            cache["mask"] = torch.ones(1000)
        best[:] = [output.detach().clone()]

    for steps in (3, 8):
        assert recorded(train, keep, steps=steps, model=model).growth == ()


def test_a_cache_that_the_first_steps_fill_and_a_list_that_is_cut():
    cache, cut = {}, []

    def keep(model, output, loss):
        cache.setdefault(len(cache) if len(cache) < 2 else 0, output.detach() * 2)
        cut.append(output.detach() + 1)
        del cut[:-2]

    assert recorded(train, keep, steps=6).growth == ()


def test_what_only_waits_for_the_collector():
    class Cycle:
        def __init__(self, output):
            self.itself, self.output = self, output.detach() * 2

    gc.disable()
    try:
        trace = recorded(train, lambda model, output, loss: Cycle(output))
    finally:
        gc.enable()
    assert trace.growth == ()


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_fewer_than_three_steps_show_no_growth(steps):
    kept = []
    assert recorded(train, lambda model, output, loss: kept.append(output), steps=steps).growth == ()


# -- the result --------------------------------------------------------------------------------------------------------


def test_nothing_is_kept_alive_by_looking():
    def inside():
        kept = []
        with memlab.record() as trace:
            train(lambda model, output, loss: kept.append(output))
        assert holders(trace) == {"the local list `kept` of inside"}
        gone = weakref.ref(kept[2].untyped_storage())
        kept = None
        return gone, trace

    gc.disable()
    try:
        gone, trace = inside()
        assert gone() is None
    finally:
        gc.enable()
    assert trace.growth


def test_a_trace_that_nobody_has_read_holds_nothing_either():
    model, batch = Net(), torch.ones(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memlab.record(model, optimizer, batch) as trace:
        train(lambda model, output, loss: None, model=model)
    gone = [weakref.ref(held) for held in (model, optimizer, batch)]
    del model, optimizer, batch
    gc.collect()
    assert [reference() for reference in gone] == [None] * 3
    assert len(trace.steps) == 5


def test_variables_that_a_user_looks_at_stay():
    def inside():
        kept = []
        seen = locals()
        with memlab.record() as trace:
            train(lambda model, output, loss: kept.append(output))
        return seen, trace

    seen, trace = inside()
    assert trace.growth
    assert "kept" in seen


def test_it_ends_early_and_is_saved_and_a_step_alone_does_not_grow(tmp_path):
    kept = []

    def keep(model, output, loss):
        kept.append(output)
        if len(kept) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), memlab.record() as trace:
        train(keep)
    assert per_step(trace) == OUTPUT
    assert memlab.load(trace.save(tmp_path / "trace")) == trace
    assert all(step.growth == () for step in trace.steps)
