"""The families behind the cases, thought through to their edges: what would memlab say that is wrong here?

`test_cases.py` holds users' programs; here are their siblings, small and by family. What is right is computed in plain
PyTorch, or follows from how the sibling is built.
"""

from __future__ import annotations

import collections
import copy
import functools
import os
import random
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import memlab
from memlab import Checkpoint, LowPrecision, MicroBatch, MixedPrecision, OptimizerInBackward
from memlab.means import Means
from tests.truth import allocator_peak

CHECKPOINT, MICRO = Checkpoint(), MicroBatch(count=4)


class Block(nn.Module):
    """A layer with something in its middle, which each sibling fills in."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.prepare()

    def prepare(self):
        pass

    def middle(self, x):
        return x

    def forward(self, x):
        return self.middle(self.fc(x)).tanh()


def net(block=Block):
    return nn.Sequential(block(), block(), nn.Linear(8, 4))


def pair(samples=8):
    return torch.randn(samples, 8), torch.arange(samples) % 4


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def rows(model, loss_fn=None, batch=None, strategies=None, optimizer=sgd, **options):
    batch = pair() if batch is None else batch
    step = memlab.TrainingStep(model, batch, loss_fn or nn.CrossEntropyLoss(), optimizer, **options)
    compared = memlab.compare(step, strategies or {"ckpt": CHECKPOINT, "micro": MICRO}, repeats=0).rows
    return {row.label: row for row in compared}


def told(row):
    return " | ".join(row.notes)


def middle(function):
    """A block with this in its middle."""
    return type("Middle", (Block,), {"middle": function})


# -- state that a step changes outside the parameters ------------------------------------------------------------------


class Counter(Block):
    def prepare(self):
        self.calls = 0

    def middle(self, x):
        self.calls += 1
        return x


class HandAverage(Block):
    def prepare(self):
        self.average = torch.zeros(8)

    def middle(self, x):
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return x


class Slots:
    __slots__ = ("value",)


class SlotAverage(Block):
    def prepare(self):
        self.ema = Slots()
        self.ema.value = 0.0

    def middle(self, x):
        self.ema.value = 0.9 * self.ema.value + 0.1 * float(x.mean())
        return x


class Bank(Block):
    def prepare(self):
        self.bank = collections.deque([torch.zeros(8)] * 3, maxlen=3)

    def middle(self, x):
        self.bank.append(x.detach().mean(0))
        return x


class IntegerBuffer(Block):
    def prepare(self):
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def middle(self, x):
        self.seen += 1
        return x


class ComplexBuffer(Block):
    def prepare(self):
        self.register_buffer("phase", torch.ones(3, dtype=torch.complex64))

    def middle(self, x):
        self.phase += 1j  # the real part stays
        return x


class MaskWithInfinities(Block):
    def prepare(self):
        self.register_buffer("mask", torch.full((3, 3), float("-inf")).triu(1))

    def middle(self, x):
        self.mask[0, 0] += 1
        return x


class Teacher(Block):
    def prepare(self):
        self.teacher = nn.Linear(8, 8).requires_grad_(False)

    def middle(self, x):
        with torch.no_grad():
            self.teacher.weight.lerp_(self.fc.weight, 0.1)
        return x


class HiddenTeacher(Block):
    def prepare(self):
        self.teachers = [nn.Linear(8, 8).requires_grad_(False)]

    def middle(self, x):
        with torch.no_grad():
            self.teachers[0].weight.lerp_(self.fc.weight, 0.1)
        return x


class OldSpectral(Block):
    def prepare(self):
        self.fc = nn.utils.spectral_norm(self.fc)


class Spectral(Block):
    def prepare(self):
        self.fc = nn.utils.parametrizations.spectral_norm(self.fc)


STATEFUL = {
    Counter: ("0.calls", lambda block: block.calls),
    HandAverage: ("0.average", lambda block: block.average),
    SlotAverage: ("0.ema.value", lambda block: block.ema.value),
    Bank: ("0.bank[1]", lambda block: block.bank[1]),
    IntegerBuffer: ("0.seen", lambda block: block.seen),
    ComplexBuffer: ("0.phase", lambda block: block.phase),
    MaskWithInfinities: ("0.mask", lambda block: block.mask),
    Teacher: ("0.teacher.weight", lambda block: block.teacher.weight),
    HiddenTeacher: ("Linear.weight", lambda block: block.teachers[0].weight),
    OldSpectral: ("0.fc.weight_u", lambda block: block.fc.weight_u),
    Spectral: ("0.fc.parametrizations.weight.0._u", lambda block: block.fc.parametrizations.weight[0]._u),
}


@pytest.mark.parametrize("block", STATEFUL, ids=lambda block: block.__name__)
def test_state_that_recomputation_changes_once_more(block):
    name, read = STATEFUL[block]
    model, (x, target) = net(block), pair()
    plain, twice = copy.deepcopy(model), copy.deepcopy(model)
    F.cross_entropy(plain(x), target).backward()
    h = x
    for inner in twice[:-1]:
        h = checkpoint(inner, h, use_reentrant=False)
    F.cross_entropy(twice[-1](h), target).backward()
    ends = [torch.as_tensor(read(each[0])) for each in (plain, twice)]
    assert not torch.equal(*ends)  # in plain PyTorch

    found = rows(model, batch=(x, target))
    assert found["baseline"].equivalent
    for row in (found["ckpt"], found["micro"]):
        assert row.equivalent is False
        assert name in row.buffer_differences
        assert name in told(row)
    assert "recomputation is one more" in told(found["ckpt"])
    assert "each micro-batch is one" in told(found["micro"])


@pytest.mark.parametrize("block", [OldSpectral, Spectral], ids=lambda block: block.__name__)
def test_state_that_the_forward_pass_uses_is_the_cause_of_other_gradients(block):
    found = rows(net(block))
    assert found["ckpt"].gradient_difference > 1e-5
    assert "and may use that: a recomputation finds it changed" in told(found["ckpt"])
    assert "and may use that: each micro-batch finds it changed" in told(found["micro"])


def test_a_bank_that_ends_alike_is_still_named():
    class Moco(nn.Module):
        def __init__(self):
            super().__init__()
            self.encode, self.at = nn.Linear(8, 8), 0
            self.register_buffer("queue", torch.randn(16, 8))

        def forward(self, x):
            keys = F.normalize(self.encode(x), dim=1)
            scores = keys @ self.queue.t().clone()
            with torch.no_grad():
                self.queue[self.at : self.at + len(x)] = keys
            self.at = (self.at + len(x)) % 16
            return scores

    found = rows(Moco(), strategies={"ckpt": Checkpoint("Moco"), "micro": MICRO})
    for row in (found["ckpt"], found["micro"]):
        assert row.equivalent is False
        assert "state that" in told(row)
        assert "(queue)" in told(row)


class LastAttention(Block):
    def prepare(self):
        self.last = None

    def middle(self, x):
        self.last = x.detach().softmax(-1)
        return x


class Stopwatch(Block):
    def prepare(self):
        self.ended = 0.0

    def middle(self, x):
        self.ended = time.perf_counter()
        return x


class OldWeightNorm(Block):
    def prepare(self):
        self.fc = nn.utils.weight_norm(self.fc)


class WeightNorm(Block):
    def prepare(self):
        self.fc = nn.utils.parametrizations.weight_norm(self.fc)


class AuxiliaryLoss(Block):
    def middle(self, x):
        self.aux = x.square().mean()
        return x


@pytest.mark.parametrize("block", [LastAttention, Stopwatch, OldWeightNorm, WeightNorm], ids=lambda b: b.__name__)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_what_is_overwritten_by_each_pass_is_no_state(block):
    found = rows(net(block))
    assert found["ckpt"].equivalent
    assert found["ckpt"].gradient_difference == 0
    assert found["micro"].equivalent


def test_what_a_parent_reads_of_a_checkpointed_child():
    def loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1]) + model[0].aux + model[1].aux

    found = rows(net(AuxiliaryLoss), loss)
    assert found["ckpt"].equivalent
    assert found["ckpt"].gradient_difference == 0
    assert found["micro"].equivalent


def test_a_log_in_a_module_is_a_remark():
    class Logging(Block):
        def prepare(self):
            self.log = []

        def middle(self, x):
            self.log.append(float(x.mean()))
            return x

    model = net(Logging)
    found = rows(model)
    for row in (found["ckpt"], found["micro"]):
        assert row.equivalent
        assert "lists in modules end with other lengths than in the plain step: len(0.log), len(1.log)" in told(row)
    assert model[0].log == []


def test_state_of_modules_that_the_loss_holds():
    class Centered(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("center", torch.zeros(4))

        def forward(self, output, target):
            loss = (output - self.center).square().mean()
            self.center.mul_(0.9).add_(output.detach().mean(0), alpha=0.1)
            return loss

    teacher = nn.Linear(8, 4).requires_grad_(False)

    def distil(model, batch):
        with torch.no_grad():
            teacher.weight.lerp_(model[-1].weight, 0.1)
        return F.mse_loss(model(batch[0]), teacher(batch[0]))

    for loss_fn, name in ((Centered(), "Centered.center"), (distil, "Linear.weight")):
        before = copy.deepcopy(teacher.weight)
        found = rows(net(), loss_fn)
        assert found["ckpt"].equivalent  # the loss is outside the checkpointed blocks
        assert found["micro"].equivalent is False
        assert found["micro"].buffer_differences[-1] == name
        assert torch.equal(teacher.weight, before)


COUNTS = [0]


def count():
    COUNTS[0] += 1


def test_state_of_classes_and_modules_is_put_back():
    class Classy(Block):
        calls, history = 0, []

        def middle(self, x):
            type(self).calls += 1
            self.history.append(x)
            self.tell()
            return x

        def tell(self):
            count()

    assert all(row.error is None for row in rows(net(Classy)).values())
    assert (Classy.calls, Classy.history, COUNTS) == (0, [], [0])


def test_a_layer_that_the_first_pass_makes_asks_to_be_made_before():
    class ByHand(Block):
        def prepare(self):
            self.late = None

        def middle(self, x):
            if self.late is None:
                self.late = nn.Linear(8, 8)
            return self.late(x)

    model = net(ByHand)
    with pytest.raises(memlab.MemlabError, match=r"made parameters, 0\.late\.bias, .*run the model once, then make"):
        rows(model)
    assert model[0].late is None
    model(pair()[0])
    assert all(row.equivalent for row in rows(model).values())


# -- randomness --------------------------------------------------------------------------------------------------------


def _own(make, draw):
    class Own(Block):
        def prepare(self):
            self.source = make()

        def middle(self, x):
            return x * draw(self.source, x)

    return Own


OWN = {
    "torch.Generator": _own(
        lambda: torch.Generator().manual_seed(1), lambda source, x: 2 * (torch.rand(x.shape, generator=source) < 0.5)
    ),
    "numpy's": _own(
        lambda: np.random.default_rng(1), lambda source, x: torch.from_numpy(2.0 * (source.random(x.shape) < 0.5)).to(x)
    ),
    "Python's": _own(lambda: random.Random(1), lambda source, x: 1 + source.random()),
}


@pytest.mark.parametrize("block", OWN.values(), ids=OWN)
def test_a_generator_of_ones_own_is_not_repeated_by_recomputation(block):
    row = rows(net(block), strategies={"ckpt": CHECKPOINT})["ckpt"]
    assert row.equivalent is False
    assert row.gradient_difference > 1e-3
    assert "or from a generator of its own: they are not restored for a recomputation" in told(row)
    both = rows(net(block), strategies={"both": CHECKPOINT + MICRO})["both"]
    assert both.equivalent is False  # means would make both steps agree, and hide it


class Diffusion(Block):
    def prepare(self):
        self.times = nn.Embedding(10, 8)

    def middle(self, x):
        return x + self.times(torch.randint(0, 10, (len(x),))) + torch.randn_like(x)


def _seeded(self, x):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return F.dropout(x, 0.5)


@pytest.mark.parametrize(
    "block",
    [
        Diffusion,
        middle(lambda self, x: F.gumbel_softmax(x)),
        middle(lambda self, x: F.alpha_dropout(x, 0.3, training=True)),
        middle(lambda self, x: x + torch.poisson(x.detach().abs())),
        middle(lambda self, x: x * torch.distributions.LogNormal(0.0, 0.1).sample(x.shape).to(x)),
        middle(_seeded),
    ],
    ids=["diffusion", "gumbel", "alpha dropout", "poisson", "log-normal", "a fork of the stream"],
)
def test_draws_with_a_mean(block):
    found = rows(net(block))
    assert found["ckpt"].equivalent
    assert found["ckpt"].gradient_difference == 0
    assert not found["ckpt"].notes
    assert found["micro"].equivalent
    assert "draw other masks" in told(found["micro"])


class Sampled(Block):
    def prepare(self):
        self.table = nn.Embedding(8, 8)

    def middle(self, x):
        return x + self.table(torch.multinomial(x.softmax(-1), 1)[:, 0])


@pytest.mark.parametrize(
    ("block", "name"),
    [
        (middle(lambda self, x: x + 0.3 * x[torch.randperm(len(x))]), "randperm"),
        (middle(lambda self, x: F.rrelu(x, training=True)), "rrelu_with_noise"),
        (Sampled, "multinomial"),
    ],
)
def test_draws_without_a_mean_leave_it_unproven(block, name):
    found = rows(net(block))
    assert found["ckpt"].equivalent
    assert found["micro"].equivalent is None
    assert f"not proven: {name} draws at random and has no mean" in told(found["micro"])


def test_a_source_that_nobody_can_put_back():
    found = rows(net(middle(lambda self, x: x * (1 + os.urandom(1)[0]))))
    assert found["ckpt"].equivalent is False
    assert found["micro"].equivalent is None
    for row in (found["ckpt"], found["micro"]):
        assert "the plain step is another each time it runs" in told(row)
        assert "os.urandom" in told(row)


DRAWS = {
    "rand": lambda: torch.rand(20_000),
    "randn": lambda: torch.randn(20_000) + 2,
    "randint": lambda: torch.randint(3, 14, (20_000,)),
    "random_": lambda: torch.empty(20_000).random_(3, 14),
    "bernoulli": lambda: torch.bernoulli(torch.full((20_000,), 0.3)),
    "bernoulli_": lambda: torch.empty(20_000).bernoulli_(0.3),
    "uniform_": lambda: torch.empty(20_000).uniform_(1, 5),
    "normal_": lambda: torch.empty(20_000).normal_(3, 2),
    "normal": lambda: torch.normal(torch.full((20_000,), 3.0), 2.0),
    "log_normal_": lambda: torch.empty(20_000).log_normal_(0.5, 0.3),
    "exponential_": lambda: torch.empty(20_000).exponential_(0.5),
    "geometric_": lambda: torch.empty(20_000).geometric_(0.3),
    "poisson": lambda: torch.poisson(torch.full((20_000,), 3.0)),
    "binomial": lambda: torch.binomial(torch.full((20_000,), 9.0), torch.full((20_000,), 0.3)),
    "dropout": lambda: F.dropout(torch.ones(20_000), 0.3),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_the_mean_is_the_average_of_many_draws(draw):
    average = draw().double().mean()
    with Means() as means:
        mean = draw().double()
    assert not means.no_mean
    assert mean.min() == mean.max()
    assert mean[0].item() == pytest.approx(average.item(), rel=0.05)


# -- batches -----------------------------------------------------------------------------------------------------------


def test_numpy_arrays_are_a_batch():
    def loss(model, batch):
        return F.cross_entropy(model(torch.from_numpy(batch["x"])), torch.from_numpy(batch["y"]))

    batch = {"x": np.random.randn(8, 8).astype("float32"), "y": np.arange(8) % 4}
    found = rows(net(), loss, batch)
    assert {row.proof for row in found.values()} == {"float64"}
    assert all(row.equivalent for row in found.values())


def test_a_tokenizers_output():
    transformers = pytest.importorskip("transformers", reason="BatchEncoding is Hugging Face's")

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag, self.head = nn.EmbeddingBag(20, 8), nn.Linear(8, 4)

        def forward(self, input_ids, labels):
            return {"loss": F.cross_entropy(self.head(self.bag(input_ids)), labels)}

    batch = transformers.BatchEncoding({"input_ids": torch.randint(0, 20, (6, 5)), "labels": torch.arange(6) % 4})
    step = memlab.TrainingStep(Classifier(), batch, None, sgd)
    assert all(type(part.batch) is transformers.BatchEncoding for part in step.micro_batches(count=4))
    assert memlab.compare(step, [MICRO], repeats=0).rows[1].equivalent


def test_what_has_no_first_dimension_or_nothing_in_it_passes_whole():
    batch = {"x": torch.randn(6, 8), "scale": torch.tensor(2.0), "none": None, "chosen": torch.empty(0), "n": 3}

    def loss(model, batch):
        assert batch["chosen"].shape == (0,)
        return (model(batch["x"]) * batch["scale"]).square().mean() + batch["chosen"].sum() + batch["n"]

    assert rows(net(), loss, batch)["micro"].equivalent


def test_batches_that_cannot_be_run_or_cut_say_so():
    nothing = torch.randn(0, 8), torch.randn(0, 4)
    found = rows(nn.Linear(8, 4), nn.MSELoss(reduction="sum"), nothing, {"micro": MicroBatch(count=1)})
    assert found["micro"].error == "the batch holds no samples: give one that does"
    encoded = nn.Linear(8, 8)(torch.randn(8, 8)), torch.arange(8) % 4
    with pytest.raises(memlab.MemlabError, match=r"result of a computation that autograd recorded.*detach\(\) it"):
        rows(net(), batch=encoded)
    images = [torch.randn(3, 8 + i, 8) for i in range(4)], [{"boxes": torch.randn(i + 1, 4)} for i in range(4)]

    def detect(model, batch):
        return torch.stack([model(image[None]).mean() * truth["boxes"].sum() for image, truth in zip(*batch)]).mean()  # noqa: B905

    row = rows(nn.Conv2d(3, 4, 3), detect, images, {"micro": MICRO})["micro"]
    assert "a list of 4 mappings looks like 4 samples" in row.error
    assert "split=" in row.error


def test_nested_tensors_run_and_ask_for_split():
    batch = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=torch.jagged)

    def loss(model, batch):
        return model(batch).values().square().mean()

    found = rows(
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), loss, batch, {"ckpt": Checkpoint("0"), "micro": MICRO}
    )
    assert found["ckpt"].equivalent
    assert found["micro"].error.startswith("a nested tensor of the batch cannot be sliced")


# -- losses that are not a plain mean over samples ---------------------------------------------------------------------


def _micro(loss_fn, batch=None, **options):
    return rows(net(), loss_fn, batch, {"micro": MICRO}, **options)["micro"]


def test_sums_and_means_are_told_apart_by_the_gradients():
    row = _micro(nn.CrossEntropyLoss(reduction="sum"))
    assert row.equivalent is False
    assert 'their sum (the gradients are 0.25 times the plain ones): pass reduction="sum"' in told(row)
    assert _micro(nn.CrossEntropyLoss(reduction="sum"), reduction="sum").equivalent
    row = _micro(nn.CrossEntropyLoss(), reduction="sum")
    assert row.equivalent is False
    assert "(the gradients are 4 times the plain ones): leave it out" in told(row)


UNEVEN = torch.randn(8, 8), torch.tensor([0, 1, 2, 3, 3, 3, 0, 1])
WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 40.0])


@pytest.mark.parametrize(
    ("loss_fn", "weight", "cause"),
    [
        (nn.CrossEntropyLoss(WEIGHTS), lambda b: WEIGHTS[b[1]].sum(), "has class weights, and its mean is over them"),
        (
            nn.CrossEntropyLoss(ignore_index=0, label_smoothing=0.1),
            lambda b: (b[1] != 0).sum(),
            "the batch has targets of 0, which cross-entropy leaves out",
        ),
        (
            lambda model, b: (F.cross_entropy(model(b[0]), b[1], reduction="none") * b[1]).sum() / b[1].sum(),
            lambda b: b[1].sum(),
            "the loss is not a mean over independent samples",
        ),
    ],
    ids=["class weights", "ignore_index and smoothing", "token weights"],
)
def test_a_weighted_mean(loss_fn, weight, cause):
    row = _micro(loss_fn, UNEVEN)
    assert row.equivalent is False
    assert cause in told(row)
    assert "pass weight=" in told(row).lower()
    assert _micro(loss_fn, UNEVEN, weight=weight).equivalent
    wrong = _micro(loss_fn, UNEVEN, weight=lambda batch: 1 + batch[1][0])
    assert wrong.equivalent is False
    assert "not a mean over as many terms as weight= says" in told(wrong)


def test_a_loss_that_is_zero_by_construction():
    """Policy gradients: advantages of mean zero times a ratio that is one."""

    def loss(model, batch):
        x, advantage = batch
        chosen = model(x).log_softmax(-1)[:, 0]
        return -((chosen - chosen.detach()).exp() * advantage).mean()

    advantage = torch.tensor([1.0, -1.3, 2.1, -1.8, 3.3, -3.3, 0.5, -0.5])
    found = rows(net(), loss, (torch.randn(8, 8), advantage - advantage.mean()))
    assert found["micro"].equivalent
    assert found["ckpt"].equivalent


def test_hooks_on_parameters_see_each_micro_batch():
    model = net()
    model[0].fc.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    found = rows(model)
    assert found["ckpt"].equivalent
    assert found["micro"].equivalent is False
    assert "hooks on 0.fc.weight change each micro-batch's gradient, not their sum" in told(found["micro"])


def test_an_optimizer_in_backward_of_ones_own():
    model = net()

    def consume(parameter):
        with torch.no_grad():
            parameter.sub_(0.1 * parameter.grad)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(consume)
    found = rows(model, optimizer=None)
    assert "your own hooks use up the gradients of 0.fc.weight" in told(found["baseline"])
    assert found["ckpt"].equivalent
    assert found["micro"].equivalent is False
    assert "your own hooks use each micro-batch's gradient" in told(found["micro"])


def test_a_loss_that_calls_backward_itself():
    def loss(model, batch):
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward(retain_graph=True)
        return loss

    found = rows(net(), loss, strategies={"early": OptimizerInBackward()})
    assert "loss_fn calls backward itself: the gradients that it leaves (0.fc.weight" in told(found["baseline"])
    assert "or calls backward itself" in found["early"].error


def test_a_sequence_cut_along_time():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.GRU(8, 8), nn.Linear(8, 4)

        def forward(self, x):
            return self.head(self.rnn(x)[0]).flatten(0, 1)

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1].flatten())

    row = rows(Recurrent(), loss, (torch.randn(8, 3, 8), torch.randint(0, 4, (8, 3))), {"micro": MICRO})["micro"]
    assert row.equivalent is False
    assert "a first dimension that is time" in told(row)


def test_batch_statistics_in_eval_mode_are_still_the_batchs():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 4)).eval()
    row = rows(model, strategies={"micro": MICRO})["micro"]
    assert row.equivalent is False
    assert "1 (BatchNorm1d): BatchNorm normalises over each micro-batch" in told(row)


# -- storages of every kind --------------------------------------------------------------------------------------------


def _flat():
    flat, model = torch.randn(8 * 8 + 8), net()
    model[0].fc.weight, model[0].fc.bias = nn.Parameter(flat[:64].view(8, 8)), nn.Parameter(flat[64:])
    return model


def _from_numpy():
    model = net()
    model[0].fc.weight = nn.Parameter(torch.from_numpy(np.random.randn(8, 8).astype("float32")))
    return model


class Compressed(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("graph", torch.eye(8).to_sparse_csr())
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head((self.graph @ x.t()).t())


class SparseParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.head = nn.Parameter(torch.eye(8).to_sparse()), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(torch.sparse.mm(self.mix, x.t()).t())


@pytest.mark.parametrize("make", [_flat, _from_numpy, Compressed, SparseParameter], ids=lambda make: make.__name__)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_storages_of_parameters_and_buffers(make):
    model = make()
    found = rows(model, strategies={"micro": MICRO})
    assert found["micro"].equivalent
    held = found["baseline"].trace.by_category("forward")
    parts = [part for p in (*model.parameters(), *model.buffers()) for part in _dense_parts(p)]
    storages = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}
    assert held["parameters"] + held.get("buffers", 0) == sum(storages.values())
    assert "other" not in found["baseline"].trace.by_category()


def _dense_parts(tensor):
    if tensor.layout is torch.sparse_coo:
        return [tensor.detach()._indices(), tensor.detach()._values()]
    if tensor.layout is torch.sparse_csr:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor]


@pytest.mark.parametrize("expanded", [False, True])
def test_a_batch_counts_the_storage_that_it_is(expanded):
    data = torch.randn(1, 9).expand(8, 9) if expanded else torch.randn(8, 9)
    batch = data[:, :8], (data[:, 8] > 0).long()
    found = rows(net(), batch=batch)
    assert all(row.equivalent for row in found.values())
    held = found["baseline"].trace.by_category("forward")["batch"]
    assert held == data.untyped_storage().nbytes() + batch[1].nbytes


def test_what_an_in_place_write_to_a_view_saves_is_assumed_and_said():
    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 64), nn.Linear(8, 64)

        def forward(self, x):
            h = self.a(x) * 1
            h[:, :32].mul_(self.b(x)[:, 32:].exp())
            return h

    model, batch = Halves(), (torch.randn(16, 8), torch.zeros(16, 64))
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        F.mse_loss(model(batch[0]), batch[1])
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *batch)}
    seen = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in packed}
    found = rows(model, nn.MSELoss(), batch)["baseline"]
    assert found.saved_bytes == sum(nbytes for address, nbytes in seen.items() if address not in own)
    assert "an in-place write to a view (CopySlices) shows nobody what it saved: 2.00 KiB" in told(found)
    assert any("CopySlices" in sentence for sentence in found.trace.absent)


def test_earlier_losses_let_go_of_their_elements():
    """`mse_loss` leaves a storage of all elements behind its scalar; a loop gives its variable `loss` anew."""
    model, (x, y) = net(), (torch.randn(64, 8), torch.randn(64, 4))
    loss_fn = nn.MSELoss(reduction="sum")

    def loop():
        for xs, ys in zip(x.split(8), y.split(8), strict=True):
            loss = loss_fn(model(xs), ys)
            loss.backward()
        for parameter in model.parameters():
            parameter.grad = None
        del loss

    loop()
    step = memlab.TrainingStep(model, (x, y), loss_fn, reduction="sum")
    peak = memlab.measure(step, MicroBatch(size=8)).peak_bytes
    numbers = 7 * 4  # what memlab keeps of the earlier ones
    assert peak - numbers == sum(p.nbytes for p in model.parameters()) + x.nbytes + y.nbytes + allocator_peak(loop)


def test_what_is_saved_on_the_cpu_is_copies():
    def offloaded(self, x):
        with torch.autograd.graph.save_on_cpu():
            return x * x.sigmoid()

    plain, model = rows(net(middle(lambda self, x: x * x.sigmoid()))), net(middle(offloaded))
    found = rows(model)
    assert all(row.equivalent for row in found.values())
    trace = found["baseline"].trace
    packed = [tensor for tensor in trace.saved if tensor.state == "offloaded"]
    assert sum(tensor.nbytes for tensor in packed) == 2 * 3 * 8 * 8 * 4  # x, and the sigmoid twice
    assert trace.saved_bytes >= plain["baseline"].saved_bytes


# -- modules of every kind ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make", [torch.jit.script, lambda model: torch.jit.trace(model, pair()[0])], ids=["script", "trace"]
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript(make):
    plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    before = [parameter.detach().clone() for parameter in plain.parameters()]
    eager = rows(plain, strategies={"micro": MICRO})["baseline"].saved_bytes
    model = make(plain)
    strategies = {"ckpt": Checkpoint("0"), "micro": MICRO, "pure": LowPrecision("bf16"), "amp": MixedPrecision("bf16")}
    found = rows(model, strategies=strategies)
    assert found["micro"].equivalent
    assert found["micro"].proof == "float64"
    assert "is a ScriptModule, whose forward cannot be replaced" in found["ckpt"].error
    assert "TorchScript (DifferentiableGraphBackward) shows nobody what it saved" in told(found["amp"])
    assert found["baseline"].saved_bytes == eager  # alive and explained by nothing else
    assert all(map(torch.equal, plain.parameters(), before))


def test_modules_compiled_in_place_are_checkpointed():
    torch._dynamo.reset()
    model = net()
    model[0].compile(backend="eager")
    found = rows(model)
    assert "runs compiled" in told(found["baseline"])
    assert all(row.equivalent for row in found.values())
    torch._dynamo.reset()


def test_a_block_whose_parameters_are_replaced_for_the_call():
    """`functional_call` puts them back before the recomputation: PyTorch's gradients are wrong then."""
    model = net()

    def loss(model, batch):
        scaled = {name: 1.1 * parameter for name, parameter in model.named_parameters()}
        return F.cross_entropy(torch.func.functional_call(model, scaled, (batch[0],)), batch[1])

    found = rows(model, loss)
    assert found["micro"].equivalent
    assert found["ckpt"].equivalent is False


