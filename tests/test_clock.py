"""Phases, micro-batches, modules and source lines of bare code: against what the code below says that it does."""

import itertools
import threading

import pytest
import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks
from torch.utils.checkpoint import checkpoint

import memlab


class Net(nn.Module):
    def __init__(self, recompute=False):
        super().__init__()
        self.stem = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(8, 1)
        self.recompute = recompute

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x.sin())  # sin is the network's own


def _places(trace):
    """(phase, module, micro-batch, operator) of each operator, the operator by its last name."""
    return [(o.place.phase, o.place.module, o.place.micro_batch, o.place.operator[6:]) for o in trace.operators]


def _in_order(values):
    return [value for value, _ in itertools.groupby(values)]


def _recorded(run, **options):
    with memlab.record(**options) as trace:
        run()
    return trace


def test_a_plain_loop():
    model, x = Net(), torch.ones(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def run():
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    trace = _recorded(run)
    places = _places(trace)
    assert _in_order(place[0] for place in places) == ["forward", "backward", "optimizer"]
    assert list(trace.by_phase()) == ["forward", "backward", "optimizer"]
    forward = _in_order(module for phase, module, *_ in places if phase == "forward")
    assert forward == ["stem", "blocks.0.0", "blocks.0.1", "blocks.1.0", "blocks.1.1", "Net", "head", ""]
    backward = _in_order(module for phase, module, *_ in places if phase == "backward")
    assert backward == ["", "head", "Net", "blocks.1.1", "blocks.1.0", "blocks.0.1", "blocks.0.0", "stem"]


def test_the_module_of_a_backward_operator_is_that_of_its_forward():
    """Each layer has a size of its own, by which its gradients are known."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(a, a + 1), nn.ReLU()) for a in range(3, 8)])
    trace = _recorded(lambda: model(torch.ones(2, 3)).sum().backward())
    made = {a.shape: a.place.module for a in trace.allocations if a.place.phase == "backward" and len(a.shape) == 2}
    for number, width in enumerate(range(3, 8)):
        assert made[(width + 1, width)] == f"{number}.0"


def test_recomputation_by_torchs_own_checkpoint():
    model, x = Net(recompute=True), torch.ones(3, 4)
    trace = _recorded(lambda: model(x).mean().backward())
    places = _places(trace)
    phases = _in_order((phase, module.partition(".")[0]) for phase, module, *_ in places)
    assert phases == [
        ("forward", "stem"), ("forward", "blocks"), ("forward", "Net"), ("forward", "head"), ("forward", ""),
        ("backward", ""), ("backward", "head"), ("backward", "Net"), ("recompute", "blocks"), ("backward", "blocks"),
        ("recompute", "blocks"), ("backward", "blocks"), ("backward", "stem"),
    ]  # fmt: skip
    recomputed = [(module, operator) for phase, module, _, operator in places if phase == "recompute"]
    assert [module for module, operator in recomputed if operator == "addmm"] == ["blocks.1.0", "blocks.0.0"]
    assert list(trace.by_phase()) == ["forward", "backward", "recompute"]


def test_recomputation_of_a_function_that_is_no_module():
    x = torch.ones(3, 4, requires_grad=True)
    trace = _recorded(lambda: checkpoint(lambda x: x.exp().sin(), x, use_reentrant=False).sum().backward())
    assert [(phase, operator) for phase, _, _, operator in _places(trace)] == [
        ("forward", "exp"), ("forward", "sin"), ("forward", "sum"), ("forward", "ones_like"),
        ("recompute", "exp"), ("backward", "cos"), ("backward", "mul"), ("backward", "mul"),
    ]  # fmt: skip


def test_gradient_accumulation_by_hand():
    model, batches = Net(), [torch.ones(2, 4)] * 3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run():
        for _ in range(2):
            for batch in batches:
                (model(batch).mean() / 3).backward()
            optimizer.step()
            optimizer.zero_grad()

    trace = _recorded(run)
    of_one_step = [(phase, micro) for micro in range(3) for phase in ("forward", "backward")] + [("optimizer", 0)]
    assert _in_order((phase, micro) for phase, _, micro, _ in _places(trace)) == of_one_step * 2
    assert [o.place.step for o in trace.operators] == sorted(o.place.step for o in trace.operators)
    assert {o.place.step for o in trace.operators} == {0, 1}
    assert {(tensor.step, tensor.micro_batch) for tensor in trace.saved} == set(itertools.product(range(2), range(3)))


def test_the_optimizer_in_backward():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)

        def hook(parameter, optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(hook)

    def run():
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()

    trace = _recorded(run)
    of_one_step = ["forward", "backward", "optimizer", "backward", "optimizer"]  # a layer's gradients come together
    assert _in_order(phase for phase, *_ in _places(trace)) == of_one_step * 2
    assert len(trace.steps) == 2


@pytest.mark.parametrize(
    "prepare",
    [
        lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda model: [parameter.grad.mul_(0.5) for parameter in model.parameters()],
    ],
    ids=["clipping", "scaling"],
)
def test_what_prepares_the_update_is_the_optimizers(prepare):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run():
        for _ in range(2):
            model(torch.ones(2, 4)).mean().backward()
            model(torch.ones(2, 4)).mean().backward()
            prepare(model)
            optimizer.step()
            optimizer.zero_grad()

    phases = _in_order((phase, micro) for phase, _, micro, _ in _places(_recorded(run)))
    assert phases == [("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1), ("optimizer", 0)] * 2


def test_loss_scaling():
    model = Net()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0)

    def run():
        scaler.scale(model(torch.ones(2, 4)).mean()).backward()
        scaler.step(optimizer)

    assert _in_order(phase for phase, *_ in _places(_recorded(run))) == ["forward", "backward", "optimizer"]


def test_an_optimizer_that_runs_a_closure():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        return loss

    places = _places(_recorded(lambda: optimizer.step(closure)))
    assert {phase for phase, _, _, operator in places if operator == "addmm"} == {"forward"}
    assert {phase for phase, module, _, operator in places if operator == "mm"} == {"backward"}
    assert "optimizer" in {phase for phase, *_ in places}


def test_gradients_of_gradients_are_no_recomputation():
    x, model = torch.ones(2, 4, requires_grad=True), Net()

    def run():
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        gradient.square().sum().backward()

    assert _in_order(phase for phase, *_ in _places(_recorded(run))) == ["forward", "backward"] * 2


def test_several_roots_shared_modules_and_modules_made_on_the_way():
    class Inner(nn.Module):
        def forward(self, x):
            return nn.Softplus()(x)

    shared = nn.Linear(4, 4)
    one, two = nn.Sequential(shared, nn.Tanh(), shared), nn.Sequential(Inner())
    trace = _recorded(lambda: two(one(torch.ones(2, 4))))
    assert [place[1] for place in _places(trace)] == ["", "0", "1", "0", "Sequential.0.Softplus"]


def test_modules_that_run_in_another_thread_are_not_ours():
    begun, over = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self, x):
            begun.set()
            over.wait(10)
            return x

    def run():
        thread = threading.Thread(target=nn.Sequential(Waits(), nn.Linear(4, 4)), args=(torch.ones(2, 4),))
        thread.start()
        begun.wait(10)
        nn.Sequential(nn.Linear(4, 4), nn.Tanh())(torch.ones(2, 4)).sum()
        over.set()
        thread.join()

    places = _places(_recorded(run))
    assert [(module, operator) for _, module, _, operator in places if module] == [("0", "addmm"), ("1", "tanh")]
    assert "sum" in {operator for _, module, _, operator in places if not module}


def test_names_die_with_their_modules():
    def run():
        for kind in (nn.Tanh, nn.Sigmoid, nn.ReLU) * 4:
            nn.Sequential(nn.Linear(4, 4), kind(), nn.Linear(4, 1))(torch.ones(2, 4)).sum().backward()

    trace = _recorded(run)
    linear = {o.place.module.rpartition(".")[2] for o in trace.operators if o.place.operator == "aten::addmm"}
    assert linear == {"0", "2"}
    assert {a.category for a in trace.allocations if a.shape == (4, 4)} == {"parameters", "gradients"}


def test_source_lines():
    model = Net()

    def run():
        loss = model(torch.ones(2, 4)).exp().sum()
        loss.backward()

    trace = _recorded(run, sources=True)
    first = run.__code__.co_firstlineno
    sources = {o.place.operator: o.place.source for o in trace.operators if o.place.phase == "forward"}
    assert sources["aten::exp"] == f"test_clock.py:{first + 1} in run"
    assert sources["aten::sin"].endswith("in forward")
    saved = {tensor.operator: tensor.source for tensor in trace.saved}
    assert saved["ExpBackward0"] == f"test_clock.py:{first + 1} in run"
    assert _recorded(run).peak.source is None


def test_an_exception_in_a_module_leaves_its_name_behind():
    class Fails(nn.Module):
        def forward(self, x):
            raise ValueError("no")

    def run():
        with pytest.raises(ValueError, match="no"):
            nn.Sequential(nn.Linear(4, 4), nn.Sequential(Fails()))(torch.ones(2, 4))
        torch.ones(3).exp()

    assert _places(_recorded(run))[-1] == ("forward", "", 0, "exp")


def test_an_exception_in_a_recomputation_leaves_its_name_behind():
    model, calls = Net(recompute=True), []

    def fail_later(module, inputs):
        calls.append(1)
        if len(calls) > 1:
            raise ValueError("no")

    model.blocks[1][1].register_forward_pre_hook(fail_later)

    def run():
        with pytest.raises(ValueError, match="no"):
            model(torch.ones(2, 4)).sum().backward()
        torch.ones(3).exp()

    assert _places(_recorded(run))[-1][:2] == ("forward", "")


def test_no_hook_stays():
    def hooks():
        registries = (
            module_hooks._global_forward_pre_hooks,
            module_hooks._global_forward_hooks,
            module_hooks._global_forward_hooks_always_called,
            optimizer_hooks._global_optimizer_pre_hooks,
            optimizer_hooks._global_optimizer_post_hooks,
        )
        return [list(registry) for registry in registries]

    before = hooks()
    _recorded(lambda: Net()(torch.ones(2, 4)))
    assert hooks() == before
