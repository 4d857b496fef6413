"""A simulation on the CPU says what a measurement says, to the byte, and nothing real runs or changes."""

from __future__ import annotations

import collections
import contextlib
import copy
import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memlab
from memlab import zoo
from memlab.simulation.faking import faking
from memlab.simulation.unknown import Unknown
from tests.test_exact import NETWORKS, OPTIMIZERS, STRATEGIES
from tests.truth import distinct_bytes

BF16, FP16, LOW = memlab.MixedPrecision("bf16"), memlab.MixedPrecision("fp16"), memlab.LowPrecision("bf16")
PRECISIONS = {"fp32": memlab.Baseline(), "bf16": BF16, "fp16": FP16, "pure bf16": LOW}


def saved(trace: memlab.Trace) -> collections.Counter[Any]:
    return collections.Counter((s.module, s.slot, s.shape, s.dtype, s.nbytes, s.storage_bytes) for s in trace.saved)


def assert_same(step: memlab.TrainingStep, strategy: memlab.strategies.Strategy | None = None) -> memlab.Trace:
    """Simulated and measured agree in every byte of tensors; the measured trace is returned."""
    real = memlab.measure(step, strategy, allocator=False)
    fake = memlab.simulate(step, strategy, device="cpu")
    assert fake.tensor_peak_bytes == fake.peak_bytes == real.tensor_peak_bytes
    assert fake.by_category() == real.by_category()
    assert fake.by_phase() == real.by_phase()
    assert saved(fake) == saved(real)
    assert fake.saved_bytes == real.saved_bytes
    assert (fake.source, real.source) == ("simulated", "measured")
    return real


# -- to the byte -------------------------------------------------------------------------------------------------------


GRID = [*((optimizer, "fp32") for optimizer in OPTIMIZERS), *(("adamw loop", p) for p in ("bf16", "fp16", "pure bf16"))]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("optimizer", "precision"), GRID)
@pytest.mark.parametrize("network", NETWORKS)
def test_the_grid(network: str, optimizer: str, precision: str, strategy: str) -> None:
    if network == "lstm" and (strategy in ("checkpoint", "both") or precision != "fp32"):
        pytest.skip("an LSTM has no blocks to checkpoint, and the CPU's does not train in low precision everywhere")
    model, batch, loss_fn = NETWORKS[network]()
    step = memlab.TrainingStep(model, batch, loss_fn, OPTIMIZERS[optimizer](model.parameters()))
    with torch.backends.mkldnn.flags(enabled=network != "lstm"):  # oneDNN's keeps its workspace as a tensor
        assert_same(step, STRATEGIES[strategy] + PRECISIONS[precision])


def test_the_optimizer_in_backward() -> None:
    assert_same(zoo.gpt_step(batch=4, context=32), memlab.OptimizerInBackward())
    assert_same(zoo.gpt_step(batch=4, context=32), memlab.OptimizerInBackward() + memlab.Checkpoint())


def test_the_first_step() -> None:
    step = zoo.gpt_step(batch=4, context=64)  # its peak is in the backward pass
    real = memlab.measure(step, allocator=False, steady=False)
    assert memlab.simulate(step, device="cpu", steady=False).tensor_peak_bytes == real.tensor_peak_bytes
    assert memlab.simulate(step, device="cpu").tensor_peak_bytes > real.tensor_peak_bytes


class Normalised(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(4, 8, 3, padding=1), norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x)).relu()  # type: ignore[no-any-return]


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm1d(8),
    "batch, no weight": lambda: nn.BatchNorm1d(8, affine=False),
    "batch, no statistics": lambda: nn.BatchNorm1d(8, track_running_stats=False),
    "layer": lambda: nn.LayerNorm(16),
    "layer, no weight": lambda: nn.LayerNorm(16, elementwise_affine=False),
    "group": lambda: nn.GroupNorm(2, 8),
    "instance": lambda: nn.InstanceNorm1d(8, affine=True),
    "rms": lambda: nn.RMSNorm(16),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "pure bf16"])
@pytest.mark.parametrize("norm", NORMS)
def test_the_statistics_of_normalisations(norm: str, precision: str) -> None:
    batch = torch.randn(4, 4, 16), torch.randn(4, 8, 16)
    step = memlab.TrainingStep(Normalised(NORMS[norm]()), batch, F.l1_loss, torch.optim.SGD)
    assert_same(step, PRECISIONS[precision])


