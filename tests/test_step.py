"""A TrainingStep reads its arguments, cuts its batch, weighs the pieces and copies itself; mistakes are explained."""

import collections
import dataclasses
import functools
import typing

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memlab.copies import Recast
from memlab.errors import MemlabError
from memlab.step import TrainingStep


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


PAIR = (torch.randn(10, 5, generator=torch.Generator().manual_seed(1)), torch.arange(10) % 3)


def gradients(model):
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


# ----------------------------------------------------------------------------------------------- what loss_fn may be


def my_cross_entropy(logits, labels):
    return F.cross_entropy(logits, labels)


class Focal(nn.Module):
    def forward(self, anything, other):
        return F.cross_entropy(anything, other).pow(2)


CRITERIA = [
    nn.CrossEntropyLoss(),
    F.cross_entropy,
    functools.partial(F.cross_entropy, label_smoothing=0.1),
    my_cross_entropy,
    lambda x, y: F.cross_entropy(x, y),
    lambda out, t: F.cross_entropy(out, t),
    Focal(),
]


@pytest.mark.parametrize("criterion", CRITERIA)
def test_a_criterion_goes_with_a_pair(criterion):
    model = network()
    loss = TrainingStep(model, PAIR, criterion).loss()
    assert torch.equal(loss, criterion(model(PAIR[0]), PAIR[1]))


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        lambda m, y: F.cross_entropy(m(y[0]), y[1]),
        lambda a, b: F.cross_entropy(a(b[0]), b[1]),
        lambda net, *rest: F.cross_entropy(net(rest[0][0]), rest[0][1]),
        functools.partial(lambda weight, model, batch: weight * F.cross_entropy(model(batch[0]), batch[1]), 1.0),
    ],
)
def test_a_function_of_model_and_batch(loss_fn):
    model = network()
    assert torch.equal(TrainingStep(model, PAIR, loss_fn).loss(), F.cross_entropy(model(PAIR[0]), PAIR[1]))


def test_inputs_of_a_criterion_may_be_several():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network()

        def forward(self, x, scale):
            return self.inner(x) * scale

    model = Two()
    expected = F.cross_entropy(model(PAIR[0], 2.0), PAIR[1])
    assert torch.equal(TrainingStep(model, ((PAIR[0], 2.0), PAIR[1]), F.cross_entropy).loss(), expected)
    assert torch.equal(TrainingStep(model, [{"x": PAIR[0], "scale": 2.0}, PAIR[1]], F.cross_entropy).loss(), expected)


def test_a_model_that_computes_its_own_loss():
    @dataclasses.dataclass
    class Output:
        loss: typing.Any = None

    class Model(nn.Module):
        def __init__(self, wrap):
            super().__init__()
            self.inner, self.wrap = network(), wrap

        def forward(self, x, labels=None):
            return self.wrap(None if labels is None else F.cross_entropy(self.inner(x), labels))

    for wrap in (Output, lambda loss: {"loss": loss}):
        model = Model(wrap)
        expected = F.cross_entropy(model.inner(PAIR[0]), PAIR[1])
        for batch in (PAIR, {"x": PAIR[0], "labels": PAIR[1]}, collections.UserDict(x=PAIR[0], labels=PAIR[1])):
            assert torch.equal(TrainingStep(model, batch).loss(), expected)
        with pytest.raises(MemlabError, match=r"has no loss: put the labels into the batch .* pass loss_fn"):
            TrainingStep(model, PAIR[0]).loss()


def test_callables_build_model_batch_and_optimizer():
    step = TrainingStep(network, lambda: PAIR, F.cross_entropy, lambda params: torch.optim.SGD(params, lr=0.5))
    assert isinstance(step.model, nn.Sequential)
    assert step.batch is PAIR
    assert step.optimizer.param_groups[0]["params"] == list(step.model.parameters())
    assert isinstance(TrainingStep(network, PAIR, F.cross_entropy, torch.optim.AdamW).optimizer, torch.optim.AdamW)
    assert repr(step) == "TrainingStep(Sequential of 75 parameters on cpu, SGD)"


