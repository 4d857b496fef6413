"""The code that a strategy writes, run as it stands, trains what the strategy trains."""

import ast
import dataclasses
import functools
import importlib.util
import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memlab.errors import MemlabError
from memlab.step import TrainingStep
from memlab.strategies import (
    Baseline,
    Checkpoint,
    LowPrecision,
    MicroBatch,
    MixedPrecision,
    OptimizerInBackward,
)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(5, 8), nn.Linear(8, 3)
        self.blocks = nn.Sequential(*[Block() for _ in range(4)])

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)))


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def keeps(operator):
    return "addmm" in str(operator)


STRATEGIES = [
    Baseline(),
    Checkpoint(),
    Checkpoint("blocks.*"),
    Checkpoint(("blocks.0", "blocks.?")),
    Checkpoint(segments=3),
    Checkpoint("blocks.*", segments=4),
    Checkpoint("blocks", segments=1, save=["aten.addmm"]),
    Checkpoint(save=["mm", "aten.addmm.default"]),
    Checkpoint(save=keeps),
    MicroBatch(count=4),
    MicroBatch(size=4),
    MixedPrecision("bf16"),
    MixedPrecision("fp16"),
    LowPrecision("bf16"),
    OptimizerInBackward(),
    Checkpoint() + MicroBatch(count=4),
    Checkpoint("blocks.*") + MicroBatch(size=3) + MixedPrecision("fp16"),
    Checkpoint() + MixedPrecision("bf16") + OptimizerInBackward(),
    Checkpoint(segments=2) + LowPrecision("bf16") + OptimizerInBackward(),
    MicroBatch(count=3) + LowPrecision("bf16"),
]


def build():
    torch.manual_seed(0)
    model = Net()
    loader = [(torch.randn(10, 5), torch.arange(10) % 3) for _ in range(2)]
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1), loader


def forwards(model, run):
    """How often each block's first layer ran."""
    counts = [0] * len(model.blocks)
    handles = [
        block.up.register_forward_hook(lambda *_, number=number: counts.__setitem__(number, counts[number] + 1))
        for number, block in enumerate(model.blocks)
    ]
    run()
    for handle in handles:
        handle.remove()
    return counts


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_the_pytorch_code_does_what_the_strategy_does(strategy):
    model, optimizer, loader = build()
    names = {"model": model, "optimizer": optimizer, "loader": loader, "loss_fn": loss_fn, "keeps": keeps}
    by_code = forwards(model, lambda: exec(strategy.to_code("pytorch"), names))

    expected, optimizer, loader = build()
    step = TrainingStep(expected, loader[0], loss_fn, optimizer)
    with strategy.applied(step) as runner:

        def steps():
            runner.run()
            for tensor, new in zip(step.batch, loader[1], strict=True):  # the same tensors: slices are views of them
                tensor.copy_(new)
            runner.run()

        by_runner = forwards(expected, steps)
        assert by_code == by_runner
        for (name, one), other in zip(model.named_parameters(), expected.parameters(), strict=True):
            assert one.dtype == other.dtype
            assert torch.allclose(one, other, rtol=1e-6, atol=1e-6), name
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("framework", ["pytorch", "transformers", "lightning"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_every_text_compiles_and_ends_in_a_line(strategy, framework):
    text = strategy.to_code(framework)
    ast.parse(text)
    assert text.endswith("\n")
    assert not text.endswith("\n\n")
    assert max(map(len, text.splitlines())) <= 120


def keywords(text, function):
    """Keyword arguments of the calls of `function` in a text, with their values as written."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    return {
        keyword.arg: ast.unparse(keyword.value)
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id == function
        for keyword in call.keywords
    }


def test_what_transformers_is_told():
    everything = Checkpoint() + MicroBatch(count=4) + MixedPrecision("bf16")
    assert keywords(everything.to_code("transformers"), "TrainingArguments") == {
        "output_dir": "'output'",
        "gradient_checkpointing": "True",
        "gradient_checkpointing_kwargs": "{'use_reentrant': False}",
        "per_device_train_batch_size": "batch_size // 4",
        "gradient_accumulation_steps": "4",
        "bf16": "True",
    }
    by_size = keywords(MicroBatch(size=8).to_code("transformers"), "TrainingArguments")
    assert by_size["per_device_train_batch_size"] == "8"
    assert by_size["gradient_accumulation_steps"] == "batch_size // 8"
    assert "patterns" in Checkpoint("a.*").to_code("transformers")
    assert "no argument" in OptimizerInBackward().to_code("transformers")
    assert "model.to(torch.bfloat16)" in LowPrecision("bf16").to_code("transformers")
    assert "bf16" not in keywords(LowPrecision("bf16").to_code("transformers"), "TrainingArguments")


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [
        (MixedPrecision("bf16"), "'bf16-mixed'"),
        (MixedPrecision("fp16"), "'16-mixed'"),
        (LowPrecision("bf16"), "'bf16-true'"),
        (LowPrecision("fp16"), "'16-true'"),
    ],
)
def test_what_lightning_is_told(strategy, precision):
    told = keywords((strategy + MicroBatch(count=4)).to_code("lightning"), "Trainer")
    assert told == {"accumulate_grad_batches": "4", "precision": precision}
    assert "automatic_optimization = False" in OptimizerInBackward().to_code("lightning")


def test_the_keywords_exist():
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    from transformers import TrainingArguments

    known = {field.name for field in dataclasses.fields(TrainingArguments)}
    for strategy in STRATEGIES:
        assert keywords(strategy.to_code("transformers"), "TrainingArguments").keys() <= known


def test_the_lightning_keywords_exist():
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("lightning is not installed")
    from lightning.pytorch import Trainer

    known = inspect.signature(Trainer.__init__).parameters.keys()
    for strategy in STRATEGIES:
        assert keywords(strategy.to_code("lightning"), "Trainer").keys() <= known


def test_other_frameworks():
    with pytest.raises(MemlabError, match="no code for 'keras': choose 'pytorch', 'transformers', 'lightning'"):
        Baseline().to_code("keras")


def test_a_nameless_predicate_gets_a_name():
    assert "keep = keeps(operator)  # your predicate" in Checkpoint(save=lambda op: True).to_code()
    assert "keep = keeps(operator)" in Checkpoint(save=functools.partial(keeps)).to_code()
