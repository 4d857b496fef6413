"""The heart: memlab's peak is the allocator's peak, to the byte, and every byte of it has a name.

The truth is a separate run of the same step, by a loop written here, under a plain profiler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memlab
from memlab import zoo
from tests.truth import allocator_peak, distinct_bytes, resident_bytes, state_tensors

WRAPPED_SCALAR = 8  # a dispatch mode keeps a Python number's tensor alive a moment longer

SIZES = {"width": 32, "depth": 2, "heads": 2, "context": 32}


def _gpt(dropout: float) -> tuple[nn.Module, Any, Any]:
    return zoo.GPT(**SIZES, dropout=dropout), zoo.text_batch(4, 32), zoo.gpt_loss


def _lstm() -> tuple[nn.Module, Any, Any]:
    return zoo.LSTM(width=32, depth=2), zoo.text_batch(4, 16), zoo.gpt_loss


def _mlp() -> tuple[nn.Module, Any, Any]:
    images, labels = zoo.digits_batch(16)
    return zoo.MLP(width=64, depth=4), (images.flatten(1), labels), zoo.classification_loss


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Any, Any]]] = {
    "gpt": lambda: _gpt(0.0),
    "gpt dropout": lambda: _gpt(0.1),
    "cnn": lambda: (zoo.ResNet(width=8, depth=2), zoo.digits_batch(8), zoo.classification_loss),
    "lstm": _lstm,
    "mlp": _mlp,
}
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "adamw loop": lambda parameters: torch.optim.AdamW(parameters, foreach=False),
    "adamw foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "adamw fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
}
BLOCKS = {"gpt": "blocks", "gpt dropout": "blocks", "cnn": "blocks", "mlp": "layers"}
STRATEGIES = {
    "plain": memlab.Baseline(),
    "checkpoint": memlab.Checkpoint(),
    "micro-batches": memlab.MicroBatch(count=2),
    "both": memlab.Checkpoint() + memlab.MicroBatch(count=2),
}


def _plain_loop(
    model: nn.Module, batch: Any, loss_fn: Any, optimizer: Any, count: int, bf16: bool
) -> Callable[[], None]:
    """The training step as a user writes it, with the losses kept to be logged."""
    parts = list(zip(*(tensor.tensor_split(count) for tensor in batch), strict=True))

    def run() -> None:
        losses = []
        for part in parts:
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = loss_fn(model, part)
            if count > 1:
                loss = loss / count
            loss.backward()
            losses.append(loss.detach())
            del loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run


def _checkpoint_blocks(container: nn.Module) -> None:
    for block in container.children():
        forward = block.forward
        block.forward = lambda *args, forward=forward: checkpoint(forward, *args, use_reentrant=False)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("network", NETWORKS)
def test_peak_is_the_allocators_to_the_byte(network: str, optimizer: str, bf16: bool, strategy: str) -> None:
    checkpointed = strategy in ("checkpoint", "both")
    if network == "lstm" and checkpointed:
        pytest.skip("the LSTM has no repeated blocks to checkpoint")
    if network == "lstm" and bf16:
        pytest.skip("oneDNN's LSTM does not train in bf16 on this CPU")
    model, batch, loss_fn = NETWORKS[network]()
    made = OPTIMIZERS[optimizer](model.parameters())
    step = memlab.TrainingStep(model, batch, loss_fn, made)
    technique = STRATEGIES[strategy] + (memlab.MixedPrecision("bf16") if bf16 else memlab.Baseline())
    trace = memlab.measure(step, technique)
    tensors_only = memlab.measure(step, technique, allocator=False)

    count = 2 if strategy in ("micro-batches", "both") else 1
    run = _plain_loop(model, batch, loss_fn, made, count, bf16)
    if checkpointed:
        _checkpoint_blocks(getattr(model, BLOCKS[network]))
    run()  # optimizer state exists from here on
    truth = resident_bytes(model, made, batch) + allocator_peak(run)

    assert trace.peak_bytes - truth in (0, WRAPPED_SCALAR)
    assert tensors_only.tensor_peak_bytes == tensors_only.peak_bytes == trace.tensor_peak_bytes
    _check_names(trace, model, made, batch)


def _check_names(trace: memlab.Trace, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    """Every byte of the peak is attributed, and what has a formula equals it."""
    top = trace.by_category()
    assert "other" not in top
    assert sum(top.values()) == trace.peak_bytes
    assert sum(trace.by_module().values()) == trace.peak_bytes
    assert max(point.nbytes for point in trace.timeline()) == trace.peak_bytes
    assert max(trace.by_phase().values()) == trace.peak_bytes
    assert sum(trace.by_category("tensor_peak").values()) == trace.tensor_peak_bytes
    assert max(trace.by_phase("tensor_peak").values()) == trace.tensor_peak_bytes
    assert top["parameters"] == distinct_bytes(model.parameters())
    assert top["batch"] == distinct_bytes(batch)
    assert top["optimizer state"] == distinct_bytes(state_tensors(optimizer))
    assert top.get("buffers", 0) == distinct_bytes(model.buffers())
    optimizer_top = trace.by_category("optimizer")
    assert optimizer_top["gradients"] == distinct_bytes(p for p in model.parameters() if p.requires_grad)


class Fan(nn.Module):
    """One tensor that several layers use: its gradients are added up."""

    def __init__(self, width: int = 256, uses: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(nn.Linear(width, 8) for _ in range(uses))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        return sum(layer(normed) for layer in self.layers)  # type: ignore[return-value]


class SelfAttention(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x)[0]  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.GRU(width, 32, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (Fan, (64, 256)),
        (SelfAttention, (2, 10, 32)),
        (Recurrent, (4, 9, 16)),
        (lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), (3, 8, 32)),
    ],
    ids=["fan", "attention", "gru", "encoder layer"],
)
def test_gradients_that_the_engine_adds_in_place_are_counted_so(
    model: Callable[[], nn.Module], batch: tuple[int, ...]
) -> None:
    """Under a dispatch mode the engine adds out of place: one gradient more, which a plain step does not have."""
    network, inputs = model(), torch.randn(batch)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)

    def loss_fn(network: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        return network(inputs).pow(2).mean()  # type: ignore[no-any-return]

    step = memlab.TrainingStep(network, inputs, loss_fn, optimizer)
    trace, tensors_only = memlab.measure(step), memlab.measure(step, allocator=False)

    def run() -> None:
        loss = loss_fn(network, inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    run()
    truth = resident_bytes(network, optimizer, [inputs]) + allocator_peak(run)
    assert trace.peak_bytes - truth in (0, WRAPPED_SCALAR)
    assert tensors_only.tensor_peak_bytes == trace.tensor_peak_bytes
    assert "other" not in trace.by_category()
