"""What strangers do in a training step, simulated: each thing that once went wrong, with the right answer."""

from __future__ import annotations

import gc
import math
import sysconfig
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import memlab
from memlab.simulation.faking import faking
from tests.test_simulate import assert_same

DEVICES: list[Any] = ["cpu", "cuda"]
Loss = Callable[[Any, Any], torch.Tensor]


def mean(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def step(loss_fn: Loss = mean, optimizer: Any = torch.optim.AdamW, *, batch: Any = None) -> memlab.TrainingStep:
    batch = torch.randn(8, 16) if batch is None else batch
    return memlab.TrainingStep(nn.Sequential(nn.Linear(16, 8), nn.ReLU()), batch, loss_fn, optimizer)


# -- operators for which PyTorch has no shapes, or others than its kernels ---------------------------------------------


def ctc(model: nn.Module, batch: Any) -> torch.Tensor:
    x, targets, lengths = batch
    return F.ctc_loss(model(x).log_softmax(-1), targets, torch.full((4,), 12), lengths)


def from_a_gamma(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.distributions.Gamma(model(x).exp(), torch.tensor(1.0), validate_args=False).rsample().mean()


SHAPES: dict[str, Callable[[], memlab.TrainingStep]] = {
    "multi_margin": lambda: step(nn.MultiMarginLoss(), batch=(torch.randn(8, 16), torch.arange(8))),
    "multilabel_margin": lambda: step(
        nn.MultiLabelMarginLoss(), batch=(torch.randn(8, 16), torch.randint(-1, 8, (8, 8)))
    ),
    "ctc": lambda: step(ctc, batch=(torch.randn(12, 4, 16), torch.randint(1, 8, (4, 5)), torch.tensor([5, 3, 2, 4]))),
    "gamma": lambda: step(from_a_gamma),
    "fused sgd": lambda: step(optimizer=lambda p: torch.optim.SGD(p, momentum=0.9, fused=True)),
    "fused adagrad": lambda: step(optimizer=lambda p: torch.optim.Adagrad(p, fused=True)),
    "adafactor": lambda: step(optimizer=torch.optim.Adafactor),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_that_pytorch_does_not_know(name: str) -> None:
    assert_same(SHAPES[name]())
    memlab.simulate(SHAPES[name]())


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags(mode: Any) -> None:
    batch = torch.randint(0, 50, (20,)), torch.tensor([0, 4, 9, 15])
    bag = nn.EmbeddingBag(50, 8, mode=mode)
    assert_same(memlab.TrainingStep(bag, batch, lambda m, b: m(*b).square().mean(), torch.optim.SGD))


GROUPED = {"2d, 3d": ((8, 8), (3, 8, 12)), "2d, 2d": ((8, 8), (8, 12)), "3d, 3d": ((3, 4, 8), (3, 8, 12))}


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this PyTorch has no grouped matrix product")
@pytest.mark.parametrize("shapes", GROUPED)
def test_grouped_products_of_experts(shapes: str) -> None:
    a, b = (torch.randn(shape) for shape in GROUPED[shapes])
    ends = None if shapes == "3d, 3d" else torch.tensor([2, 5, 8], dtype=torch.int32)
    real = torch._grouped_mm(a, b, offs=ends)
    with faking() as mode:
        fake = torch._grouped_mm(mode.twin(a), mode.twin(b), offs=ends)
        assert (fake.shape, fake.stride()) == (real.shape, real.stride())
        assert fake.untyped_storage().nbytes() == real.untyped_storage().nbytes()


# -- masks -------------------------------------------------------------------------------------------------------------

MASKS: dict[str, Callable[[], torch.Tensor]] = {
    "PyTorch's": lambda: nn.Transformer.generate_square_subsequent_mask(6),
    "the tutorial's": lambda: torch.zeros(6, 6).masked_fill((torch.triu(torch.ones(6, 6)) == 1).t() == 0, -math.inf),
    "boolean": lambda: torch.triu(torch.ones(6, 6, dtype=torch.bool), 1),
}


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_encoders_ask_whether_their_mask_is_causal(mask: str, captured: bool) -> None:
    before = MASKS[mask]()
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.0), 1, enable_nested_tensor=False)

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x, mask=before if captured else MASKS[mask]()).square().mean()  # type: ignore[no-any-return]

    assert_same(memlab.TrainingStep(model, torch.randn(6, 4, 16), loss_fn, torch.optim.SGD))


