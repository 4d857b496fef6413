"""Models that others wrote: Hugging Face's, from tiny configurations, and torch.nn's own.

They pass the same grid as ours: the peak is the allocator's, every byte has a name, gradients are PyTorch's own.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import memlab
from memlab import ledger
from memlab.strategies import regions
from tests.truth import allocator_peak, distinct_bytes, resident_bytes

transformers = pytest.importorskip("transformers", reason="Hugging Face's transformers is not installed")

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")

WRAPPED_SCALAR = 8  # a dispatch mode keeps a Python number's tensor alive a moment longer
LOSS_BYTES = 4
SAMPLES, TOKENS, WIDTH, VOCABULARY = 4, 12, 32, 64
SPECIAL = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


# -- the models --------------------------------------------------------------------------------------------------------


def _llama(dropout: float = 0.0, **options: Any) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=TOKENS,
        attention_dropout=dropout,
        **SPECIAL,
        **options,
    )
    return transformers.LlamaForCausalLM(config)  # type: ignore[no-any-return]


def _gpt2(dropout: float = 0.0) -> nn.Module:
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    sizes = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": TOKENS}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **rates, **SPECIAL))  # type: ignore[no-any-return]


def _bert(dropout: float = 0.0) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=TOKENS,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return transformers.BertForMaskedLM(config)  # type: ignore[no-any-return]


def _t5(dropout: float = 0.0, use_cache: bool = False) -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        dropout_rate=dropout,
        decoder_start_token_id=0,
        pad_token_id=0,
        use_cache=use_cache,
    )
    return transformers.T5ForConditionalGeneration(config)  # type: ignore[no-any-return]


def _vit(dropout: float = 0.0) -> nn.Module:
    config = transformers.ViTConfig(
        image_size=16,
        patch_size=4,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        num_labels=5,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return transformers.ViTForImageClassification(config)  # type: ignore[no-any-return]


class Attentions(nn.Module):
    """Multi-head attention alone, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x, x, x, need_weights=False)[0]
        return x


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0]  # type: ignore[no-any-return]


def _encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True), 2)


def _text() -> Any:
    tokens = torch.randint(1, VOCABULARY, (SAMPLES, TOKENS))
    return transformers.BatchEncoding(
        {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()}
    )


def _images() -> Any:
    return {"pixel_values": torch.randn(SAMPLES, 3, 16, 16), "labels": torch.arange(SAMPLES)}


def _features() -> Any:
    return torch.randn(SAMPLES, TOKENS, WIDTH), torch.randn(SAMPLES, TOKENS, WIDTH)


