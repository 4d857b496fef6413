"""`compare(..., simulated=True)`: its rows are what `simulate` says, and nothing real is run, made or changed."""

import copy
import random

import pytest
import torch
from torch import nn
from truth import HOOK_REGISTRIES

import memlab
from memlab import zoo

STRATEGIES = [
    memlab.Checkpoint(),
    memlab.MicroBatch(count=2) + memlab.MixedPrecision("bf16"),
    memlab.OptimizerInBackward(),
    memlab.LowPrecision("bf16"),
]
every_device = pytest.mark.parametrize("device", ["cuda", "cpu"])


def _step(**options):
    return zoo.gpt_step(batch=4, context=16, width=16, depth=2, heads=2, **options)


def _figures(trace):
    """All of a trace that is the same in each run: not times, and not in which order autocast forgets its casts."""
    allocations = [(a.nbytes, a.category, a.place, a.born, a.name, a.dtype, a.shape) for a in trace.allocations]
    return allocations, trace.saved, [(o.place, o.flops, o.moved_bytes, o.dtype) for o in trace.operators]


@every_device
def test_rows_are_what_simulate_says_and_prove_nothing(device):
    step = _step()
    rows = memlab.compare(step, STRATEGIES, simulated=True, device=device).rows
    assert [row.strategy for row in rows] == [memlab.Baseline(), *STRATEGIES]
    assert rows[2].label == "2 micro-batches of 2 + bf16 autocast"
    for row in rows:
        alone = memlab.simulate(step, row.strategy, device=device)
        assert _figures(row.trace) == _figures(alone)
        assert (row.peak_bytes, row.tensor_peak_bytes, row.saved_bytes) == (
            alone.peak_bytes, alone.tensor_peak_bytes, alone.saved_bytes,
        )  # fmt: skip
        assert (row.trace.source, row.trace.strategy) == ("simulated", row.label)
        assert row.trace.provenance["device"] == device
        assert (row.time_ratio, row.equivalent, row.proof, row.error) == (None, None, "none", None)
        assert (row.loss_difference, row.gradient_difference, row.gradient_error) == (None, None, None)
        assert row.buffer_differences == ()


def test_arithmetic_and_tensor_peaks_are_those_that_a_real_comparison_counts():
    step, strategies = _step(), STRATEGIES[:3]
    simulated = memlab.compare(step, strategies, simulated=True, device="cpu").rows
    real = memlab.compare(step, strategies, repeats=0).rows
    assert [row.tensor_peak_bytes for row in simulated] == [row.tensor_peak_bytes for row in real]
    assert [row.saved_bytes for row in simulated] == [row.saved_bytes for row in real]
    assert [row.flops_ratio for row in simulated] == pytest.approx([row.flops_ratio for row in real])
    assert simulated[0].flops_ratio == 1.0
    assert simulated[1].flops_ratio > 1.0


@every_device
def test_a_strategy_that_cannot_run_is_a_row_that_says_why(device):
    strategies = {
        "too many": memlab.MicroBatch(count=99),
        "nowhere": memlab.Checkpoint("layers.*"),
        "good": STRATEGIES[0],
    }
    rows = memlab.compare(_step(), strategies, simulated=True, device=device).rows
    assert [row.label for row in rows] == ["baseline", "too many", "nowhere", "good"]
    assert rows[1].error == "99 micro-batches asked, but the batch holds 4 sample(s): give 1 to 4"
    assert rows[2].error.startswith("'layers.*' matches no module of GPT")
    for row in rows[1:3]:
        assert (row.trace, row.peak_bytes, row.flops_ratio, row.equivalent) == (None, None, None, None)
    assert rows[3].error is None
    assert rows[3].saved_bytes < rows[0].saved_bytes
    assert _figures(rows[3].trace) == _figures(memlab.simulate(_step(), STRATEGIES[0], device=device))


def test_what_truly_depends_on_data_names_the_line():
    def loss_fn(model, batch):
        loss = model(batch).square().mean()
        return loss * 2 if loss > 1 else loss

    step = memlab.TrainingStep(nn.Linear(4, 4), torch.ones(2, 4), loss_fn)
    with pytest.raises(memlab.MemlabError, match=r"test_compare_simulated\.py:\d+"):
        memlab.compare(step, [memlab.Checkpoint()], simulated=True)


