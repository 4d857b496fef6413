"""`measure`: the steady state, each strategy's own effect on memory, and what is refused."""

import pytest
import torch
from torch import nn

import memlab
from memlab import zoo
from memlab.measure import Stage
from memlab.strategies import Runner
from tests.truth import distinct_bytes, state_tensors

BATCH = 16


def _step(optimizer=torch.optim.AdamW, depth=4, **options):
    """A chain in which activations dominate: 4 KiB of parameters and 64 KiB of output a layer."""
    blocks = (nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(depth))
    model = nn.Sequential(*blocks, nn.Linear(32, 1))
    batch = torch.randn(BATCH, 32, 32), torch.randn(BATCH, 32, 1)
    return memlab.TrainingStep(model, batch, nn.MSELoss(), optimizer, **options)


def test_steady_state_and_first_step():
    step = _step()
    steady, first = memlab.measure(step), memlab.measure(step, steady=False)
    state = 2 * distinct_bytes(step.model.parameters()) + 4 * len(list(step.model.parameters()))  # two moments, a count
    assert steady.by_category("forward")["optimizer state"] == state
    assert "optimizer state" not in first.by_category("forward")
    assert first.by_category("optimizer")["optimizer state"] == state
    assert steady.by_category("forward").keys() == {"optimizer state", *first.by_category("forward")}
    assert state_tensors(step.optimizer) == []


def test_without_the_allocator_workspace_is_missing_and_said_to_be():
    step = memlab.TrainingStep(
        zoo.ResNet(width=8, depth=1), (torch.randn(4, 1, 8, 8), torch.arange(4)), nn.CrossEntropyLoss(), torch.optim.SGD
    )
    truth, tensors = memlab.measure(step), memlab.measure(step, allocator=False)
    assert truth.tensor_peak_bytes == tensors.peak_bytes == tensors.tensor_peak_bytes <= truth.peak_bytes
    assert any(a.category == "workspace" for a in truth.allocations)
    assert not any(a.category == "workspace" for a in tensors.allocations)
    assert [sentence for sentence in tensors.absent if sentence not in truth.absent] == [
        "workspace inside operators: record with allocator=True to see it"
    ]


def test_without_an_optimizer_its_state_is_said_to_be_missing():
    trace = memlab.measure(_step(optimizer=None))
    assert "optimizer state: the step has no optimizer" in trace.absent
    assert list(trace.by_phase()) == ["forward", "backward"]


def test_a_trace_says_what_it_is():
    step = _step()
    trace = memlab.measure(step, memlab.MicroBatch(count=4))
    assert (trace.strategy, trace.source, trace.allocator) == ("4 micro-batches of 4", "measured", True)
    assert trace.provenance["device"] == "cpu"
    assert trace.provenance["torch"] == torch.__version__
    assert memlab.measure(step).strategy == "baseline"


def test_the_same_every_time_and_whatever_was_measured_before():
    step = _step()
    one = memlab.measure(step)
    memlab.measure(step, memlab.Checkpoint() + memlab.MicroBatch(count=2))
    again = memlab.measure(step)
    assert again.allocations == one.allocations
    assert again.saved == one.saved


def test_source_lines_are_the_users():
    trace = memlab.measure(_step(), sources=True)
    sources = {a.place.source for a in trace.allocations if a.place.phase == "forward"}
    assert all("memlab" not in source and "site-packages" not in source for source in sources if source)


# -- what each strategy does to memory, by arithmetic ------------------------------------------------------------------

ROW = BATCH * 32 * 4  # bytes of one feature of all samples and positions


def _kinds(trace):
    """Bytes of distinct saved storages by kind, at the largest entry to backward."""
    storages = {}
    for tensor in trace.saved:
        if tensor.entry == 0 and tensor.storage is not None:
            storages[tensor.storage] = tensor.kind, tensor.storage_bytes
    return {kind: sum(n for k, n in storages.values() if k == kind) for kind, _ in storages.values()}


def test_plain_saves_each_activation():
    # Each Linear saves its input and each Tanh its output, which is the next one's input; the loss saves its input.
    assert memlab.measure(_step()).saved_bytes == 4 * 32 * ROW + ROW


def test_checkpoint_saves_inputs_alone():
    trace = memlab.measure(_step(), memlab.Checkpoint())
    kinds = _kinds(trace)
    random_states = 4 * torch.get_rng_state().nbytes
    assert kinds["checkpoint inputs"] == 3 * 32 * ROW + random_states  # the first one's input is the batch
    assert kinds["activations"] == 32 * ROW + ROW  # what the head saves, and the loss
    assert trace.by_category("recompute")["activations"] >= 32 * ROW