# ------------------------------------------------------------------------------------------------------------ mistakes


def frozen():
    model = network()
    model.requires_grad_(False)
    return model


def mean_of(model, batch):
    return model(batch[0]).mean()


MISTAKES = {
    r"loss_fn returned a float, not a tensor": lambda: TrainingStep(network, PAIR, lambda m, b: 1.0).loss(),
    r"shape \(10, 3\), it is not a scalar: call \.mean\(\)": lambda: TrainingStep(
        network, PAIR, lambda m, b: m(b[0])
    ).loss(),
    r"no parameter of the model does; call requires_grad_\(\)": lambda: TrainingStep(frozen, PAIR, mean_of).loss(),
    r"cuts the graph \(\.detach\(\)": lambda: TrainingStep(network, PAIR, lambda m, b: mean_of(m, b).detach()).loss(),
    r"the loss is complex": lambda: TrainingStep(network, PAIR, lambda m, b: mean_of(m, b) * 1j).loss(),
    r"cross_entropy is a criterion and needs a batch \(inputs, target\), but the batch is a Tensor": lambda: (
        TrainingStep(network, PAIR[0], F.cross_entropy).loss()
    ),
    r"MSELoss is a criterion .* the batch is a tuple of 3": lambda: TrainingStep(
        network, (*PAIR, PAIR[0]), nn.MSELoss()
    ).loss(),
    r"reduction is 'avg': give 'mean' or 'sum'": lambda: TrainingStep(network, PAIR, mean_of, reduction="avg"),
    r"loss_fn is a str": lambda: TrainingStep(network, PAIR, "mse"),
    r"model is a list: give an nn.Module": lambda: TrainingStep([], PAIR, mean_of),
    r"model\(\) returned an int": lambda: TrainingStep(lambda: 3, PAIR, mean_of).model,
    r"optimizer is a str": lambda: TrainingStep(network(), PAIR, mean_of, "adam"),
    r"optimizer\(params\) returned a list": lambda: TrainingStep(network(), PAIR, mean_of, list),
    r"SGD holds none of the model's parameters": lambda: TrainingStep(
        network(), PAIR, mean_of, torch.optim.SGD(network().parameters())
    ),
    r"LBFGS.step needs a closure.*optimizer=None": lambda: TrainingStep(network(), PAIR, mean_of, torch.optim.LBFGS),
    r"4 micro-batches asked.*holds 3": lambda: TrainingStep(
        network, (PAIR[0][:3], PAIR[1][:3]), F.cross_entropy
    ).micro_batches(count=4),
    r"count of the micro-batches is 0": lambda: TrainingStep(network, PAIR, mean_of).micro_batches(count=0),
    r"size of the micro-batches is 2.5": lambda: TrainingStep(network, PAIR, mean_of).micro_batches(size=2.5),
    r"either count or size": lambda: TrainingStep(network, PAIR, mean_of).micro_batches(),
    r"split\(batch, 2\) returned 1 micro-batches": lambda: TrainingStep(
        network, PAIR, mean_of, split=lambda b, n: [b]
    ).micro_batches(count=2),
    r"ambiguous: first dimensions 2 and 3 are shared by 1 tensor": lambda: (
        TrainingStep(network, (torch.ones(2), torch.ones(3)), mean_of).batch_size
    ),
    r"a list of 6 mappings looks like 6 samples": lambda: (
        TrainingStep(network, ([torch.ones(3, 4, 4)] * 6, [{"box": 1}] * 6), mean_of).batch_size
    ),
    r"holds no tensor with a first dimension": lambda: TrainingStep(network, ["a", 1], mean_of).batch_size,
    r"sparse_coo tensor of the batch cannot be sliced.*split=": lambda: (
        TrainingStep(network, torch.eye(3).to_sparse(), mean_of).batch_size
    ),
    r"nested tensor": lambda: (
        TrainingStep(
            network, torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), mean_of
        ).batch_size
    ),
    r"PackedSequence cannot be split.*Give the padded batch": lambda: TrainingStep(
        network, (nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(2, 2)]), torch.ones(2)), mean_of
    ).micro_batches(count=2),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_are_explained(message):
    with pytest.raises(MemlabError, match=message):
        MISTAKES[message]()