LOSSES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss")


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("loss", LOSSES)
def test_what_losses_leave_behind(loss: str, reduction: str) -> None:
    model, target = nn.Sequential(nn.Linear(16, 64), nn.Sigmoid()), torch.rand(32, 64)
    function = getattr(F, loss)
    step = memlab.TrainingStep(
        model, (torch.randn(32, 16), target), lambda m, b: function(m(b[0]), b[1], reduction=reduction), torch.optim.SGD
    )
    assert_same(step)
    assert_same(step, memlab.MicroBatch(count=4))


# -- what a program asks of its data -----------------------------------------------------------------------------------


def linear_step(loss_fn: Callable[[nn.Module, Any], torch.Tensor], batch: Any = None) -> memlab.TrainingStep:
    batch = torch.randn(8, 4) if batch is None else batch
    return memlab.TrainingStep(nn.Linear(4, 4), batch, loss_fn, torch.optim.AdamW)


def test_a_loop_that_logs() -> None:
    history: list[Any] = []

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        history.append(loss.item())
        total = sum(history) / len(history)
        assert f"{loss:.3f} {loss.item():.3f} {total:.2e} {round(total, 2)} {-total}".startswith("unknown")
        float(loss)
        return loss

    trace = memlab.simulate(linear_step(loss_fn), device="cpu")
    assert trace.source == "simulated"
    assert history == []


def test_values_that_the_batch_brings_are_known() -> None:
    labels = torch.tensor([1, 2, -100, 3, -100, 0, 1, 1])

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        x, labels = batch
        kept = labels != -100
        if not kept.any() or kept.sum().item() != 6 or int(labels.max()) != 3:
            raise AssertionError("the labels should be known")
        return F.cross_entropy(model(x)[kept], labels[kept])

    real = assert_same(linear_step(loss_fn, (torch.randn(8, 4), labels)))
    assert any(s.shape == (6, 4) for s in real.saved)


def test_a_mask_that_a_callable_builds_is_known() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        x, mask = batch
        assert (mask == 1).all()
        assert torch.arange(8).sum() == 28
        return (model(x) * mask[:, None]).mean()

    def build() -> nn.Module:
        return nn.Linear(4, 4)

    step = memlab.TrainingStep(build, lambda: (torch.randn(8, 4), torch.ones(8, dtype=torch.int64)), loss_fn)
    assert memlab.simulate(step, device="cpu").source == "simulated"
    assert not step.is_built


def test_unknown_selections_are_as_large_as_they_can_be() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        return y[y > 0].sum()

    trace = memlab.simulate(linear_step(loss_fn), device="cpu")
    assert any(a.shape == (32,) and a.place.operator == "aten::index" for a in trace.allocations)
    (note,) = trace.notes
    assert "boolean indexing (test_simulate.py:" in note
    assert "as large as it can be" in note


def compares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).mean()
    return loss if loss.item() < 10 else loss * 0


def decides(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).mean()
    return loss if loss > 0 else -loss