def test_hooks_of_ones_own_run_and_leave_nothing():
    model, seen = net(), []
    model[1].register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0].norm()))
    model[0].fc.register_forward_hook(lambda module, inputs, output: seen.append(output))
    assert all(row.equivalent for row in rows(model).values())
    assert seen == []


def test_a_block_that_is_called_by_another_name_is_noted():
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.head = Block(), Block(), nn.Linear(8, 4)

        def forward(self, x):
            return self.head(self.b.middle(self.b.fc(self.a(x))))

    row = rows(Encoder(), strategies={"ckpt": Checkpoint(("a", "b"))})["ckpt"]
    assert row.equivalent
    assert "Checkpoint matched b, but the forward pass never called it" in row.notes


@pytest.mark.parametrize(
    "edit", [torch.relu_, lambda x: x.mul_(2), lambda x: x.__iadd__(1)], ids=["relu", "mul", "add"]
)
@pytest.mark.parametrize("first", [True, False])
def test_a_block_that_edits_its_input_is_named(first, edit):
    class Editing(Block):
        def forward(self, x):
            return self.fc(edit(x)).tanh()

    model = (
        nn.Sequential(Editing(), nn.Linear(8, 4))
        if first
        else nn.Sequential(nn.Linear(8, 8), Editing(), nn.Linear(8, 4))
    )
    name = "0" if first else "1"
    found = rows(model, strategies={"ckpt": Checkpoint(name), "segments": Checkpoint(segments=1), "micro": MICRO})
    assert found["ckpt"].error.startswith(f"{name} edits its own input, a tensor of shape (8, 8), in place")
    if first:
        assert found["segments"].error.startswith("Sequential, children 0 to 1, edits its own input")
    assert found["micro"].equivalent