def test_parameters_on_two_devices():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(MemlabError, match=r"0\.weight on cpu and 1\.weight on meta.*model\.to\('cpu'\)"):
        TrainingStep(model, PAIR, mean_of)


def test_no_grad_and_inference_mode():
    step = TrainingStep(network, PAIR, F.cross_entropy)
    with torch.no_grad(), pytest.raises(MemlabError, match="gradients are switched off"):
        step.loss()
    with torch.inference_mode(), pytest.raises(MemlabError, match=r"inference_mode\(\) is on"):
        step.loss()
    with torch.inference_mode():
        batch, model = (torch.randn(10, 5), PAIR[1]), network()
    with pytest.raises(MemlabError, match=r"batch holds inference tensors.*clone\(\) them"):
        TrainingStep(network, batch, F.cross_entropy).loss()
    with pytest.raises(MemlabError, match=r"0\.weight was made under torch\.inference_mode\(\)"):
        TrainingStep(model, PAIR, F.cross_entropy)


def test_the_users_own_exception_passes_unchanged():
    def loss_fn(model, batch):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        TrainingStep(network, PAIR, loss_fn).loss()


# --------------------------------------------------------------------------------------------------------------- names


def test_names_without_wrappers_and_each_parameter_once():
    inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    inner[1].weight = inner[0].weight
    compiled = torch.compile(inner, backend="eager")
    step = TrainingStep(nn.Sequential(compiled, nn.Linear(4, 4)), torch.ones(2, 4), lambda m, b: m(b).sum())
    assert [name for name, _ in step.named_parameters()] == ["0.0.weight", "0.0.bias", "0.1.bias", "1.weight", "1.bias"]
    names = step.module_names
    assert names[id(step.model)] == "Sequential"
    assert (names[id(compiled)], names[id(inner)], names[id(inner[1])]) == ("0", "0", "0.1")
    shared = nn.Linear(4, 4)
    root = TrainingStep(nn.DataParallel(nn.ModuleDict({"a": shared, "b": shared})), PAIR, mean_of)
    assert root.module_names[id(shared)] == "a"
    assert root.module_names[id(root.model)] == "ModuleDict"


def test_a_model_without_parameters_lives_with_its_batch():
    assert TrainingStep(nn.Identity(), torch.ones(2, device="meta"), mean_of).device.type == "meta"
    assert TrainingStep(nn.Identity(), 3, mean_of).device.type == "cpu"


# ------------------------------------------------------------------------------------------------------- micro-batches


def step_of(batch, **options):
    return TrainingStep(network, batch, mean_of, **options)


def test_sizes_and_shares():
    step = step_of(PAIR)
    assert step.batch_size == 10
    for count in range(1, 11):
        sizes = [part.size for part in step.micro_batches(count=count)]
        assert sizes == [len(part) for part in torch.tensor_split(PAIR[0], count)]
    for size in range(1, 13):
        parts = step.micro_batches(size=size)
        assert [part.size for part in parts] == [len(part) for part in PAIR[0].split(size)]
        assert [part.share for part in parts] == pytest.approx([part.size / 10 for part in parts])
    assert {part.share for part in step_of(PAIR, reduction="sum").micro_batches(count=3)} == {1.0}