# -- checks and decisions ----------------------------------------------------------------------------------------------


def library(source: str) -> dict[str, Any]:
    """What a file of an installed package defines (whose `assert` pytest does not rewrite)."""
    space: dict[str, Any] = {"torch": torch, "math": math, "F": F}
    exec(compile(source, sysconfig.get_paths()["purelib"] + "/somebodys/net.py", "exec"), space)
    return space


CHECKS = """
def checks(model, x):
    y = model(x)
    assert not torch.isnan(y).any()
    assert (y < 1e9).all(), "large"
    if torch.isinf(y).any() or y.isnan().any():
        raise ValueError(f"bad {y}")
    if not torch.isfinite(y).all():
        raise FloatingPointError
    loss = y.mean()
    if not math.isfinite(loss.item()) or math.isnan(float(loss)):
        return None
    if loss.item() > 1e6:
        raise OverflowError
    max(0.0, loss.item(), min(loss.item(), 1.0))
    if loss.item() == 0:
        return None
    return F.gaussian_nll_loss(loss[None], loss[None], loss[None].square())
"""


@pytest.mark.parametrize("device", DEVICES)
def test_checks_pass(device: Any) -> None:
    assert memlab.simulate(step(library(CHECKS)["checks"]), device=device).notes == ()


def decides(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = model(x)
    if (y > 0).any():
        y = y * 2
    return y.mean()  # type: ignore[no-any-return]


def raises_or_decides(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = model(x)
    if y.mean() > 0:
        if len(y) > 100:
            raise ValueError
        return y.sum()  # type: ignore[no-any-return]
    return y.mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("loss_fn", [decides, raises_or_decides])
def test_what_goes_on_in_both_cases_is_refused(loss_fn: Loss) -> None:
    with pytest.raises(memlab.MemlabError, match=rf"test_simulate_wild\.py:\d+ in {loss_fn.__name__} decides by"):
        memlab.simulate(step(loss_fn), device="cpu")


def test_a_decision_in_a_package_names_the_users_line_too() -> None:
    decide = library("def decide(y):\n    return y if y.sum() > 0 else -y\n")["decide"]

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return decide(model(x)).mean()  # type: ignore[no-any-return]

    line = r"net\.py:2 in decide \(called from test_simulate_wild\.py:\d+ in loss_fn\) decides by the value"
    with pytest.raises(memlab.MemlabError, match=line):
        memlab.simulate(step(loss_fn), device="cpu")


def test_counting_with_a_number_of_bins() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        return y.mean() * torch.bincount(y.argmax(-1), minlength=8).sum()

    assert_same(step(loss_fn))


# -- real tensors that nobody looks for --------------------------------------------------------------------------------


class Elsewhere(types.ModuleType):
    """Another file's globals, which no walk enters."""

    def __init__(self) -> None:
        super().__init__("elsewhere")
        self.net, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.scale, self.state = nn.Parameter(torch.ones(8)), torch.zeros(8)

    def tensors(self) -> list[torch.Tensor]:
        return [*self.net.parameters(), *self.norm.state_dict().values(), self.scale, self.state]


def trains(e: Elsewhere, y: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(e.net.parameters(), lr=0.1, momentum=0.9)
    e.net(y.detach()).mean().backward()
    optimizer.step()


def sets_gradient(e: Elsewhere, y: torch.Tensor) -> None:
    e.net.weight.grad = torch.zeros(8, 8)


def sets_data(e: Elsewhere, y: torch.Tensor) -> None:
    e.net.weight.data = torch.zeros(8, 8) + y.detach().mean()


def adds(e: Elsewhere, y: torch.Tensor) -> None:
    e.state.add_(y.detach().mean(0))
    torch._foreach_add_([e.state], [y.detach().mean(0)])
    torch.mul(y.detach()[0], 2, out=e.state)
    e.state[0] = 1.0


ACTS: dict[str, Callable[[Elsewhere, torch.Tensor], Any]] = {
    "gradients": lambda e, y: (e.net(y) * e.scale).mean(),
    "statistics": lambda e, y: e.norm(y).mean(),
    "trains": trains,
    "sets_gradient": sets_gradient,
    "sets_data": sets_data,
    "adds": adds,
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("act", ACTS)
def test_nothing_is_written_into_real_tensors(act: str, device: Any) -> None:
    elsewhere = Elsewhere()
    before = [tensor.clone() for tensor in elsewhere.tensors()]
    identities = [id(tensor) for tensor in (*elsewhere.net.parameters(), elsewhere.scale, elsewhere.state)]

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        more = ACTS[act](elsewhere, y)
        return y.mean() + (0 if more is None else more)  # type: ignore[no-any-return]

    memlab.simulate(step(loss_fn), device=device)
    assert identities == [id(tensor) for tensor in (*elsewhere.net.parameters(), elsewhere.scale, elsewhere.state)]
    for now, then in zip(elsewhere.tensors(), before, strict=True):
        assert not isinstance(now, FakeTensor)
        assert now.grad is None
        torch.testing.assert_close(now.detach(), then.detach(), rtol=0, atol=0)


def test_hidden_modules_count_as_in_a_measurement() -> None:
    elsewhere = Elsewhere()
    elsewhere.net.requires_grad_(False)
    assert_same(step(lambda model, x: elsewhere.net(model(x)).mean()))


def fakes() -> int:
    gc.collect()
    return sum(type(found) is FakeTensor for found in gc.get_objects())


def test_no_fake_tensor_outlives_its_simulation() -> None:
    elsewhere, before = Elsewhere(), fakes()
    for device in DEVICES:
        memlab.simulate(
            step(lambda model, x: elsewhere.net(model(x)).mean()), memlab.MicroBatch(count=2), device=device
        )
    assert fakes() == before


# -- a loop written for a GPU ------------------------------------------------------------------------------------------


def gpu_loop(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    assert torch.cuda.is_available()
    assert (torch.cuda.device_count(), torch.cuda.get_device_capability()) == (1, (8, 0))
    torch.manual_seed(0)
    torch.cuda.reset_peak_memory_stats()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    x = x.pin_memory().cuda(non_blocking=True)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.device("cuda"):
        x = x + torch.zeros(16)
    torch.cuda.current_stream().wait_stream(stream)
    x.record_stream(stream)
    with torch.autocast("cuda", torch.bfloat16, enabled=torch.cuda.is_available()):
        loss = mean(model, x)
    end.record()
    torch.cuda.synchronize()
    assert f"{start.elapsed_time(end)} {torch.cuda.max_memory_allocated() / 2**20:.0f}"
    torch.cuda.empty_cache()
    torch.set_default_device("cuda")
    return loss


def test_a_loop_for_a_gpu() -> None:
    before = {name: vars(torch.cuda)[name] for name in ("is_available", "synchronize", "manual_seed_all")}
    classes = [dict(vars(kind)) for kind in (torch.cuda.Stream, torch.cuda.Event, torch.Tensor)]
    queued = len(torch.cuda._queued_calls)  # type: ignore[attr-defined]
    trace = memlab.simulate(step(gpu_loop))
    assert "torch.bfloat16" in {f"torch.{saved.dtype.removeprefix('torch.')}" for saved in trace.saved}
    assert before == {name: vars(torch.cuda)[name] for name in before}
    assert classes == [dict(vars(kind)) for kind in (torch.cuda.Stream, torch.cuda.Event, torch.Tensor)]
    assert queued == len(torch.cuda._queued_calls)  # type: ignore[attr-defined]
    assert torch.get_default_device().type == "cpu"


@pytest.mark.parametrize("device", DEVICES)
def test_a_default_device_around_the_simulation(device: Any) -> None:
    plain = memlab.simulate(step(), device=device).tensor_peak_bytes
    known = step()
    try:
        torch.set_default_device("cuda")
        assert memlab.simulate(known, device=device).tensor_peak_bytes == plain
        assert torch._C._len_torch_function_stack() == 1
    finally:
        torch.set_default_device(None)
    with torch.device("cuda"):
        assert memlab.simulate(known, device=device).tensor_peak_bytes == plain


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.ones(16, device="cuda") * x.detach().mean().item()
        return self.linear(x).relu() * scale.to("cuda")  # type: ignore[no-any-return]


@pytest.mark.parametrize("device", DEVICES)
def test_regions_that_are_recomputed_ask_for_the_gpu_again(device: Any) -> None:
    blocks = nn.Sequential(*[Block() for _ in range(4)])
    made = memlab.TrainingStep(blocks, torch.randn(8, 16), mean, torch.optim.SGD)
    assert "recompute" in memlab.simulate(made, memlab.Checkpoint("*"), device=device).by_phase()


FOREACH = ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")


@pytest.mark.parametrize("name", FOREACH)
def test_optimizers_are_foreach_on_a_gpu(name: str) -> None:
    kind = getattr(torch.optim, name)
    default, foreach = (
        memlab.simulate(step(optimizer=optimizer)).by_category("optimizer")
        for optimizer in (kind, lambda parameters: kind(parameters, foreach=True))
    )
    assert default == foreach


def test_optimizers_that_are_not_foreach_on_a_gpu() -> None:
    rate = torch.tensor(1e-3)  # `if foreach and isinstance(lr, Tensor) and not capturable: foreach = False` (adam.py)
    for_loop, tensor_rate = (
        memlab.simulate(step(optimizer=optimizer)).tensor_peak_bytes
        for optimizer in (
            lambda parameters: torch.optim.Adam(parameters, foreach=False),
            lambda parameters: torch.optim.Adam(parameters, lr=rate),
        )
    )
    assert abs(for_loop - tensor_rate) <= 8
    assert memlab.simulate(step(optimizer=lambda parameters: torch.optim.Adam(parameters, capturable=True)))


# -- others in the process ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_a_real_step_goes_on_in_another_thread(device: Any) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1), nn.BatchNorm1d(16), nn.LayerNorm(16), nn.Softmax(-1))
    optimizer, x, failures = torch.optim.AdamW(model.parameters()), torch.randn(8, 16), []

    def simulates() -> None:
        try:
            memlab.simulate(step(), device=device)
        except BaseException as error:
            failures.append(error)

    thread, steps = threading.Thread(target=simulates), 0
    thread.start()
    try:
        while thread.is_alive() or not steps:
            mean(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    finally:
        thread.join()
    assert not failures
    assert steps > 0
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


def test_simulations_wait_for_each_other() -> None:
    expected = [memlab.simulate(step(), device=device).tensor_peak_bytes for device in DEVICES]
    found: dict[str, int] = {}

    def simulates(device: Any) -> None:
        found[device] = memlab.simulate(step(), device=device).tensor_peak_bytes

    threads = [threading.Thread(target=simulates, args=(device,)) for device in DEVICES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[device] for device in DEVICES] == expected


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError, SystemExit])
@pytest.mark.parametrize("device", DEVICES)
def test_interrupted_in_backward(device: Any, kind: type[BaseException]) -> None:
    def stop(_: Any) -> None:
        raise kind("stop")

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = mean(model, x)
        torch.set_default_dtype(torch.float64)
        torch.autocast("cpu").__enter__()
        warnings.simplefilter("error")
        loss.register_hook(stop)
        return loss

    def state() -> Any:
        return (
            torch.get_default_dtype(),
            torch.is_autocast_enabled("cpu"),
            (torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()),
            list(warnings.filters),
            torch._C._len_torch_function_stack(),
            torch.autograd._engine_run_backward,  # type: ignore[attr-defined]
            (math.isnan, torch.get_rng_state().tolist()),
            torch._C._dispatch_dump_table("aten::dropout"),
        )

    made, before, alive = step(loss_fn), state(), fakes()
    with pytest.raises(kind, match="stop"):
        memlab.simulate(made, device=device)
    assert state() == before
    assert fakes() == alive
