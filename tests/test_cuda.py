"""What only a CUDA device can show: memlab's peak is the caching allocator's, and every strategy runs there."""

import gc

import pytest
import torch

import memlab
from memlab import zoo
from tests.truth import distinct_bytes, state_tensors

pytestmark = pytest.mark.cuda

STRATEGIES = [
    memlab.Baseline(),
    memlab.Checkpoint(),
    memlab.MicroBatch(count=2),
    memlab.MixedPrecision("bf16"),
    memlab.MixedPrecision("fp16"),
    memlab.LowPrecision("bf16"),
    memlab.OptimizerInBackward(),
    memlab.Checkpoint() + memlab.MicroBatch(count=2) + memlab.MixedPrecision("bf16"),
]


def _step(network="gpt", **optimizer):
    if network == "gpt":
        model, batch, loss_fn = zoo.GPT(width=64, depth=2, heads=2, context=32), zoo.text_batch(8, 32), zoo.gpt_loss
    else:
        model, batch, loss_fn = zoo.ResNet(width=8, depth=2), zoo.digits_batch(8), zoo.classification_loss
    made = torch.optim.AdamW(model.cuda().parameters(), **optimizer)
    return memlab.TrainingStep(model, tuple(tensor.cuda() for tensor in batch), loss_fn, made)


def _block(tensors):
    """Bytes of the distinct storages as the allocator hands them out: in blocks of 512."""
    sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if t.is_cuda}
    return sum(-(-size // 512) * 512 for size in sizes.values())


@pytest.mark.parametrize("network", ["gpt", "cnn"])
@pytest.mark.parametrize("optimizer", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_the_peak_is_the_caching_allocators_with_rounding(network, optimizer):
    step = _step(network, **optimizer)

    def run():
        step.loss().backward()
        step.optimizer.step()
        step.optimizer.zero_grad(set_to_none=True)

    run()
    trace = memlab.measure(step)
    run()
    gc.collect()
    torch.cuda.synchronize()
    others = torch.cuda.memory_allocated()  # library workspace included
    ours = _block([*step.model.parameters(), *step.model.buffers(), *step.batch, *state_tensors(step.optimizer)])
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    assert trace.peak_bytes == torch.cuda.max_memory_allocated() - (others - ours)
    top = trace.by_category()
    assert top["parameters"] == distinct_bytes(step.model.parameters())
    assert sum(top.values()) == trace.peak_bytes
    assert top["rounding"] > 0
    assert trace.tensor_peak_bytes == sum(trace.by_category("tensor_peak").values()) < trace.peak_bytes
    assert trace.provenance["device"] == "cuda"
    assert trace.provenance["max_memory_reserved"] >= trace.peak_bytes


def test_every_strategy_runs_and_is_proven():
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("this device only emulates bf16")
    rows = memlab.compare(_step(), STRATEGIES, repeats=1).rows
    assert [row.error for row in rows] == [None] * len(STRATEGIES)
    for row in rows:
        low = any(isinstance(part, memlab.LowPrecision) for part in row.strategy.parts)
        assert row.equivalent is (None if low else True)
        assert row.time_ratio > 0
    plain, checkpointed, micro = rows[:3]
    assert checkpointed.saved_bytes < plain.saved_bytes / 2
    assert micro.saved_bytes < plain.saved_bytes


def test_backward_on_its_own_thread_has_its_phase_and_modules():
    step = _step()
    with memlab.record(step.model) as trace:
        step.loss().backward()
    backward = [operator.place for operator in trace.operators if operator.place.phase == "backward"]
    assert {place.module.partition(".")[0] for place in backward} >= {"blocks", "head", "norm"}


def test_measuring_leaves_the_devices_random_stream_and_memory():
    step = _step()
    memlab.measure(step)
    gc.collect()
    state, allocated = torch.cuda.get_rng_state(), torch.cuda.memory_allocated()
    memlab.measure(step, memlab.Checkpoint())
    gc.collect()
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert torch.cuda.memory_allocated() == allocated