def test_an_input_that_is_edited_after_the_block():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            copying = nn.Sequential(middle(torch.clone)(), Block())
            copying[0].fc = nn.Identity()
            self.stem, self.block, self.head = nn.Linear(8, 8), copying, nn.Linear(8, 4)

        def forward(self, x):
            x = self.stem(x)
            y = self.block(x)
            x += y  # plain PyTorch has no need of the old x: the block begins with a copy
            return self.head(x)

    row = rows(Residual(), strategies={"ckpt": Checkpoint("block")})["ckpt"]
    assert row.error.startswith("the input of a checkpointed block is edited in place after it ran")
    assert "write x = x + y for x += y" in row.error


# -- custom autograd functions -----------------------------------------------------------------------------------------


class Saving(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0]


class OnContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.kept = {"y": [x.exp()]}
        return ctx.kept["y"][0].clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.kept["y"][0]


class SetUp(torch.autograd.Function):
    @staticmethod
    def forward(x):
        y = x.exp()
        return y, y > 1

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[0])

    @staticmethod
    def backward(ctx, gradient, _):
        return gradient * ctx.saved_tensors[0]


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x.exp_())
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0]


@pytest.mark.parametrize("function", [Saving, OnContext, SetUp, Dirty], ids=lambda function: function.__name__)
def test_custom_functions(function):
    def apply(self, x):
        out = function.apply(x)
        return out[0] if isinstance(out, tuple) else out

    model, batch = net(middle(apply)), pair()
    twin = net(middle(lambda self, x: x.exp()))
    twin.load_state_dict(model.state_dict())
    found = rows(model, batch=batch, strategies={"ckpt": CHECKPOINT, "micro": MICRO, "early": OptimizerInBackward()})
    assert all(row.equivalent for row in found.values())
    assert found["ckpt"].gradient_difference == 0
    builtin = rows(twin, batch=batch)
    assert found["baseline"].saved_bytes == builtin["baseline"].saved_bytes
    hidden = 2 * 8 * 8 * 4 if function is OnContext else 0  # from hooks, and so from checkpointing: it is kept
    assert found["ckpt"].saved_bytes == builtin["ckpt"].saved_bytes + hidden