class Point(typing.NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass
class Sample:
    image: torch.Tensor
    name: str


class Bag(collections.UserDict):
    pass


def test_every_kind_of_nest_is_cut_and_keeps_its_kind():
    x = torch.arange(6.0).reshape(6, 1)
    batch = Bag(
        ids={"a": x, "lang": "en"},
        views=(x + 10, [x + 20, x + 30]),
        names=["a", "b", "c", "d", "e", "f"],
        tags=("a", "b", "c", "d", "e", "f"),
        point=Point(x, x),
        sample=Sample(x, "six"),
        array=np.arange(6),
        ordered=collections.OrderedDict(z=x, a=1),
        none=None,
        power=2,
        scalar=torch.tensor(1.5),
        table=torch.ones(7, 2),
        pair=[1, 2],
    )
    first, second = (part.batch for part in step_of(batch).micro_batches(size=4))
    assert type(first) is Bag
    assert batch["names"] == ["a", "b", "c", "d", "e", "f"]
    for part, rows in ((first, slice(0, 4)), (second, slice(4, 6))):
        assert torch.equal(part["ids"]["a"], x[rows])
        assert part["ids"]["a"].untyped_storage().data_ptr() == x.untyped_storage().data_ptr(), "slices are views"
        assert part["ids"]["lang"] == "en"
        assert torch.equal(part["views"][1][1], (x + 30)[rows])
        assert part["names"] == batch["names"][rows]
        assert part["tags"] == batch["tags"][rows]
        assert isinstance(part["point"], Point)
        assert torch.equal(part["point"].y, x[rows])
        assert part["sample"].name == "six"
        assert torch.equal(part["sample"].image, x[rows])
        assert part["array"].tolist() == list(range(6))[rows]
        assert list(part["ordered"]) == ["z", "a"]
        assert part["table"] is batch["table"]
        assert part["scalar"] is batch["scalar"]
        assert (part["none"], part["power"], part["pair"]) == (None, 2, [1, 2])


def test_a_pair_of_two_samples_is_still_a_pair():
    inputs, target = PAIR[0][:2], PAIR[1][:2]
    for parts in (step_of([inputs, target]).micro_batches(count=2), step_of((inputs, target)).micro_batches(count=2)):
        assert [len(part.batch) for part in parts] == [2, 2]
        assert torch.equal(parts[1].batch[0], inputs[1:])


def test_objects_that_hide_tensors_ask_for_split():
    class Graph:
        def __init__(self):
            self.x = torch.ones(4, 2)

    with pytest.raises(
        MemlabError, match=r"a Graph in the batch holds tensors that memlab cannot split: pass `split=`"
    ):
        step_of((torch.ones(4), Graph())).micro_batches(count=2)


def test_a_users_split_and_weights():
    def by_parity(batch, n):
        return [(batch[0][k::n], batch[1][k::n]) for k in range(n)]

    step = step_of(PAIR, split=by_parity, weight=lambda batch: (batch[1] == 0).sum())
    even, odd = step.micro_batches(count=2)
    assert torch.equal(even.batch[0], PAIR[0][0::2])
    zeros = [(PAIR[1][k::2] == 0).sum().item() for k in (0, 1)]
    assert (even.share, odd.share) == tuple(z / sum(zeros) for z in zeros)
    assert even.size == 5
    no_size = step_of(["a", "b", "c"], split=lambda batch, n: [batch[:1], batch[1:]], weight=len)
    assert [(part.size, part.share) for part in no_size.micro_batches(count=2)] == [(None, 1 / 3), (None, 2 / 3)]
    with pytest.raises(MemlabError, match=r"micro-batch 1 has no batch size to be weighted by: pass `weight=`"):
        step_of(["a", "b"], split=lambda batch, n: [batch[:1], batch[1:]]).micro_batches(count=2)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (lambda batch: float("nan"), "weight of micro-batch 1 is nan"),
        (lambda batch: -1, "weight of micro-batch 1 is -1"),
        (lambda batch: torch.ones(2), "return one number"),
        (lambda batch: "three", "return one number"),
        (lambda batch: 0, "the 2 micro-batches weigh nothing in all"),
    ],
)
def test_weights_that_cannot_be(weight, message):
    with pytest.raises(MemlabError, match=message):
        step_of(PAIR, weight=weight).micro_batches(count=2)


