"""The shared networks are what they say: shapes, causality, seeds; and they learn from the shared data."""

import math
import random
import sys
from pydoc_data.topics import topics

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from memlab import zoo
from memlab.errors import MemlabError

STEPS = {
    "gpt": (zoo.gpt_step, zoo.gpt_loss, {"batch": 4, "context": 32, "width": 32, "depth": 2, "heads": 2}, 256),
    "lstm": (zoo.lstm_step, zoo.gpt_loss, {"batch": 4, "context": 32, "width": 32, "depth": 2}, 256),
    "resnet": (zoo.resnet_step, zoo.classification_loss, {"batch": 32, "width": 8, "depth": 2}, 10),
    "mlp": (zoo.mlp_step, zoo.classification_loss, {"batch": 32, "width": 32, "depth": 3}, 10),
}
every_step = pytest.mark.parametrize(("make", "loss_fn", "sizes", "classes"), STEPS.values(), ids=STEPS)


@every_step
def test_logits_have_one_value_a_class(make, loss_fn, sizes, classes):
    step = make(**sizes)
    inputs, targets = step.batch
    assert step.model(inputs).shape == (*targets.shape, classes)


@every_step
def test_the_first_guess_is_close_to_chance(make, loss_fn, sizes, classes):
    step = make(**sizes)
    assert loss_fn(step.model, step.batch).item() == pytest.approx(math.log(classes), rel=0.1)


@every_step
def test_one_training_step_lowers_the_loss(make, loss_fn, sizes, classes):
    step = make(**sizes)
    optimizer = torch.optim.AdamW(step.model.parameters())
    before = loss_fn(step.model, step.batch)
    before.backward()
    assert all(p.grad is not None for p in step.model.parameters())
    optimizer.step()
    assert loss_fn(step.model, step.batch) < before


@every_step
def test_the_seed_decides_weights_and_data(make, loss_fn, sizes, classes):
    first, again, other = make(**sizes), make(**sizes), make(**sizes, seed=1)
    weights, weights_again, weights_other = (
        torch.cat([p.flatten() for p in step.model.parameters()]) for step in (first, again, other)
    )
    assert torch.equal(weights, weights_again)
    assert not torch.equal(weights, weights_other)
    assert all(torch.equal(a, b) for a, b in zip(first.batch, again.batch, strict=True))
    assert not torch.equal(first.batch[0], other.batch[0])


@every_step
def test_building_draws_nothing_from_the_global_random_streams(make, loss_fn, sizes, classes):
    state, python_state, numpy_state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    make(**sizes)
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python_state
    assert np.random.get_state()[1].tolist() == numpy_state


def test_gpt_has_as_many_parameters_as_the_formula():
    vocab, context, width, depth = 100, 16, 24, 3
    model = zoo.GPT(vocab=vocab, context=context, width=width, depth=depth, heads=2)
    per_block = 12 * width**2 + 13 * width  # 4 W² + 4 W attention, 8 W² + 5 W MLP, 4 W norms
    expected = 2 * vocab * width + context * width + depth * per_block + 2 * width
    assert sum(p.numel() for p in model.parameters()) == expected


def test_gpt_can_share_its_embedding_with_its_head():
    tied = zoo.GPT(tied=True)
    assert tied.head.weight is tied.tokens.weight
    assert zoo.GPT().head.weight is not zoo.GPT().tokens.weight


def test_gpt_does_not_see_later_tokens():
    model = zoo.GPT(context=16, width=32, depth=2).eval()
    tokens = torch.randint(256, (2, 16))
    changed = tokens.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.isclose(before[:, 10:], after[:, 10:]).all(dim=-1).any()


def test_attention_is_the_textbook_sum():
    attention = zoo.Attention(width=8, heads=2, dropout=0.0)
    x = torch.randn(1, 5, 8)
    queries, keys, values = attention.qkv(x)[0].split(8, dim=-1)
    mixed = torch.zeros(5, 8)
    for head in (slice(0, 4), slice(4, 8)):
        for t in range(5):
            weights = (keys[: t + 1, head] @ queries[t, head] / math.sqrt(4)).softmax(0)
            mixed[t, head] = weights @ values[: t + 1, head]
    torch.testing.assert_close(attention(x)[0], attention.proj(mixed))


def test_a_width_that_does_not_divide_into_heads_is_refused():
    with pytest.raises(MemlabError, match="width of 30 does not divide into 4 heads: choose a multiple of 4"):
        zoo.GPT(width=30, heads=4)


def test_dropout_acts_in_training_only():
    model, tokens = zoo.GPT(context=8, width=16, depth=1, dropout=0.5), torch.randint(256, (1, 8))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize("network", [zoo.GPT, zoo.ResNet, zoo.MLP])
def test_blocks_are_children_of_one_class(network):
    model = network(depth=3)
    blocks = model.layers if network is zoo.MLP else model.blocks
    assert len(blocks) == 3
    assert len({type(block) for block in blocks}) == 1


def test_text_is_the_manual_and_targets_come_one_later():
    inputs, targets = zoo.text_batch(3, 40)
    manual = "\n".join(topics.values()).encode()
    assert inputs.shape == targets.shape == (3, 40)
    assert inputs.dtype == targets.dtype == torch.int64
    for passage, target in zip(inputs.tolist(), targets.tolist(), strict=True):
        assert bytes(passage) + bytes(target[-1:]) in manual
        assert passage[1:] == target[:-1]


def test_digits_are_scikit_learns_with_their_labels():
    images, labels = zoo.digits_batch(2000)
    assert images.shape == (2000, 1, 8, 8)
    assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
    assert images.min() == 0
    assert images.max() == 1
    digits = load_digits()
    known = {(tuple(x.astype(int)), y) for x, y in zip(digits.data, digits.target, strict=True)}
    drawn = zip((images.flatten(1) * 16).int().tolist(), labels.tolist(), strict=True)
    assert all((tuple(x), y) in known for x, y in drawn)


@pytest.mark.parametrize("batch", [zoo.text_batch(4, 16), zoo.digits_batch(4)], ids=["text", "digits"])
def test_a_batch_owns_just_its_own_bytes(batch):
    for tensor in batch:
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    assert batch[0].untyped_storage().data_ptr() != batch[1].untyped_storage().data_ptr()


def test_without_scikit_learn_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MemlabError, match="pip install scikit-learn"):
        zoo.digits_batch(4)


def test_the_optimizer_can_be_chosen():
    step = zoo.mlp_step(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), depth=1)
    assert isinstance(step.optimizer, torch.optim.SGD)