def sizes(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    count = (model(x) > 0).sum().item()
    return model(x)[:count].sum()


def makes(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).sum() * torch.ones((model(x) > 0).sum().item()).sum()


def loops(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return sum(model(x).sum() for _ in range(int(x.abs().max())))  # type: ignore[return-value]


def leaves_torch(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).mean() * float(model(x).detach().numpy().max())


def bins(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).mean() * torch.bincount(x.abs().long().flatten()).sum()


DATA = {
    "compares": (compares, "compares the value of a tensor"),
    "decides": (decides, "decides by the value of a tensor"),
    "sizes": (sizes, "as a whole number"),
    "makes": (makes, "value of a tensor"),
    "loops": (loops, "as a whole number"),
    "leaves_torch": (leaves_torch, r"\.numpy\(\)"),
    "bins": (bins, "bincount"),
}


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_steering_by_data_is_refused_with_its_line(name: str, device: Any) -> None:
    function, words = DATA[name]
    line = rf"test_simulate\.py:\d+ in ({name}|<genexpr>)"
    with pytest.raises(memlab.MemlabError, match=f"a simulation has shapes and no data.*{line}.*{words}.*measure"):
        memlab.simulate(linear_step(function), device=device)


def test_unknown_numbers() -> None:
    unknown = Unknown()
    assert isinstance(1 + unknown * 2 - unknown / 3, Unknown)
    assert isinstance(abs(unknown) ** 2, Unknown)
    assert repr([unknown, -unknown]) == "[unknown, unknown]"
    assert math.isnan(unknown)


# -- nothing real ------------------------------------------------------------------------------------------------------


def test_models_too_large_for_any_machine() -> None:
    def build() -> nn.Module:
        return nn.Sequential(*[nn.Linear(2**17, 2**17, bias=False, device="cuda") for _ in range(8)]).bfloat16().cuda()

    step = memlab.TrainingStep(
        build,
        lambda: torch.randn(4, 2**17, dtype=torch.bfloat16, device="cuda:0"),
        lambda m, x: m(x.to("cuda", non_blocking=True)).float().mean(),
        lambda parameters: torch.optim.AdamW(parameters, fused=True),
    )
    assert repr(step) == "TrainingStep(a model that build builds)"
    trace = memlab.simulate(step)
    assert trace.by_category()["parameters"] == 8 * 2**34 * 2
    assert trace.by_category("optimizer")["optimizer state"] >= 2 * 8 * 2**34 * 2
    assert not step.is_built


def test_models_on_the_meta_device() -> None:
    with torch.device("meta"):
        model, x = nn.Linear(1024, 1024), torch.empty(8, 1024)
    step = memlab.TrainingStep(model, x, lambda m, x: m(x).sum(), torch.optim.SGD)
    real = memlab.TrainingStep(nn.Linear(1024, 1024), torch.ones(8, 1024), lambda m, x: m(x).sum(), torch.optim.SGD)
    expected = memlab.measure(real, allocator=False).tensor_peak_bytes
    assert memlab.simulate(step, device="cpu").tensor_peak_bytes == expected


def test_ties_and_views_stay() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.head = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
            self.head.weight = self.tokens.weight
            whole = torch.randn(4, 32)
            self.register_buffer("first", whole[:2])
            self.register_buffer("second", whole[2:])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.tokens(x) + self.first[0] + self.second[0])  # type: ignore[no-any-return]

    batch = torch.randint(0, 64, (4, 8))
    step = memlab.TrainingStep(
        Tied(), batch, lambda m, x: F.cross_entropy(m(x).flatten(0, 1), x.flatten()), torch.optim.AdamW
    )
    real = assert_same(step)
    assert real.by_category()["parameters"] == 64 * 32 * 4
    assert real.by_category()["buffers"] == 4 * 32 * 4


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("fails", [False, True])
def test_the_step_stays_as_it_is(fails: bool, device: Any) -> None:
    calls: list[int] = []

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        calls.append(1)
        loss = zoo.classification_loss(model, batch)
        if fails and len(batch[1]) == 2:
            raise ValueError("on purpose")
        return loss

    model = zoo.ResNet(width=8, depth=2)
    optimizer = torch.optim.AdamW(model.parameters())
    step = memlab.TrainingStep(model, zoo.digits_batch(4), loss_fn, optimizer)
    zoo.classification_loss(model, step.batch).backward()
    optimizer.step()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    gradients = [p.grad for p in model.parameters()]
    objects = [id(t) for t in (*model.parameters(), *model.buffers())]
    streams = torch.get_rng_state()
    calls.clear()
    expected = pytest.raises(ValueError, match="on purpose") if fails else contextlib.nullcontext()
    with expected:
        memlab.simulate(step, memlab.Checkpoint() + memlab.MicroBatch(count=2), device=device)
    assert calls == []
    assert objects == [id(t) for t in (*model.parameters(), *model.buffers())]
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))
    assert torch.equal(streams, torch.get_rng_state())
    assert optimizer.param_groups[0]["foreach"] is None
    torch.testing.assert_close((model.state_dict(), optimizer.state_dict()), before, rtol=0, atol=0)
    del gradients
    gc.collect()


def test_instruments_around_a_simulation_see_nothing_of_it() -> None:
    step = zoo.mlp_step()
    with memlab.record() as trace:
        memlab.simulate(step, device="cpu")
        memlab.simulate(step, memlab.MicroBatch(count=2))
    assert trace.peak_bytes == 0
    assert not trace.operators
    assert not trace.saved