@pytest.mark.parametrize("weight", [np.float32(2), 3, True, torch.tensor(4), torch.tensor([2.5])])
def test_weights_of_any_number_type(weight):
    assert [part.share for part in step_of(PAIR, weight=lambda batch: weight).micro_batches(count=2)] == [0.5, 0.5]


def test_the_mean_over_masked_tokens_is_exact_with_weights():
    torch.manual_seed(0)
    model = nn.Linear(4, 7).double()
    x, target = torch.randn(6, 9, 4).double(), torch.randint(0, 7, (6, 9))
    lengths = torch.tensor([9, 1, 4, 2, 8, 3])
    target[torch.arange(9) >= lengths[:, None]] = -100
    step = TrainingStep(
        model,
        (x, target),
        lambda m, b: F.cross_entropy(m(b[0]).flatten(0, 1), b[1].flatten()),
        weight=lambda b: (b[1] != -100).sum(),
    )
    step.loss().backward()
    whole = gradients(model)
    model.zero_grad()
    for part in step.micro_batches(size=4):
        (step.loss(part.batch) * part.share).backward()
    for name, gradient in gradients(model).items():
        assert torch.allclose(gradient, whole[name], rtol=1e-12, atol=1e-15)


def test_slices_of_a_batch_that_requires_grad_can_be_differentiated_for():
    x = torch.randn(8, 5, dtype=torch.float64, requires_grad=True)
    model = network().double()

    def penalty(model, batch):
        (gradient,) = torch.autograd.grad(model(batch).sum(), batch, create_graph=True)
        return (gradient.norm(dim=1) - 1).pow(2).mean()

    step = TrainingStep(model, x, penalty)
    step.loss().backward()
    whole = gradients(model)
    model.zero_grad()
    for part in step.micro_batches(count=3):
        assert part.batch.is_leaf
        assert part.batch.requires_grad
        (step.loss(part.batch) * part.share).backward()
    for name, gradient in gradients(model).items():
        assert gradient is whole[name] is None or torch.allclose(gradient, whole[name], rtol=1e-12, atol=1e-15)


# ---------------------------------------------------------------------------------------------------------------- lazy


def test_lazy_modules_are_made_once_and_nothing_else_moves():
    torch.manual_seed(4)
    model = nn.Sequential(nn.LazyLinear(6), nn.LazyBatchNorm1d(), nn.BatchNorm1d(6), nn.ReLU(), nn.LazyLinear(3))
    random_state = torch.get_rng_state()
    step = TrainingStep(model, PAIR, F.cross_entropy, torch.optim.Adam)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert type(model[0]) is nn.Linear
    assert model[0].in_features == 5
    for norm in (model[1], model[2]):
        assert norm.num_batches_tracked == 0
        assert torch.equal(norm.running_mean, torch.zeros(6))
        assert torch.equal(norm.running_var, torch.ones(6))
    assert model[1].num_features == 6
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert sum(p.numel() for group in step.optimizer.param_groups for p in group["params"]) == 36 + 12 + 12 + 21
    assert step.loss().item() == step.loss().item()


# ---------------------------------------------------------------------------------------------------------------- copy


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("scale", torch.tensor([0.5, 2.0, 1.0, 1.0]))
        self.register_buffer("spin", torch.ones(4, dtype=torch.complex64))
        self.last = None

    def forward(self, ids):
        self.last = self.emb(ids).mean(1) * self.scale * self.spin.real
        return self.head(self.last)


