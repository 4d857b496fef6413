"""Counted operations, against PyTorch's own counter and against closed formulas."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import memlab
from memlab import zoo
from memlab.flops import FlopCounter


def _counted(run):
    with FlopCounter() as counter:
        run()
    return counter.total


def _torchs(run):
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.ones(3, 8)),
        (nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 4, 1)), torch.ones(2, 3, 9, 9)),
        (nn.ConvTranspose2d(3, 8, 3, stride=2), torch.ones(2, 3, 5, 5)),
        (nn.RNNCell(4, 8), torch.ones(5, 4)),
    ],
    ids=["linear", "convolutions", "transposed", "recurrent cell"],
)
def test_what_torch_counts_too(model, x):
    def run():
        model(x).sum().backward()

    assert _counted(run) == _torchs(run) > 0


def test_a_chain_by_hand():
    x, a, b = torch.ones(4, 8), torch.ones(8, 16, requires_grad=True), torch.ones(16, 2, requires_grad=True)
    forward = 2 * 4 * 8 * 16 + 2 * 4 * 16 * 2
    assert _counted(lambda: (x @ a) @ b) == forward
    # Backward: both weights' gradients, and the gradient of what lies between; none of the input's.
    assert _counted(lambda: ((x @ a) @ b).sum().backward()) == 2 * forward + 2 * 4 * 16 * 2


@pytest.mark.parametrize("causal", [False, True])
def test_attention_by_its_formula(causal):
    batch, heads, tokens, others, width = 2, 3, 16, 24, 8
    others = tokens if causal else others
    shapes = (tokens, others, others)
    q, k, v = (torch.rand(batch, heads, length, width, requires_grad=True) for length in shapes)
    product = 2 * batch * heads * tokens * others * width  # of queries and keys; and of weights and values

    def run(backward):
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        if backward:
            out.sum().backward()

    assert _torchs(lambda: run(False)) == 0  # what PyTorch leaves out on CPU
    assert _counted(lambda: run(False)) == 2 * product
    # Backward: the product of queries and keys again, and two products for each of the two.
    assert _counted(lambda: run(True)) == 2 * product + 5 * product


def test_recurrent_layers_by_their_formula():
    tokens, batch, inputs, hidden, layers = 5, 3, 4, 8, 2
    lstm = nn.LSTM(inputs, hidden, num_layers=layers)
    x = torch.rand(tokens, batch, inputs)
    gates = 4 * hidden
    forward = 2 * tokens * batch * gates * ((inputs + hidden) + (hidden + hidden))
    assert _counted(lambda: lstm(x)[0]) == forward
    with_backward = _counted(lambda: lstm(x)[0].sum().backward())
    assert 2.5 * forward <= with_backward <= 3 * forward  # the first layer's input needs no gradient


@pytest.mark.parametrize(
    ("make", "low", "high"),
    [
        (lambda: zoo.gpt_step(batch=2, context=32, width=64, depth=4, heads=2), 1.20, 1.28),
        (lambda: zoo.resnet_step(batch=4, width=8, depth=4), 1.28, 1.34),
    ],
    ids=["pre-norm transformer", "residual CNN"],
)
def test_recomputation_costs_a_third_at_most(make, low, high):
    def flops(strategy):
        with strategy.applied(make()) as runner:
            return _counted(runner.run)

    plain = flops(memlab.Baseline())
    assert low <= flops(memlab.Checkpoint()) / plain <= high
    assert flops(memlab.MicroBatch(count=2)) == plain
