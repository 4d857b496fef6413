"""The verdicts, against gradients that are computed here by hand."""

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memlab
from memlab import zoo
from memlab.measure import Stage
from memlab.proof import Prover

SAMPLES = 8


def _step(model, batch=None, loss_fn=None, optimizer=torch.optim.AdamW, **options):
    batch = batch or (torch.randn(SAMPLES, 8), torch.arange(SAMPLES) % 4)
    return memlab.TrainingStep(model, batch, loss_fn or nn.CrossEntropyLoss(), optimizer, **options)


def _verdicts(step, *strategies):
    """The plain step's verdict on itself, then each strategy's."""
    with Stage(step) as stage, Prover(stage).ready() as prover:
        return [prover.verdict(strategy) for strategy in (memlab.Baseline(), *strategies)]


def _chain(*middle):
    """Two repeated blocks, which Checkpoint() finds."""
    return nn.Sequential(
        nn.Sequential(nn.Linear(8, 8), *copy.deepcopy(middle), nn.Tanh()),
        nn.Sequential(nn.Linear(8, 8), *copy.deepcopy(middle), nn.Tanh()),
        nn.Linear(8, 4),
    )


def _gradients(model, *losses):
    """The gradients of several losses' sum, by name."""
    model.zero_grad()
    for loss in losses:
        loss().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def _apart(found, truth):
    return max(float((found[name] - g).norm() / g.norm()) for name, g in truth.items())


CHECKPOINT, MICRO, BOTH = (
    memlab.Checkpoint(),
    memlab.MicroBatch(count=4),
    memlab.Checkpoint() + memlab.MicroBatch(count=4),
)


def test_checkpointing_is_identical_with_dropout_too():
    plain, verdict = _verdicts(_step(_chain(nn.Dropout(0.5))), CHECKPOINT)
    assert (verdict.equivalent, verdict.proof) == (True, "float64")
    assert verdict.loss_difference == verdict.gradient_difference == 0.0
    assert verdict.gradient_error == plain.gradient_error
    assert verdict.notes == ()


@pytest.mark.parametrize(
    "make",
    [lambda: zoo.gpt_step(batch=4, context=16, width=32, depth=2, heads=2), lambda: _step(_chain(nn.LayerNorm(8)))],
)
def test_micro_batches_agree_to_rounding(make):
    plain, micro, both = _verdicts(make(), memlab.MicroBatch(count=2), memlab.Checkpoint() + memlab.MicroBatch(count=2))
    for verdict in (micro, both):
        assert verdict.equivalent
        assert verdict.gradient_difference <= 1e-12
        assert verdict.loss_difference <= 1e-12
        assert verdict.gradient_error <= 3 * plain.gradient_error  # no more than the plain step's own noise
    assert 0 < plain.gradient_error < 1e-5


def test_batchnorm_is_told_from_the_same_model_and_named():
    model = _chain()
    model[1].insert(1, nn.BatchNorm1d(8))
    _, checkpointed, micro, both = _verdicts(_step(model), CHECKPOINT, MICRO, BOTH)
    buffers = ("1.1.num_batches_tracked", "1.1.running_mean", "1.1.running_var")
    for verdict in (checkpointed, micro, both):
        assert verdict.equivalent is False
        assert verdict.buffer_differences == buffers
        assert any("1.1 (BatchNorm1d)" in note for note in verdict.notes)
    assert checkpointed.gradient_difference == 0.0
    assert any("recomputation is one more" in note for note in checkpointed.notes)
    assert micro.gradient_difference > 1e-3
    assert any("normalises over each micro-batch, not over the batch" in note for note in micro.notes)
    assert all(verdict.equivalent for verdict in _verdicts(_step(model.eval()), CHECKPOINT, MICRO))


def _ragged_tokens():
    """1 to 5 of 6 tokens of each sample count."""
    targets = torch.randint(0, 4, (SAMPLES, 6))
    for sample in range(SAMPLES):
        targets[sample, sample % 5 + 1 :] = -100
    return torch.randn(SAMPLES, 6, 8), targets


def _token_loss(model, batch):
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def test_masked_tokens_are_exact_with_weights_and_without_them_off_by_so_much():
    model, (tokens, targets) = nn.Linear(8, 4).double(), _ragged_tokens()
    tokens = tokens.double()
    parts = list(zip(tokens.split(2), targets.split(2), strict=True))
    truth = _gradients(model, lambda: _token_loss(model, (tokens, targets)))
    mean_of_means = _gradients(model, *[lambda part=part: _token_loss(model, part) / 4 for part in parts])
    _, without = _verdicts(_step(model, (tokens, targets), _token_loss), MICRO)
    assert without.equivalent is False
    assert without.gradient_difference == pytest.approx(_apart(mean_of_means, truth), rel=1e-6)
    assert any(f"{without.gradient_difference:.2g} relative" in note for note in without.notes)
    assert any("targets of -100" in note and "weight=" in note for note in without.notes)
    _, weighted = _verdicts(
        _step(model, (tokens, targets), _token_loss, weight=lambda batch: (batch[1] != -100).sum()), MICRO
    )
    assert weighted.equivalent
    assert weighted.gradient_difference <= 1e-12