def test_a_kernel_for_float32_alone():
    class Single(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            if x.dtype != torch.float32:
                raise TypeError("kernel is float32 only")
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    strategies = {"ckpt": CHECKPOINT, "micro": MICRO, "amp": MixedPrecision("bf16"), "pure": LowPrecision("bf16")}
    found = rows(net(middle(lambda self, x: Single.apply(x))), strategies=strategies)
    for row in (found["ckpt"], found["micro"]):
        assert row.equivalent
        assert row.proof == "same precision"
        assert "a float64 copy cannot run (TypeError: kernel is float32 only)" in told(row)
    assert found["amp"].error == found["pure"].error == "TypeError: kernel is float32 only"


# -- precision ---------------------------------------------------------------------------------------------------------


def test_what_a_forward_pass_makes_is_in_the_proofs_precision():
    found = rows(net(middle(lambda self, x: x @ torch.eye(8) + torch.tensor(0.1))))
    assert {row.proof for row in found.values()} == {"float64"}
    assert torch.get_default_dtype() is torch.float32


def test_what_does_not_run_in_low_precision_says_why():
    strategies = {"pure": LowPrecision("bf16"), "amp": MixedPrecision("bf16")}
    found = rows(net(middle(lambda self, x: x @ torch.eye(8))), strategies=strategies)
    assert "makes or holds tensors of its own in another type" in found["pure"].error
    assert "MixedPrecision('bf16')" in found["pure"].error
    assert found["amp"].equivalent


def test_autocast_where_float64_cannot_run_is_not_proven():
    def single(self, x):
        if x.dtype == torch.float64:
            raise TypeError("no doubles here")
        return x

    row = rows(net(middle(single)), strategies={"amp": MixedPrecision("bf16")})["amp"]
    assert row.equivalent is None
    assert row.proof == "none"
    assert "not proven: a float64 copy, which could tell, cannot run" in told(row)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_low_precision_sums_gradients_in_it(dtype):
    x, target = pair()
    strategies = {"micro": MicroBatch(count=8), "fp16": MixedPrecision("fp16")}
    found = rows(net().to(dtype), batch=(x.to(dtype), target), strategies=strategies)
    assert found["micro"].equivalent  # in float64
    name = str(dtype).removeprefix("torch.")
    assert f"gradients are summed up in {name}, which rounds at each addition: see their error" in found["micro"].notes
    assert found["micro"].gradient_error > 1e-4
    if dtype is torch.float16:
        assert "loss scaling needs float32 parameters" in found["fp16"].error


def test_clipping_and_loss_scaling_on_micro_batches():
    def clipped(parameters):
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(parameters, 0.1) and None)
        return optimizer

    strategies = {
        "fp16": MixedPrecision("fp16"),
        "both": MixedPrecision("fp16") + MICRO,
        "early": OptimizerInBackward(),
    }
    found = rows(net(), optimizer=clipped, strategies=strategies)
    assert found["fp16"].equivalent
    assert found["both"].equivalent
    assert "such as clipping by global norm" in found["early"].error
    assert all(row.trace.by_category().get("other", 0) == 0 for row in found.values() if row.trace)


def test_a_scheduler_that_the_optimizer_steps_is_put_back():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    assert all(row.equivalent for row in rows(model, optimizer=optimizer).values())
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert scheduler.last_epoch == 0


def test_partials_are_criteria_too():
    smoothed = functools.partial(F.cross_entropy, label_smoothing=0.1)
    assert all(row.equivalent for row in rows(net(), smoothed).values())