@pytest.mark.parametrize("count", [2, 4, 8])
def test_micro_batches_divide_what_is_saved(count):
    assert memlab.measure(_step(), memlab.MicroBatch(count=count)).saved_bytes == (4 * 32 * ROW + ROW) // count


def test_autocast_keeps_weight_copies_and_halves_activations():
    step = _step()
    kinds = _kinds(memlab.measure(step, memlab.MixedPrecision("bf16")))
    weights = sum(p.numel() for p in step.model.parameters() if p.dim() == 2)
    assert kinds["weight copies"] >= 2 * (weights - 32 * 32)  # the first layer's input needs no gradient
    # The batch's own copy, and each Tanh's output, in bf16; the loss in fp32.
    assert kinds["activations"] == (32 * ROW + 4 * 32 * ROW) // 2 + ROW


def test_pure_low_precision_halves_everything():
    step = _step(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    plain, low = memlab.measure(step), memlab.measure(step, memlab.LowPrecision("bf16"))
    for phase in ("forward", "optimizer"):
        whole, half = plain.by_category(phase), low.by_category(phase)
        for category in ("parameters", "optimizer state", "gradients", "batch"):
            assert half.get(category, 0) * 2 == whole.get(category, 0)
    assert low.saved_bytes * 2 == plain.saved_bytes


def test_the_optimizer_in_backward_never_holds_all_gradients():
    step = _step(depth=8)
    largest = {}
    for strategy in (memlab.Baseline(), memlab.OptimizerInBackward()):
        trace = memlab.measure(step, strategy)
        gradients = [a for a in trace.allocations if a.category == "gradients"]
        ticks = {tick for a in gradients for tick in (a.born, a.freed) if tick is not None}
        largest[strategy] = max(
            sum(a.nbytes for a in gradients if a.born <= t and (a.freed is None or t < a.freed)) for t in ticks
        )
    assert largest[memlab.Baseline()] == distinct_bytes(step.model.parameters())
    assert largest[memlab.OptimizerInBackward()] == (32 * 32 + 32) * 4  # one layer's weight and bias


# -- refusals and the user's errors ------------------------------------------------------------------------------------


def test_what_is_not_a_step_or_a_strategy():
    with pytest.raises(
        memlab.MemlabError, match=r"takes a TrainingStep, not Linear: memlab\.TrainingStep\(model, batch"
    ):
        memlab.measure(nn.Linear(2, 2))
    with pytest.raises(memlab.MemlabError, match=r"'checkpoint' is no strategy: choose among memlab\.Baseline\(\)"):
        memlab.measure(_step(), "checkpoint")
    with pytest.raises(memlab.MemlabError, match="is no strategy"):
        memlab.measure(_step(), memlab.Checkpoint)


def test_a_stage_starts_every_strategy_from_one_state():
    step = _step()
    seen = []
    with Stage(step) as stage:
        for strategy in (memlab.Baseline(), memlab.LowPrecision("bf16"), memlab.Baseline()):
            with stage.applied(strategy) as runner:
                assert isinstance(runner, Runner)
                seen.append([*(p.double() for p in step.model.parameters()), torch.get_rng_state()])
                runner.run()
    assert all(torch.equal(a, b) for a, b in zip(seen[0], seen[2], strict=True))
    assert all(torch.allclose(a.double(), b.double(), rtol=2**-8) for a, b in zip(seen[0], seen[1], strict=True))


def test_a_loss_scale_that_skips_is_warmed_up_until_it_steps():
    step = _step(depth=1)
    step.loss_fn.reduction = "sum"  # gradients large enough to overflow the first scale, 2**16, in fp16
    trace = memlab.measure(step, memlab.MixedPrecision("fp16"))
    assert "optimizer" in trace.by_phase()
    assert trace.by_category("optimizer")["optimizer state"] > 0


def test_an_optimizer_that_allocates_nothing_has_its_level() -> None:
    """Plain SGD writes into the parameters alone: what is alive meanwhile is all gradients, which go afterwards."""
    step = zoo.mlp_step(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    parameters = distinct_bytes(step.model.parameters())
    for allocator in (True, False):
        phases = memlab.measure(step, allocator=allocator).by_phase()
        assert 2 * parameters <= phases["optimizer"] <= phases["backward"]