def test_a_copy_is_linked_as_the_original_and_in_the_wanted_dtype():
    model = Tied()
    batch = {"ids": torch.randint(0, 7, (5, 3)), "extra": torch.ones(5)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # it patches optimizer.step
    teacher, weights, history = nn.Linear(4, 7), torch.rand(7), []

    def loss_fn(model, batch):
        logits = model(batch["ids"])
        loss = F.cross_entropy(logits, batch["ids"][:, 0], weight=weights) + F.mse_loss(logits, teacher(model.last))
        history.append(loss.detach())
        return loss * batch["extra"].mean()

    loss_fn(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    history.clear()
    step = TrainingStep(model, batch, loss_fn, optimizer)
    expected = step.loss()
    history.clear()
    new = step.copy(Recast(torch.float64))
    assert new.model.head.weight is new.model.emb.weight
    assert new.model.emb.weight.dtype == torch.float64
    assert new.model.spin.dtype == torch.complex128
    assert (new.batch["ids"].dtype, new.batch["extra"].dtype) == (torch.int64, torch.float64)
    assert new.optimizer.param_groups[0]["params"] == [new.model.emb.weight]
    assert new.optimizer.state[new.model.emb.weight]["exp_avg"].dtype == torch.float64
    before = [p.detach().clone() for p in model.parameters()]
    loss = new.loss()
    assert loss.dtype == torch.float64
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    new.optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert history == []


TEACHER = nn.Linear(5, 3)


def distilled(model, batch):
    return F.mse_loss(model(batch[0]), through_teacher(batch[0]))


def through_teacher(x):
    return TEACHER(x)


def test_globals_that_the_loss_names_are_copied_too():
    step = TrainingStep(network, PAIR, distilled)
    assert step.copy(Recast(torch.float64)).loss().item() == pytest.approx(step.loss().item(), rel=1e-5)
    assert TEACHER.weight.dtype == torch.float32


def test_criteria_views_hooks_and_attributes_in_a_copy():
    model = network()
    model[0].bias.register_hook(lambda gradient: gradient * 2)
    model[0].bias.tag = "mine"
    flat = torch.zeros(24)
    model[2].weight = nn.Parameter(flat.view(3, 8))
    model.alias = nn.Parameter(flat.view(3, 8))
    step = TrainingStep(model, PAIR, nn.CrossEntropyLoss(weight=torch.rand(3)))
    new = step.copy(Recast(torch.float64))
    with torch.no_grad():
        new.model[2].weight.fill_(0.3)
    assert torch.equal(new.model.alias, new.model[2].weight)
    assert not flat.any()
    assert new.model[0].bias.tag == "mine"
    new.loss().backward()
    with_hook = new.model[0].bias.grad
    again = step.copy(Recast(torch.float64))
    again.model[0].bias._backward_hooks.clear()
    with torch.no_grad():
        again.model[2].weight.fill_(0.3)
    again.loss().backward()
    assert torch.allclose(with_hook, 2 * again.model[0].bias.grad)


def test_wrappers_are_left_off_and_graphs_are_not_copied():
    model = Tied()
    model(torch.zeros(2, 2, dtype=torch.int64))
    assert model.last.requires_grad
    compiled = torch.compile(model, backend="eager")
    step = TrainingStep(compiled, torch.zeros(2, 2, dtype=torch.int64), lambda m, b: m(b).mean())
    new = step.copy(Recast(torch.float64))
    assert isinstance(new.model, Tied)
    assert new.loss().dtype == torch.float64


def test_what_cannot_be_copied_says_so():
    model = network()
    model.stream = (value for value in range(3))
    with pytest.raises(MemlabError, match="the step cannot be copied: TypeError: cannot pickle 'generator' object"):
        TrainingStep(model, PAIR, F.cross_entropy).copy(Recast(torch.float64))
    model = network()
    model[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(MemlabError, match="post-accumulate-grad hooks"):
        TrainingStep(model, PAIR, F.cross_entropy).copy(Recast(torch.float64))


def test_snapshot_covers_the_whole_step():
    step = TrainingStep(network, PAIR, F.cross_entropy, torch.optim.SGD)
    before = [p.detach().clone() for p in step.model.parameters()]
    state = step.snapshot()
    step.loss().backward()
    step.optimizer.step()
    state.restore()
    assert all(torch.equal(p, old) for p, old in zip(step.model.parameters(), before, strict=True))
    assert all(p.grad is None for p in step.model.parameters())