def test_a_loss_that_couples_samples_or_sums_them_is_told():
    def contrastive(model, batch):
        one, two = (F.normalize(model(view), dim=-1) for view in batch)
        return F.cross_entropy(one @ two.T, torch.arange(len(one)))

    for loss_fn, options, same in (
        (contrastive, {}, False),
        (lambda model, batch: model(batch[0]).square().sum(), {}, False),
        (lambda model, batch: model(batch[0]).square().sum(), {"reduction": "sum"}, True),
    ):
        _, verdict = _verdicts(
            _step(nn.Linear(8, 4), (torch.randn(8, 8), torch.randn(8, 8)), loss_fn, **options), MICRO
        )
        assert verdict.equivalent is same
        assert same or any("not a mean over independent samples" in note for note in verdict.notes)


def test_dropout_over_micro_batches_is_the_same_in_the_mean_and_the_note_says_so():
    _, verdict = _verdicts(_step(_chain(nn.Dropout(0.5))), MICRO)
    assert verdict.equivalent
    assert any("draw other masks" in note and "replaced by its mean they agree" in note for note in verdict.notes)


@pytest.mark.parametrize(
    "draw", [torch.rand_like, torch.randn_like, lambda x: torch.bernoulli(torch.full_like(x, 0.3))]
)
def test_other_noise_over_micro_batches_too(draw):
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x):
            return self.layer(x + draw(x) * draw(x))  # in turns, so that micro-batches draw in another order

    _, verdict = _verdicts(_step(Noisy()), MICRO)
    assert verdict.equivalent
    assert any("draw other masks" in note for note in verdict.notes)


def test_a_difference_is_not_hidden_behind_dropout():
    _, verdict = _verdicts(_step(_chain(nn.Dropout(0.5), nn.BatchNorm1d(8))), MICRO)
    assert verdict.equivalent is False
    assert any("BatchNorm" in note for note in verdict.notes)


def test_the_optimizer_in_backward_updates_alike():
    for optimizer in (torch.optim.AdamW, lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)):
        _, verdict = _verdicts(_step(_chain(), optimizer=optimizer), memlab.OptimizerInBackward())
        assert (verdict.equivalent, verdict.gradient_difference) == (True, 0.0)


