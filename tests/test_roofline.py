"""The estimate of time: by hand on single operators, by formulas on a GPT, and what it is estimated from."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memlab
from memlab import zoo
from memlab.flops import work
from memlab.modes import LightMode
from memlab.roofline import DEVICES, Device, device_named, recompute_overhead
from memlab.trace import PHASES, Operator, Place, Trace
from memlab.views.words import estimate

A100 = DEVICES["A100 40GB"]
INFINITE = 1e300


def _trace(*operators):
    """A trace in which nothing but these operators happened: (flops, moved_bytes, dtype, name, phase)."""
    return Trace(
        (),
        tuple(
            Operator(Place(phase, operator=name), 0, 0.0, flops, moved, dtype)
            for flops, moved, dtype, name, phase in operators
        ),
        (),
    )


def _only(batch, loss, parameter):
    """A step whose model holds one parameter, and what it does."""
    model = nn.Module()
    model.weight = nn.Parameter(parameter)
    return memlab.TrainingStep(model, batch, lambda model, batch: loss(model.weight, batch))


# -- a roofline by hand ------------------------------------------------------------------------------------------------


def test_a_product_and_a_sum_by_hand():
    """Forward of (x @ w) + b on 512 x 512 numbers: one operator is held up by arithmetic, one by memory."""
    n = 512
    x, b = torch.rand(n, n), torch.rand(n, n)
    step = _only((x, b), lambda w, batch: ((batch[0] @ w) + batch[1]).sum(), torch.rand(n, n))
    device = Device(2**30, bandwidth=1e9, flops={"float32": 50e9})
    product = max(2 * n**3 / 50e9, 3 * n * n * 4 / 1e9)
    added = 3 * n * n * 4 / 1e9
    total = (n * n + 1) * 4 / 1e9
    assert product == 2 * n**3 / 50e9
    assert memlab.measure(step).estimate_seconds(device, "forward") == pytest.approx(product + added + total, rel=1e-3)


def test_an_operator_takes_the_longer_of_two_times_and_they_add_up():
    compute, memory = (312e12, 1, "bfloat16", "aten::mm", "forward"), (1, 1555e9, "float32", "aten::add", "backward")
    assert _trace(compute).estimate_seconds(A100) == 1.0
    assert _trace(memory).estimate_seconds(A100) == 1.0
    assert _trace(compute, memory, memory).estimate_seconds("a100") == 3.0


@pytest.mark.parametrize(
    ("dtype", "operator", "device", "peak"),
    [
        ("float32", "aten::mm", "A100", 19.5e12),
        ("float32", "aten::convolution", "A100", 156e12),  # cuDNN's precision is TF32 by default
        ("float64", "aten::convolution", "A100", 19.5e12),
        ("bfloat16", "aten::mm", "H100", 989.4e12),
        ("bfloat16", "aten::mm", "T4", 8.1e12),  # no tensor cores for it
        ("float16", "aten::mm", "T4", 65e12),
        ("float32", "aten::convolution", "V100", 15.7e12),
        ("complex64", "aten::mm", "L4", 30.3e12),
    ],
)
def test_arithmetic_is_at_the_peak_of_its_type(dtype, operator, device, peak):
    trace = _trace((10**15, 1, dtype, operator, "forward"))
    assert trace.estimate_seconds(device) == pytest.approx(10**15 / peak)


def test_convolutions_of_float32_use_tf32_as_pytorch_does_by_default():
    assert torch.backends.cudnn.allow_tf32
    assert torch.get_float32_matmul_precision() == "highest"


# -- devices -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DEVICES)
def test_figures_of_devices_are_plausible_and_have_a_source(name):
    device = DEVICES[name]
    assert device.name == name
    assert "NVIDIA" in device.source
    assert any(str(year) in device.source for year in range(2018, 2026))
    assert 2**33 < device.memory < 2**38
    assert 1e11 < device.bandwidth < 1e13
    peaks = device.flops
    assert {"float32", "float16", "float64"} <= set(peaks) <= {"float32", "float16", "bfloat16", "float64", "tf32"}
    assert 1e11 < peaks["float64"] <= peaks["float32"] < peaks["float16"] < 1e15  # none above: sparse figures are
    assert peaks.get("bfloat16", peaks["float16"]) == peaks["float16"]
    assert ("bfloat16" in peaks) == ("tf32" in peaks) == (name.split()[0] not in ("T4", "V100"))
    assert peaks["float32"] <= peaks.get("tf32", peaks["float32"]) <= peaks["float16"]


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("t4", "T4"),
        ("A100", "A100 40GB"),
        ("a100-80gb", "A100 80GB"),
        ("A100 80 GB", "A100 80GB"),
        ("H100", "H100 SXM"),
        ("h100 pcie", "H100 PCIe"),
        ("rtx4090", "RTX 4090"),
        ("3090", "RTX 3090"),
        ("v100", "V100 16GB"),
    ],
)
def test_names_are_read_in_any_way_people_write_them(given, name):
    assert device_named(given) is DEVICES[name]


@pytest.mark.parametrize("name", ["A1", "A1000", "RTX", "", "cuda", None, 4])
def test_an_unknown_device_is_told_which_there_are(name):
    with pytest.raises(memlab.MemlabError, match=r"is no device that memlab knows: T4, .*RTX 4090; or give figures of"):
        _trace((1, 1, "", "aten::mm", "forward")).estimate_seconds(name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, 1.0, {"bfloat16": 1.0}), r"flops is \{'bfloat16': 1.0\}: give peaks by type, \{'float32': 19.5e12, ...\}"),
        ((1, 1.0, 1e12), "flops is 1000000000000.0: give peaks by type"),
        ((0, 1.0, {"float32": 1.0}), "memory of a device of your own is 0: give a number above 0"),
        ((1, math.nan, {"float32": 1.0}), "bandwidth of a device of your own is nan"),
        ((1, "fast", {"float32": 1.0}), "bandwidth of a device of your own is 'fast'"),
        ((1, 1.0, {"float32": -1}), "float32 of a device of your own is -1"),
    ],
)
def test_a_device_of_ones_own_that_is_none(arguments, message):
    with pytest.raises(memlab.MemlabError, match=message):
        Device(*arguments)


# -- traces ------------------------------------------------------------------------------------------------------------


def test_a_trace_whose_work_nobody_counted():
    model = nn.Linear(4, 4)
    with memlab.record(model) as trace:
        model(torch.ones(2, 4)).sum().backward()
    for call in (trace.estimate_seconds, lambda: recompute_overhead(trace, "T4"), Trace((), (), ()).estimate_seconds):
        with pytest.raises(memlab.MemlabError, match=r"nobody counted the arithmetic .* measure\(\) and simulate\(\)"):
            call()


def test_an_unknown_phase():
    with pytest.raises(
        memlab.MemlabError, match="phase is 'update': there are forward, backward, recompute, optimizer"
    ):
        _trace((1, 1, "", "aten::mm", "forward")).estimate_seconds("T4", "update")


@pytest.fixture(scope="module")
def gpt():
    return zoo.gpt_step(batch=2, context=32, width=64, depth=3, heads=2)


STRATEGIES = [
    memlab.Baseline(),
    memlab.Checkpoint(),
    memlab.MicroBatch(count=2) + memlab.MixedPrecision("bf16"),
    memlab.Checkpoint() + memlab.OptimizerInBackward(),
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_simulated_and_measured_steps_give_the_same_estimate(gpt, strategy):
    measured, simulated = memlab.measure(gpt, strategy, allocator=False), memlab.simulate(gpt, strategy, device="cpu")
    for phase in (None, *PHASES):
        assert simulated.estimate_seconds("T4", phase) == measured.estimate_seconds("T4", phase)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_phases_add_up_to_the_whole(gpt, strategy):
    trace = memlab.simulate(gpt, strategy)
    parts = {phase: trace.estimate_seconds("L4", phase) for phase in PHASES}
    assert sum(parts.values()) == pytest.approx(trace.estimate_seconds("L4"), rel=1e-12)
    assert (parts["recompute"] > 0) == ("checkpoint" in str(strategy))
    assert min(parts["forward"], parts["backward"], parts["optimizer"]) > 0


def test_more_work_takes_longer_and_a_faster_device_less_time():
    def trace(**sizes):
        return memlab.simulate(
            zoo.gpt_step(**{"batch": 2, "context": 32, "width": 64, "depth": 2, "heads": 2, **sizes})
        )

    small = trace().estimate_seconds("T4")
    for larger in ({"batch": 4}, {"context": 64}, {"width": 128}, {"depth": 4}):
        assert trace(**larger).estimate_seconds("T4") > small
    by_bandwidth = sorted(("A100", "A100 80GB", "H100", "H200"), key=lambda name: device_named(name).bandwidth)
    times = [trace().estimate_seconds(name) for name in by_bandwidth]
    assert times == sorted(times, reverse=True)
    assert len(set(times)) == len(times)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_gpts_arithmetic_is_six_for_each_parameter_and_token(device):
    """And 12 for each layer, token, token that it looks at and number of width, in attention (Chowdhery et al. 2022,
    appendix B); and once more a product of queries and keys, which fused attention makes again in backward."""
    tokens, context, width, depth, vocab = 2 * 128, 128, 128, 4, 256
    step = zoo.gpt_step(batch=2, context=context, width=width, depth=depth)
    in_products = sum(p.numel() for p in step.model.parameters() if p.dim() == 2) - (vocab + context) * width
    attention = (12 + 2) * depth * context * width
    assert memlab.simulate(step, device=device).flops == pytest.approx((6 * in_products + attention) * tokens, rel=1e-9)
    wide = memlab.simulate(zoo.gpt_step(batch=2, context=context, width=1024, depth=depth, lazy=True), device=device)
    parameters = wide.by_category()["parameters"] / 4
    assert wide.flops == pytest.approx(6 * parameters * tokens, rel=0.03)


def test_recomputation_costs_a_third_at_most_where_arithmetic_decides(gpt):
    compute_bound = Device(1, INFINITE, {"float32": 1e12})
    plain, checkpointed = memlab.simulate(gpt), memlab.simulate(gpt, memlab.Checkpoint())
    overhead = recompute_overhead(checkpointed, compute_bound)
    assert 1.2 <= 1 + overhead <= 1.34
    assert checkpointed.flops / plain.flops == pytest.approx(1 + overhead)
    assert recompute_overhead(plain, compute_bound) == 0.0


def test_in_words_it_is_an_estimate_and_at_least():
    plain = (10**12, 1, "float32", "aten::mm", "forward")
    again = (10**11, 1, "float32", "aten::mm", "recompute")
    device = Device(1, INFINITE, {"float32": 1e12}, "Z1")
    assert estimate(_trace(plain), device) == "An estimate for Z1: at least 1.00 s a step."
    assert estimate(_trace(plain, again), device) == (
        "An estimate for Z1: at least 1.10 s a step; recomputation adds at least 100 ms of that, 10 %."
    )


# -- the bytes that operators move -------------------------------------------------------------------------------------


def _moved(run):
    """The bytes that the operators of a call move, by operator."""
    found = {}

    class Counts(LightMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            name = func._schema.name.removeprefix("aten::")
            found[name] = found.get(name, 0) + work(func, args, kwargs, out).moved_bytes
            return out

    with Counts():
        run()
    return found


N, ROWS, VOCAB = 64, 4, 50
X, Y, Z = torch.rand(N, N), torch.rand(N, N), torch.rand(N, N)
TABLE, TOKENS = torch.rand(VOCAB, N), torch.arange(ROWS)
FULL = N * N * 4
SPARSE = torch.eye(ROWS).to_sparse()


@pytest.mark.parametrize(
    ("run", "moved"),
    [
        (lambda: X + Y, {"add": 3 * FULL}),
        (lambda: X * X, {"mul": 2 * FULL}),
        (lambda: X @ Y, {"mm": 3 * FULL}),
        (lambda: X.bfloat16(), {"_to_copy": FULL + FULL // 2}),
        (lambda: X.view(-1), {"view": 0}),
        (lambda: X.t()[2:, None], {"t": 0, "slice": 0, "unsqueeze": 0}),
        (lambda: torch.empty(N, N), {"empty": 0}),
        (lambda: torch.zeros(N, N), {"zeros": FULL}),
        (lambda: torch.ones_like(X), {"ones_like": FULL}),
        (lambda: X.clone(), {"clone": 2 * FULL}),
        (lambda: Z.add_(X), {"add_": 3 * FULL}),
        (lambda: Z.mul_(2), {"mul_": 2 * FULL}),
        (lambda: Z.addcdiv_(X, Y), {"addcdiv_": 4 * FULL}),
        (lambda: Z.zero_(), {"zero_": FULL}),
        (lambda: Z.copy_(X), {"copy_": 2 * FULL}),
        (lambda: torch.add(X, Y, out=Z), {"add": 3 * FULL}),
        (lambda: torch._foreach_add_([Z, Z.clone()], [X, Y]), {"clone": 2 * FULL, "_foreach_add_": 6 * FULL}),
        (lambda: torch._foreach_mul([X, Y], 2.0), {"_foreach_mul": 4 * FULL}),
        (lambda: X[:1].expand(N, N) + Y, {"slice": 0, "expand": 0, "add": 3 * FULL}),  # its storage is all of X
        (lambda: torch.ones(1).expand(N, N).clone(), {"ones": 4, "expand": 0, "clone": 4 + FULL}),
        (lambda: F.embedding(TOKENS, TABLE), {"embedding": ROWS * (8 + N * 4)}),
        (lambda: X[TOKENS], {"index": ROWS * (8 + N * 4)}),
        (lambda: Z.index_add_(0, TOKENS, X[:ROWS]), {"slice": 0, "index_add_": ROWS * (8 + N * 4)}),
        (lambda: SPARSE.clone(), {"clone": 2 * ROWS * (2 * 8 + 4)}),
    ],
)
def test_what_operators_move(run, moved):
    assert _moved(run) == moved


def test_a_loss_reads_only_the_targets_it_is_about():
    logits, targets = torch.rand(ROWS, VOCAB, requires_grad=True), torch.arange(ROWS)
    found = _moved(lambda: F.cross_entropy(logits, targets).backward())
    numbers = ROWS * VOCAB * 4
    assert found["_log_softmax"] == 2 * numbers
    assert found["nll_loss_backward"] == numbers + ROWS * 8 + 2 * 4
    assert found["_log_softmax_backward_data"] == 3 * numbers


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_of_cuda_is_counted(dtype):
    """A simulated GPU takes CUDA's kernels: two products of T x T x width forward, five backward."""
    batch, heads, tokens, width = 2, 3, 16, 8

    def loss(weight, batch):
        q, k, v = (weight.to(getattr(torch, dtype)) for _ in range(3))
        return F.scaled_dot_product_attention(q, k, v).sum().float()

    trace = memlab.simulate(_only(torch.ones(1), loss, torch.rand(batch, heads, tokens, width)))
    counted = {o.place.operator: o.flops for o in trace.operators if o.flops}
    kernel = "efficient" if dtype == "float32" else "flash"
    product = 2 * batch * heads * tokens * tokens * width
    assert counted == {
        f"aten::_scaled_dot_product_{kernel}_attention": 2 * product,
        f"aten::_scaled_dot_product_{kernel}_attention_backward": 5 * product,
    }