def test_a_limit_around_a_simulation() -> None:
    step = zoo.gpt_step(batch=4, context=32)
    needed = memlab.simulate(step, device="cpu").tensor_peak_bytes
    with memlab.limit(needed):
        memlab.simulate(step, device="cpu")
    with (
        pytest.raises(memlab.OutOfMemoryError, match="the simulated step would need") as raised,
        memlab.limit(needed - 1),
    ):
        memlab.simulate(step, device="cpu")
    assert raised.value.budget == needed - 1
    assert raised.value.requested == 1
    assert raised.value.trace is not None
    assert raised.value.trace.source == "simulated"


def test_compiled_modules_are_simulated_as_written() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    batch = torch.randn(4, 16), torch.randn(4, 16)
    plain = memlab.simulate(memlab.TrainingStep(model, batch, nn.MSELoss(), torch.optim.SGD), device="cpu")
    compiled = memlab.TrainingStep(torch.compile(model, backend="eager"), batch, nn.MSELoss(), torch.optim.SGD)
    assert memlab.simulate(compiled, device="cpu").peak_bytes == plain.peak_bytes


def test_torchscript_is_refused() -> None:
    model = torch.jit.script(nn.Sequential(nn.Linear(4, 4)))
    step = memlab.TrainingStep(model, torch.ones(2, 4), lambda m, x: m(x).sum())
    with pytest.raises(memlab.MemlabError, match=r"TorchScript.*cannot be simulated"):
        memlab.simulate(step)


def test_an_operator_whose_shapes_nobody_told() -> None:
    with torch.library._scoped_library("memlab_test", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CPU")
        step = linear_step(lambda m, x: m(x + torch.ops.memlab_test.twice(x)).sum())
        assert memlab.measure(step, allocator=False)
        with pytest.raises(memlab.MemlabError, match=r"memlab_test.*cannot be simulated.*register_fake"):
            memlab.simulate(step, device="cpu")


def test_wrong_arguments() -> None:
    step = zoo.mlp_step()
    with pytest.raises(memlab.MemlabError, match=r"simulate\(\) takes a TrainingStep, not ResNet"):
        memlab.simulate(zoo.ResNet())  # type: ignore[arg-type]
    with pytest.raises(memlab.MemlabError, match=r"device is 'tpu': there is 'cuda'.*and 'cpu'"):
        memlab.simulate(step, device="tpu")  # type: ignore[arg-type]
    with pytest.raises(memlab.MemlabError, match="is no strategy"):
        memlab.simulate(step, "checkpoint")  # type: ignore[arg-type]


# -- the modes ---------------------------------------------------------------------------------------------------------


def test_every_device_is_the_cpu() -> None:
    with faking():
        made = [
            torch.ones(2, device="cuda"),
            torch.ones(2).cuda(),
            torch.ones(2).to("cuda:1"),
            torch.ones(2).to(torch.device("cuda"), torch.float16),
            torch.ones(2).to(device="cuda", dtype=torch.float16),
            torch.zeros_like(torch.ones(2), device="cuda"),
            torch.ones(2).new_zeros(3, device="cuda"),
            torch.tensor([1.0], device="cuda"),
            torch.arange(3, device=torch.device("cuda", 0)),
            nn.Linear(2, 2, device="cuda").weight,
            nn.Linear(2, 2).to("cuda").weight,
            nn.Linear(2, 2).cuda().bfloat16().weight,
        ]
        assert {tensor.device.type for tensor in made} == {"cpu"}
        assert [made[3].dtype, made[4].dtype, made[11].dtype] == [torch.float16, torch.float16, torch.bfloat16]


def test_rounding_is_the_allocators() -> None:
    trace = memlab.simulate(zoo.mlp_step(), device="cuda")
    blocks = collections.Counter[int]()
    for allocation in trace.peak.allocations:
        blocks[allocation.operator_number] += allocation.nbytes
    assert sum(blocks.values()) == trace.peak_bytes
    assert trace.peak_bytes % 512 == 0
    assert trace.peak_bytes >= trace.tensor_peak_bytes
    assert distinct_bytes([]) == 0
    assert any("context" in sentence for sentence in trace.absent)


def test_what_is_offloaded_is_not_taken_off_a_gpu() -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        with torch.autograd.graph.save_on_cpu():
            return model(batch).sum()

    step = memlab.TrainingStep(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8), loss)
    assert any("offloading" in sentence for sentence in memlab.simulate(step).absent)
    assert not any("offloading" in sentence for sentence in memlab.simulate(step, device="cpu").absent)