def _regression(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


@dataclass(frozen=True)
class Case:
    build: Callable[..., nn.Module]
    batch: Callable[[], Any]
    blocks: tuple[str, ...]  # what Checkpoint("auto") is to find
    loss_fn: Any = None


HUGGING_FACE = {
    "llama": Case(_llama, _text, ("model.layers.0", "model.layers.1")),
    "gpt2": Case(_gpt2, _text, ("transformer.h.0", "transformer.h.1")),
    "bert": Case(_bert, _text, ("bert.encoder.layer.0", "bert.encoder.layer.1")),
    "t5": Case(_t5, _text, ("encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1")),
    "vit": Case(_vit, _images, ("vit.layers.0", "vit.layers.1")),
}
CASES = {
    **HUGGING_FACE,
    "encoder": Case(_encoder, _features, ("layers.0", "layers.1"), _regression),
    "attention": Case(Attentions, _features, ("layers.0", "layers.1"), _regression),
    "lstm": Case(Recurrent, _features, (), _regression),
}
CHECKPOINT, MICRO, BF16 = memlab.Checkpoint(), memlab.MicroBatch(count=2), memlab.MixedPrecision("bf16")
STRATEGIES = {
    "plain": memlab.Baseline(),
    "checkpoint": CHECKPOINT,
    "micro-batches": MICRO,
    "bf16": BF16,
    "all": CHECKPOINT + MICRO + BF16,
}


def _step(case: Case, **options: Any) -> memlab.TrainingStep:
    model = case.build(**options).train()
    return memlab.TrainingStep(model, case.batch(), case.loss_fn, torch.optim.AdamW(model.parameters()))


def _tensors(batch: Any) -> list[torch.Tensor]:
    return list(batch.values() if hasattr(batch, "values") else batch)


def _parts(batch: Any, count: int) -> list[Any]:
    """The micro-batches, cut by hand."""
    if count == 1:
        return [batch]
    if not hasattr(batch, "items"):
        return list(zip(*(tensor.tensor_split(count) for tensor in batch), strict=True))
    cut = {name: tensor.tensor_split(count) for name, tensor in batch.items()}
    return [{name: pieces[number] for name, pieces in cut.items()} for number in range(count)]


def _loss(case: Case, model: nn.Module, batch: Any) -> Any:
    return model(**batch).loss if case.loss_fn is None else case.loss_fn(model, batch)


def _checkpoint_by_hand(model: nn.Module, names: Iterable[str]) -> None:
    for name in names:
        block = model.get_submodule(name)
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


# -- exact -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", CASES)
def test_the_peak_is_the_allocators_to_the_byte(name: str, strategy: str) -> None:
    case, technique = CASES[name], STRATEGIES[strategy]
    if name == "lstm" and (CHECKPOINT in technique.parts or BF16 in technique.parts):
        pytest.skip("an LSTM is one operator: it has no blocks, and oneDNN does not train it in bf16 on every CPU")
    step = _step(case)
    trace, tensors_only = memlab.measure(step, technique), memlab.measure(step, technique, allocator=False)

    if CHECKPOINT in technique.parts:
        _checkpoint_by_hand(step.model, case.blocks)
    parts = _parts(step.batch, 2 if MICRO in technique.parts else 1)
    optimizer = step.optimizer
    assert optimizer is not None

    def run() -> None:
        losses = []
        for part in parts:
            with torch.autocast("cpu", torch.bfloat16, enabled=BF16 in technique.parts):
                loss = _loss(case, step.model, part)
            if len(parts) > 1:
                loss = loss / len(parts)
            loss.backward()
            losses.append(loss.detach())
            del loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    run()
    truth = resident_bytes(step.model, optimizer, _tensors(step.batch)) + allocator_peak(run)
    assert trace.peak_bytes - truth in (0, WRAPPED_SCALAR)
    assert tensors_only.tensor_peak_bytes == tensors_only.peak_bytes == trace.tensor_peak_bytes
    top = trace.by_category()
    assert "other" not in top
    assert sum(top.values()) == sum(trace.by_module().values()) == trace.peak_bytes
    assert top["parameters"] == distinct_bytes(step.model.parameters())
    assert top["batch"] == distinct_bytes(_tensors(step.batch))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", CASES)
def test_a_simulation_says_the_same(name: str, strategy: str) -> None:
    case, technique = CASES[name], STRATEGIES[strategy]
    if name == "lstm" and (CHECKPOINT in technique.parts or BF16 in technique.parts):
        pytest.skip("an LSTM is one operator: it has no blocks, and oneDNN does not train it in bf16 on every CPU")
    step = _step(case)
    to_be_built = memlab.TrainingStep(lambda: case.build().train(), case.batch, case.loss_fn, torch.optim.AdamW)
    with torch.backends.mkldnn.flags(enabled=name != "lstm"):  # oneDNN's keeps its workspace as a tensor
        real = memlab.measure(step, technique, allocator=False)
        for fake in (memlab.simulate(step, technique, "cpu"), memlab.simulate(to_be_built, technique, "cpu")):
            assert fake.tensor_peak_bytes == real.tensor_peak_bytes
            assert fake.by_category() == real.by_category()
            assert fake.saved_bytes == real.saved_bytes
    on_cuda = memlab.simulate(step, technique)
    assert on_cuda.by_category("forward")["parameters"] == distinct_bytes(step.model.parameters())
    assert not to_be_built.is_built


def _explained_and_alive(forward: Callable[[], torch.Tensor], older: list[torch.Tensor]) -> tuple[int, int]:
    """Bytes that the ledger names after a forward pass, and those that the allocator handed out and has not back."""
    forward()
    alive: dict[int, int] = {}
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        loss = forward()
        gc.collect()
    pending = list(profile.profiler.kineto_results.experimental_event_tree())
    while pending:
        node = pending.pop(0)
        pending = [*node.children, *pending]
        if node.name == "[memory]":
            if node.extra_fields.alloc_size > 0:
                alive[node.extra_fields.ptr] = node.extra_fields.alloc_size
            else:
                alive.pop(node.extra_fields.ptr, None)
    named = [entry.tensor for entry in ledger.walk([loss]).entries if entry.tensor is not None]
    return distinct_bytes([*named, *older]) - distinct_bytes(older) + LOSS_BYTES, sum(alive.values())


@pytest.mark.parametrize("how", ["plain", "ours", "its own", "both"])
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_every_byte_alive_after_the_forward_pass_is_explained(name: str, how: str) -> None:
    """Also what a checkpointed block gets through keywords, a partial, or a cache of keys and values."""
    case = HUGGING_FACE[name]
    model, batch = case.build().train(), case.batch()
    if how in ("its own", "both"):
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    if how in ("ours", "both"):
        _checkpoint_by_hand(model, case.blocks)
    older = [*model.parameters(), *model.buffers(), *batch.values()]
    explained, alive = _explained_and_alive(lambda: model(**batch).loss, older)
    assert explained == alive


# -- the same model ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_auto_finds_the_blocks(name: str) -> None:
    case = CASES[name]
    model = case.build()
    if case.blocks:
        assert tuple(regions.chosen(model, regions.AUTO)) == case.blocks
    else:
        with pytest.raises(memlab.MemlabError, match="no repeated blocks found in Recurrent"):
            regions.chosen(model, regions.AUTO)


@pytest.mark.parametrize("name", CASES)
def test_each_technique_trains_the_same_model(name: str) -> None:
    case = CASES[name]
    techniques = [MICRO, CHECKPOINT + MICRO, CHECKPOINT] if case.blocks else [MICRO]
    plain, micro, *checkpointed = memlab.compare(_step(case), techniques, repeats=0).rows
    for row in (plain, micro, *checkpointed):
        assert row.error is None
        assert row.equivalent, row.notes
        assert row.gradient_difference is not None
        assert row.gradient_difference <= 1e-12
    if checkpointed:
        assert checkpointed[-1].proof == "float64"
        assert checkpointed[-1].gradient_difference == checkpointed[-1].loss_difference == 0.0
        assert checkpointed[-1].notes == ()


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_token_losses_of_unequal_micro_batches_need_their_weights(name: str) -> None:
    """A row of labels that is mostly left out: a mean over tokens is no mean over samples."""
    case = HUGGING_FACE[name]
    model, batch = case.build().double().train(), _text()
    batch["labels"][:2, 3:] = -100
    shifted = 0 if name == "t5" else 1  # a causal model predicts the next token: the first is no target

    def weight(part: Any) -> torch.Tensor:
        return (part["labels"][:, shifted:] != -100).sum()

    halves = _parts(batch, 2)
    truth = _gradients(model, [(batch, 1.0)])
    mean_of_means = _gradients(model, [(half, 0.5) for half in halves])
    apart = max(float((mean_of_means[key] - g).norm() / g.norm()) for key, g in truth.items() if g.norm() > 1e-6)
    without, weighted = (
        memlab.compare(memlab.TrainingStep(model, batch, weight=given), [MICRO], repeats=0).rows[1]
        for given in (None, weight)
    )
    assert without.equivalent is False
    assert without.gradient_difference == pytest.approx(apart, rel=0.05)
    assert any("-100" in note and "weight=" in note for note in without.notes)
    assert weighted.equivalent, weighted.notes
    assert any("of the loss terms" in note for note in weighted.notes)


def _gradients(model: nn.Module, parts: Iterable[tuple[Any, float]]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    for part, share in parts:
        (model(**part).loss * share).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_with_dropout_checkpointing_is_identical_and_micro_batches_say_what_differs(name: str) -> None:
    _, checkpointed, micro = memlab.compare(_step(HUGGING_FACE[name], dropout=0.1), [CHECKPOINT, MICRO], repeats=0).rows
    assert checkpointed.equivalent
    assert checkpointed.gradient_difference == 0.0
    assert micro.equivalent
    assert any("dropout" in note and "other masks" in note for note in micro.notes)


def test_a_cache_of_keys_and_values_that_cannot_be_recomputed_is_named() -> None:
    """T5's cross-attention takes other ways once its cache is filled."""
    model = _t5(use_cache=True).train()
    _, checkpointed, micro = memlab.compare(memlab.TrainingStep(model, _text()), [CHECKPOINT, MICRO], repeats=0).rows
    assert checkpointed.error is not None
    assert "did not repeat its forward pass" in checkpointed.error
    assert "use_cache=False" in checkpointed.error
    assert micro.equivalent


# -- the model's own checkpointing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_the_models_own_checkpointing_is_measured_as_what_it_is(name: str) -> None:
    """It keeps what ours keeps. Without the cache of keys and values, which it switches off by itself."""
    case = HUGGING_FACE[name]
    step = _step(case)
    step.model.config.use_cache = False  # type: ignore[union-attr]
    plain, ours = memlab.measure(step), memlab.measure(step, CHECKPOINT)
    assert not any("own gradient checkpointing" in note for note in ours.notes)

    step.model.gradient_checkpointing_enable()  # type: ignore[operator]
    own = memlab.measure(step)
    optimizer = step.optimizer
    assert optimizer is not None

    def run() -> None:
        step.model(**step.batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    run()
    truth = resident_bytes(step.model, optimizer, _tensors(step.batch)) + allocator_peak(run)
    assert own.peak_bytes - truth in (0, WRAPPED_SCALAR)
    assert own.saved_bytes == ours.saved_bytes < plain.saved_bytes / 2
    assert any("own gradient checkpointing" in note and "is on" in note for note in own.notes)

    step.model.eval()
    without = memlab.measure(step)
    assert without.saved_bytes == plain.saved_bytes
    assert any("on but without effect" in note and "model.train()" in note for note in without.notes)