def test_a_micro_batch_that_alone_depends_on_data_is_a_row():
    def loss_fn(model, batch):
        loss = model(batch).square().mean()
        return loss * 2 if len(batch) < 4 and loss > 1 else loss

    step = memlab.TrainingStep(nn.Linear(4, 4), torch.ones(4, 4), loss_fn)
    plain, halves = memlab.compare(step, [memlab.MicroBatch(count=2)], simulated=True).rows
    assert plain.trace is not None
    assert "test_compare_simulated.py:" in halves.error


@every_device
def test_nothing_real_changes(device):
    step = zoo.resnet_step(batch=4, width=4, depth=1, optimizer=lambda params: torch.optim.SGD(params, momentum=0.9))
    step.loss().backward()
    step.optimizer.step()  # buffers, state and gradients are there

    def state():
        return copy.deepcopy(
            (
                dict(step.model.state_dict()),
                {name: p.grad for name, p in step.model.named_parameters()},
                [list(of.values()) for of in step.optimizer.state.values()],
                step.batch,
                torch.get_rng_state(),
            )
        )

    tensors = [*step.model.parameters(), *step.model.buffers(), *step.batch]
    before, owners, draws = state(), [t.data_ptr() for t in tensors], random.getstate()
    hooks = [len(registry) for registry in HOOK_REGISTRIES]
    memlab.compare(step, [*STRATEGIES, memlab.MicroBatch(count=99)], simulated=True, device=device)
    torch.testing.assert_close(state(), before, rtol=0, atol=0)
    assert [t.data_ptr() for t in tensors] == owners
    assert random.getstate() == draws
    assert [len(registry) for registry in HOOK_REGISTRIES] == hooks


@every_device
def test_the_process_computes_afterwards_as_before(device):
    step = _step()
    before = step.loss().item()
    memlab.compare(step, STRATEGIES, simulated=True, device=device)
    assert step.loss().item() == before
    with torch.autocast("cpu", torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


def test_a_model_given_as_a_callable_is_never_built():
    """200 GB of parameters, under the labels of real batch sizes."""
    step = memlab.TrainingStep(
        lambda: nn.Sequential(nn.Linear(500_000, 100_000, bias=False), nn.Linear(100_000, 1)),
        (torch.ones(8, 500_000, device="meta"), torch.ones(8, 1)),
        nn.MSELoss(),
        torch.optim.SGD,
    )
    rows = memlab.compare(step, [memlab.MicroBatch(size=3), memlab.Checkpoint(("0", "1"))], simulated=True).rows
    assert not step.is_built
    assert [row.label for row in rows] == ["baseline", "3 micro-batches of 3, 3 and 2", "checkpoint 0, 1"]
    assert all(row.trace.by_category()["parameters"] >= 2 * 10**11 for row in rows)


@pytest.mark.parametrize("make", [zoo.gpt_step, zoo.resnet_step, zoo.lstm_step, zoo.mlp_step], ids=lambda f: f.__name__)
def test_a_model_simulates_alike_whether_it_exists_or_is_to_be_built(make):
    strategies = [memlab.MicroBatch(count=2)]
    exists, to_build = (
        memlab.compare(make(batch=4, width=8, lazy=lazy), strategies, simulated=True).rows for lazy in (False, True)
    )
    assert [_figures(row.trace) for row in to_build] == [_figures(row.trace) for row in exists]


def test_it_is_shown_as_a_simulation():
    comparison = memlab.compare(_step(), STRATEGIES[:1], simulated=True)
    assert "not proven" in str(comparison)
    assert "checkpoint" in comparison.explain()
    frame = comparison.to_frame()
    assert frame["time ratio"].isna().all()
    assert list(frame["same model"]) == ["not proven"] * 2
    assert "checkpoint" in comparison.to_html()


def test_devices_that_there_are():
    with pytest.raises(memlab.MemlabError, match="device is 'tpu': there is 'cuda'"):
        memlab.compare(_step(), [], simulated=True, device="tpu")