def test_an_optimizer_that_is_given_something_else_to_do_is_told():
    """Half a step for each parameter alone, all at once a whole one."""

    class ByCount(torch.optim.SGD):
        def step(self):
            for group in self.param_groups:
                group["lr"] = 0.1 * len(group["params"])
            super().step()

    _, verdict = _verdicts(_step(_chain(), optimizer=lambda p: ByCount(p, lr=0.1)), memlab.OptimizerInBackward())
    assert verdict.equivalent is False
    assert verdict.gradient_difference == 0.0
    assert any("gradients agree but the updated parameters are" in note for note in verdict.notes)


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, lambda p: torch.optim.SGD(p, lr=0.1)])
def test_noise_where_mathematics_has_zero_is_no_difference(optimizer):
    """The bias of an attention's keys: all that it and its updates ever hold is rounding."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v, self.head = (
                nn.Linear(16, 16),
                nn.Linear(16, 16),
                nn.Linear(16, 16),
                nn.Linear(16, 4),
            )
            nn.init.zeros_(self.k.bias)

        def forward(self, x):
            q, k, v = (layer(x).unsqueeze(1) for layer in (self.q, self.k, self.v))
            return self.head(F.scaled_dot_product_attention(q, k, v).squeeze(1).mean(1))

    step = _step(Attention(), (torch.randn(SAMPLES, 6, 16), torch.arange(SAMPLES) % 4), optimizer=optimizer)
    _, verdict = _verdicts(step, MICRO)
    assert verdict.equivalent


def test_low_precision_rounds_and_is_measured_by_its_error():
    _, *verdicts = _verdicts(
        _step(_chain()), memlab.MixedPrecision("bf16"), memlab.MixedPrecision("fp16"), memlab.LowPrecision("bf16"),
        memlab.LowPrecision("bf16") + MICRO,
    )  # fmt: skip
    autocast, half, pure, combined = verdicts
    assert autocast.equivalent
    assert half.equivalent
    assert pure.equivalent is combined.equivalent is None
    for verdict in (autocast, half, combined):
        assert verdict.proof == "float64"
        assert verdict.gradient_difference <= 1e-12
    assert pure.proof == "none"  # nothing but precision is changed
    assert pure.gradient_difference is None
    assert 1e-3 < autocast.gradient_error < 0.1
    assert half.gradient_error < autocast.gradient_error  # three more bits
    assert 1e-3 < pure.gradient_error < 0.1
    assert any("low precision is left out" in note for note in pure.notes)


def test_the_gradient_error_is_that_of_the_gradient():
    step = _step(_chain())
    truth_model = copy.deepcopy(step.model).double()
    inputs, targets = step.batch
    truth = _gradients(truth_model, lambda: F.cross_entropy(truth_model(inputs.double()), targets))
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(step.model(inputs), targets)
    rounded = _gradients(step.model, lambda: loss)
    _, verdict = _verdicts(step, memlab.MixedPrecision("bf16"))
    assert verdict.gradient_error == pytest.approx(_apart({n: g.double() for n, g in rounded.items()}, truth), rel=1e-3)


# -- models that float64 does not reach --------------------------------------------------------------------------------


class Inner(nn.Module):
    """Computes its first layer in a type of its own."""

    def __init__(self, dtype):
        super().__init__()
        self.one, self.two, self.dtype = nn.Linear(8, 8), nn.Linear(8, 4), dtype

    def forward(self, x):
        return self.two(F.linear(x.to(self.dtype), self.one.weight.to(self.dtype)).to(self.two.weight.dtype))


def test_parts_in_float32_are_compared_within_its_rounding():
    _, micro, checkpointed = _verdicts(_step(Inner(torch.float32)), MICRO, memlab.Checkpoint("one"))
    assert (micro.equivalent, micro.proof) == (True, "same precision")
    assert any("rounding of float32, in which parts" in note for note in micro.notes)
    assert (checkpointed.equivalent, checkpointed.proof) == (True, "float64")  # identical needs no allowance


def test_parts_in_half_precision_hide_too_much_to_prove_anything():
    tokens, targets = torch.randn(SAMPLES, 6, 8), torch.randint(0, 4, (SAMPLES, 6))
    targets[0, :3] = -100
    step = _step(Inner(torch.bfloat16), (tokens, targets), _token_loss)
    _, micro, checkpointed = _verdicts(step, MICRO, memlab.Checkpoint("one"))
    assert micro.gradient_difference > 0.01  # a real difference: a mean of means
    assert micro.equivalent is None
    assert any("not proven: such coarse rounding" in note for note in micro.notes)
    assert checkpointed.equivalent


class Single(nn.Module):
    def __init__(self, *middle):
        super().__init__()
        self.chain = _chain(*middle)

    def forward(self, x):
        if x.dtype == torch.float64:
            raise TypeError("single precision only")
        return self.chain(x)


def test_where_float64_cannot_run_the_same_precision_decides():
    verdicts = _verdicts(_step(Single()), CHECKPOINT, MICRO)
    for verdict in verdicts:
        assert (verdict.equivalent, verdict.proof) == (True, "same precision")
        assert verdict.gradient_error is None
        assert any("float64 copy cannot run (TypeError: single precision only)" in note for note in verdict.notes)
    assert verdicts[1].gradient_difference == 0.0
    assert 0 < verdicts[2].gradient_difference < 1e-5
    _, checkpointed, micro = _verdicts(_step(Single(nn.BatchNorm1d(8))), CHECKPOINT, MICRO)
    assert checkpointed.equivalent is micro.equivalent is False


def test_a_step_that_cannot_be_copied_is_compared_as_it_is():
    class Uncopyable(nn.Linear):
        def __deepcopy__(self, memo):
            raise RuntimeError("one of a kind")

    _, verdict = _verdicts(_step(Uncopyable(8, 4)), MICRO)
    assert (verdict.equivalent, verdict.proof) == (True, "same precision")
    assert any("one of a kind" in note for note in verdict.notes)


def test_randomness_outside_torch_is_told():
    class Jumps(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            return (self.layer(x) * random.random()).exp()

    model = nn.Sequential(Jumps(), nn.Linear(8, 4))
    _, verdict = _verdicts(_step(model), memlab.Checkpoint("0"))
    assert verdict.equivalent is False
    assert any("random numbers from numpy or Python's random" in note for note in verdict.notes)


def test_a_gradient_that_is_no_number_is_never_the_same():
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.scale = nn.Linear(8, 4), nn.Parameter(torch.zeros(1))

        def forward(self, x):
            return self.layer(x) + (self.scale.abs() - self.scale.abs()).sqrt()  # 0/0 in backward alone

    plain, verdict = _verdicts(_step(Root()), MICRO)
    assert plain.equivalent is verdict.equivalent is False
    assert any("the gradient of scale is NaN" in note for note in verdict.notes)


def test_a_parameter_that_one_step_leaves_out_is_told():
    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x):
            return (self.one if len(x) == SAMPLES else self.two)(x)

    _, verdict = _verdicts(_step(Routed()), MICRO)
    assert verdict.equivalent is False
    assert any("a gradient in one step and none in the other" in note for note in verdict.notes)
