"""A CPU build that saves what CUDA saves: against lists from CUDA's own dispatch, and each difference by its bytes."""

import collections
import contextlib
import itertools
import json
import pathlib
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from memlab import ledger
from memlab.simulation.as_cuda import absent, as_cuda, autocast, composites, policies
from memlab.simulation.fake import FakeMode
from tests.cuda_reference import networks

HERE = pathlib.Path(__file__).parent
REFERENCE = json.loads((HERE / "cuda_reference" / "reference.json").read_text())
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


@contextlib.contextmanager
def simulated():
    with FakeMode() as mode, as_cuda(mode):
        yield mode


def region(dtype):
    return torch.autocast("cuda", dtype) if dtype else contextlib.nullcontext()


def saved(output, *given):
    """(each saved tensor as (node, slot, type, shape) with its count, bytes of each storage), without those given."""
    own = {tensor.untyped_storage()._cdata for tensor in given}
    storages, found = {}, collections.Counter()
    for entry in ledger.walk([output]).entries:
        storage = entry.tensor.untyped_storage()
        if storage._cdata not in own:
            storages[storage._cdata] = storage.nbytes()
            dtype = str(entry.tensor.dtype).removeprefix("torch.")
            found[entry.node, entry.slot.split(".")[1], dtype, tuple(entry.tensor.shape)] += 1
    return found, sorted(storages.values())


def kept(found, node):
    """{slot: (type, shape)} of the one node of this name."""
    return {slot: (dtype, shape) for name, slot, dtype, shape in found if name == f"{node}Backward0"}


def nodes(found):
    return {name.removesuffix("Backward0") for name, *_ in found}


# -- the reference -----------------------------------------------------------------------------------------------------


def convert(model, inputs, dtype):
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.detach().to(dtype))
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)
    return [tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in inputs]


@pytest.mark.parametrize("name", sorted(REFERENCE))
def test_saves_what_cuda_saves(name):
    reference = REFERENCE[name]
    kind, precision, *pure = name.split()
    with simulated():
        model, inputs = networks.build(kind, "cpu")
        if pure:
            inputs = convert(model, inputs, getattr(torch, pure[-1]))
        with region(None if precision == "-" else getattr(torch, precision)):
            loss = model(*inputs)
        found, storages = saved(loss, *model.parameters(), *model.buffers(), *inputs)
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
    wanted = {(s["node"], s["slot"], s["dtype"], tuple(s["shape"])): s["count"] for s in reference["saved"]}
    assert found == wanted
    assert storages == reference["storage_bytes"]
    assert sum(storages) == reference["total_bytes"]


# -- the table of autocast ---------------------------------------------------------------------------------------------


def listed(header, name):
    """The operators of one `AT_FORALL_` list."""
    text = re.search(rf"#define AT_FORALL_{name}\(_\)(.*?[^\\])\n", header, re.DOTALL).group(1)
    return {".".join(re.findall(r"\w+", item)) for item in re.findall(r"_\(([^)]*)\)", text)}


needs_2_13 = pytest.mark.skipif(VERSION < (2, 13), reason="the table is that of torch 2.13; older lists are shorter")


@needs_2_13
def test_the_table_is_that_of_the_header():
    header = (pathlib.Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h").read_text()
    assert set(policies.LOWER_PRECISION) == listed(header, "LOWER_PRECISION_FP")
    assert set(policies.FP32) == listed(header, "FP32")
    assert set(policies.FP32_SET_DTYPE) == listed(header, "FP32_SET_OPT_DTYPE")
    assert set(policies.PROMOTE) == listed(header, "PROMOTE")
    appended = header[header.index("#define AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(_)") :]
    assert set(policies.FP32_APPEND_DTYPE) == set(re.findall(r'"(norm\.\w+)"', appended))


@needs_2_13
def test_the_table_holds_all_that_cuda_casts_and_nothing_else():
    registered = set(torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA"))
    registered.discard("aten::_cudnn_rnn")  # in CUDA builds; not emulated
    table = itertools.chain(
        policies.LOWER_PRECISION,
        policies.LOWER_PRECISION_CUDNN,
        policies.FP32,
        policies.FP32_SET_DTYPE,
        policies.FP32_APPEND_DTYPE,
        policies.PROMOTE,
        policies.BANNED,
    )
    assert sorted(table) == sorted(name.removeprefix("aten::") for name in registered)


@pytest.mark.parametrize(
    ("call", "dtype"),
    [
        (lambda x, h: x @ x, BF16),
        (lambda x, h: torch.einsum("ij,jk->ik", x, h), BF16),
        (lambda x, h: h.exp(), FP32),
        (lambda x, h: h.softmax(-1), FP32),
        (lambda x, h: h.softmax(-1, dtype=BF16), BF16),
        (lambda x, h: h.sum(), FP32),
        (lambda x, h: h.sum(dtype=BF16), BF16),
        (lambda x, h: h.cumsum(0), FP32),
        (lambda x, h: h.norm(), FP32),
        (lambda x, h: h.norm(dim=1), FP32),
        (lambda x, h: torch.addcmul(h, x, h), FP32),
        (lambda x, h: torch.addcmul(h, h, h), BF16),
        (lambda x, h: x.double().exp(), torch.float64),
        (lambda x, h: x.long().sum(), torch.int64),
        (lambda x, h: torch.trace(h), BF16),  # fp32 on the CPU, not listed for CUDA
        (lambda x, h: torch.linalg.inv(x), FP32),
        (lambda x, h: torch.cat([h, h]), BF16),
        (lambda x, h: F.interpolate(h[None, None], scale_factor=2), FP32),
    ],
    ids=[
        "matmul", "einsum", "exp", "softmax", "softmax-dtype", "sum", "sum-dtype", "cumsum", "norm", "norm-dim",
        "promote", "promote-lower", "double", "integers", "cpu-only", "not-listed", "cat", "interpolate",
    ],
)  # fmt: skip
def test_autocast_gives_cudas_type(call, dtype):
    """ATen/autocast_mode.h: the policy of each list."""
    with simulated(), torch.autocast("cuda", BF16):
        x = torch.randn(4, 4)
        assert call(x, x.bfloat16()).dtype is dtype


def test_what_cudas_autocast_bans_is_an_error():
    """autocast_mode.cpp, `binary_cross_entropy_banned`."""
    with simulated():
        probability = torch.rand(4)
        F.binary_cross_entropy(probability, probability)
        with torch.autocast("cuda"), pytest.raises(RuntimeError, match="unsafe to autocast"):
            F.binary_cross_entropy(probability, probability)


def test_two_half_types_do_not_mix():
    """autocast_mode.h, `prioritize`."""
    with simulated(), torch.autocast("cuda", FP16), pytest.raises(RuntimeError, match="Unexpected floating ScalarType"):
        torch.atan2(torch.randn(2).bfloat16(), torch.randn(2).bfloat16())


# -- the cache of cast weights -----------------------------------------------------------------------------------------


def test_a_weight_that_is_used_twice_is_cast_once():
    """autocast_mode.cpp, `cached_cast`: one half-precision copy, 2 bytes an element, until the region ends."""
    with simulated():
        layer, x = nn.Linear(16, 16, bias=False), torch.randn(4, 16, requires_grad=True)
        with torch.autocast("cuda", BF16):
            y = layer(layer(x))
            _, storages = saved(y, *layer.parameters(), x)
            assert storages.count(16 * 16 * 2) == 1
            assert id(layer.weight) in autocast._cache
        assert not autocast._cache
        with torch.autocast("cuda", BF16, cache_enabled=False):
            _, storages = saved(layer(layer(x)), *layer.parameters(), x)
        assert storages.count(16 * 16 * 2) == 2


def test_a_weight_cast_without_gradients_takes_one_later():
    """autocast_mode.cpp, `cached_cast`: the cast is recorded under no_grad too."""
    with simulated(), torch.autocast("cuda", BF16):
        layer, x = nn.Linear(4, 4), torch.randn(2, 4)
        with torch.no_grad():
            layer(x)
        layer(x).sum().backward()
        assert layer.weight.grad is not None


def test_views_and_results_are_not_cached():
    """autocast_mode.cpp, `cached_cast`: leaves that are no views."""
    with simulated(), torch.autocast("cuda", BF16):
        weight = torch.randn(4, 4, requires_grad=True)
        torch.randn(2, 4) @ weight.t()
        torch.randn(2, 4) @ (weight * 2)
        assert not autocast._cache


# -- the differences, one by one ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_dropout_keeps_one_byte_an_element(dtype):
    """Dropout.cpp: `native_dropout` and its mask of booleans; the CPU keeps a mask of the input's type."""
    with simulated():
        x = torch.randn(4, 8, dtype=dtype, requires_grad=True)
        found, storages = saved(F.dropout(x, 0.5), x)
        assert (kept(found, "NativeDropout"), storages) == ({"result1": ("bool", (4, 8))}, [4 * 8])
        for p, train in ((0.0, True), (0.5, False)):  # `is_fused_kernel_acceptable`
            assert saved(F.dropout(x, p, train) + 1, x)[1] == []
        _, storages = saved(F.dropout2d(x.view(1, 4, 2, 4), 0.5), x)  # never fused: one element a channel
        assert storages == [4 * x.itemsize]


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_cross_entropy_keeps_two_tensors_of_logits(dtype):
    """LossNLL.cpp calls log_softmax with a type, which the policy respects; nll_loss is cast to fp32. 2 + 4 bytes a
    logit, and 4 for the weight of all targets; 4 a logit on the CPU, where cross_entropy_loss is cast as a whole."""
    with simulated():
        logits, targets = torch.randn(8, 100, dtype=dtype, requires_grad=True), torch.zeros(8, dtype=torch.long)
        with torch.autocast("cuda", dtype):
            _, storages = saved(F.cross_entropy(logits, targets), logits, targets)
    assert storages == [4, 8 * 100 * 2, 8 * 100 * 4]


def qkv(dtype, heads=2, rows=10, width=16, keys=None, kv_heads=None):
    shapes = [(2, heads, rows, width), *[(2, kv_heads or heads, keys or rows, width)] * 2]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_half_precision_attention_is_flash(dtype, dropout):
    """attention.cpp, flash_api.cpp: output, 4 bytes a row for the sums, 16 + 8 for the random state; no mask."""
    with simulated():
        q, k, v = qkv(dtype)
        found, storages = saved(F.scaled_dot_product_attention(q, k, v, dropout_p=dropout), q, k, v)
    assert nodes(found) == {"ScaledDotProductFlashAttention"}
    assert storages == sorted([8, 16, 2 * 2 * 10 * 4, 2 * 2 * 10 * 16 * 2])


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_fp32_attention_is_memory_efficient(dropout):
    """attention.cu: output, sums of 4 bytes for rows rounded up to 32, two numbers of 8 for the random state."""
    with simulated():
        q, k, v = qkv(FP32)
        found, storages = saved(F.scaled_dot_product_attention(q, k, v, dropout_p=dropout), q, k, v)
    assert nodes(found) == {"ScaledDotProductEfficientAttention"}
    assert storages == sorted([8, 8, 2 * 2 * 32 * 4, 2 * 2 * 10 * 16 * 4])


def test_a_boolean_mask_becomes_additive_and_its_rows_a_multiple_of_eight():
    """attention.cpp, `convert_boolean_attn_mask`, then `preprocess_mask`: padded as it is, and only then expanded."""
    with simulated():
        q, k, v = qkv(BF16, keys=50)
        mask = torch.ones(2, 1, 10, 50, dtype=torch.bool)
        found, storages = saved(F.scaled_dot_product_attention(q, k, v, mask), q, k, v)
    assert kept(found, "ScaledDotProductEfficientAttention")["attn_bias"] == ("bfloat16", (2, 2, 10, 50))
    assert 2 * 1 * 10 * 56 * 2 in storages


def test_a_mask_that_is_aligned_is_kept_as_it_is():
    with simulated():
        q, k, v = qkv(FP32, keys=48)
        mask = torch.zeros(10, 48)
        _, storages = saved(F.scaled_dot_product_attention(q, k, v, mask), q, k, v, mask)
    assert storages == sorted([8, 8, 2 * 2 * 32 * 4, 2 * 2 * 10 * 16 * 4])


@pytest.mark.parametrize(
    ("options", "arguments", "node"),
    [
        ({"dtype": BF16, "width": 20}, {}, "ScaledDotProductFlashAttention"),  # padded to 24
        ({"dtype": BF16, "width": 264}, {}, "ScaledDotProductEfficientAttention"),  # flash: at most 256
        ({"dtype": BF16, "width": 260}, {}, None),  # memory-efficient: multiples of 8
        ({"dtype": FP32, "width": 20}, {}, "ScaledDotProductEfficientAttention"),
        ({"dtype": FP32, "width": 18}, {}, None),  # multiples of 4
        ({"dtype": torch.float64}, {}, None),
        ({"dtype": BF16, "keys": 7}, {"is_causal": True}, "ScaledDotProductEfficientAttention"),  # not square
        ({"dtype": BF16, "heads": 4, "kv_heads": 2}, {"enable_gqa": True}, "ScaledDotProductFlashAttention"),
    ],
    ids=["padded", "wide", "wide-odd", "fp32", "fp32-odd", "fp64", "causal-oblong", "groups"],
)
def test_the_choice_of_the_attention_kernel(options, arguments, node):
    """sdp_utils.cpp, `select_sdp_backend`; None is the composition that keeps probabilities."""
    with simulated():
        output = F.scaled_dot_product_attention(*qkv(**options), **arguments)
        found, _ = saved(output)
        output.sum().backward()
    assert {name for name in nodes(found) if name.startswith("Scaled")} == ({node} if node else set())


def test_the_users_choice_of_kernels_is_obeyed():
    """torch.nn.attention.sdpa_kernel; sdp_utils.cpp reads the same switches."""

    def taken(dtype, *backends):
        with sdpa_kernel(list(backends)):
            found, _ = saved(F.scaled_dot_product_attention(*qkv(dtype)))
        return {name for name in nodes(found) if name.startswith("Scaled")}

    with simulated():
        assert taken(BF16, SDPBackend.MATH) == set()
        assert taken(BF16, SDPBackend.EFFICIENT_ATTENTION) == {"ScaledDotProductEfficientAttention"}
        assert taken(BF16, SDPBackend.CUDNN_ATTENTION) == {"ScaledDotProductCudnnAttention"}
        with pytest.raises(RuntimeError, match="No available kernel"):
            taken(FP32, SDPBackend.FLASH_ATTENTION)


@pytest.mark.parametrize(
    ("dtype", "node"), [(FP32, "CudnnBatchNorm"), (FP16, "CudnnBatchNorm"), (BF16, "NativeBatchNorm")], ids=str
)
def test_batch_norm_keeps_fp32_statistics(dtype, node):
    """Normalization.cpp: cuDNN's, but for bf16; two statistics of 4 bytes a channel whatever the input's type."""
    with simulated():
        norm, x = nn.BatchNorm2d(6), torch.randn(2, 6, 4, 4, dtype=dtype, requires_grad=True)
        found, storages = saved(norm(x), *norm.parameters(), *norm.buffers(), x)
        assert nodes(found) == {node}
        assert [size for size in storages if size] == [6 * 4, 6 * 4]
        found, storages = saved(norm.eval()(x), *norm.parameters(), *norm.buffers(), x)
        assert [size for size in storages if size] == ([] if node == "CudnnBatchNorm" else [6 * 4, 6 * 4])


def test_batch_norm_of_rows_is_not_cudnns():
    """Normalization.cpp: three dimensions at least, and weights."""
    with simulated():
        x = torch.randn(4, 6, requires_grad=True)
        assert nodes(saved(nn.BatchNorm1d(6)(x))[0]) == {"NativeBatchNorm"}
        image = torch.randn(2, 6, 4, 4, requires_grad=True)
        assert nodes(saved(nn.BatchNorm2d(6, affine=False)(image))[0]) == {"NativeBatchNorm"}


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_rms_norm_keeps_one_number_a_row(dtype):
    """layer_norm.cpp, layer_norm_kernel.cu: one fused kernel; 4 bytes a row."""
    with simulated():
        norm, x = nn.RMSNorm(16, dtype=dtype), torch.randn(3, 5, 16, dtype=dtype, requires_grad=True)
        y = norm(x)
        found, storages = saved(y, *norm.parameters(), x)
        assert nodes(found) == {"FusedRmsNorm"}
        assert storages == [3 * 5 * 4]
        y.sum().backward()
        assert (norm.weight.grad.shape, x.grad.dtype) == ((16,), dtype)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16, torch.float64], ids=str)
def test_layer_norm_keeps_two_fp32_numbers_a_row(dtype):
    """layer_norm_kernel.cu: statistics are accumulated, and kept, in fp32 (double stays); the CPU keeps half ones."""
    with simulated():
        norm, x = nn.LayerNorm(16, dtype=dtype), torch.randn(3, 5, 16, dtype=dtype, requires_grad=True)
        y = norm(x)
        size = 8 if dtype is torch.float64 else 4
        assert saved(y, *norm.parameters(), x)[1] == [3 * 5 * size, 3 * 5 * size]
        y.sum().backward()


def test_group_norm_copies_channels_last():
    """group_norm.cpp: CUDA's kernel takes contiguous images; statistics have the input's type."""
    with simulated():
        norm, x = nn.GroupNorm(2, 6, dtype=BF16), torch.randn(3, 6, 4, 4, dtype=BF16, requires_grad=True)
        assert saved(norm(x), *norm.parameters(), x)[1] == [3 * 2 * 2, 3 * 2 * 2]
        last = x.contiguous(memory_format=torch.channels_last)
        _, storages = saved(norm(last), *norm.parameters(), x)
        assert storages == [3 * 2 * 2, 3 * 2 * 2, 3 * 6 * 4 * 4 * 2]


def test_log_sigmoid_keeps_no_buffer():
    """ActivationLogSigmoidKernel.cu."""
    with simulated():
        x = torch.randn(8, requires_grad=True)
        assert saved(F.logsigmoid(x), x)[1] == [0]


def test_cells_of_recurrent_networks_keep_a_workspace():
    """RNN.cpp, RNN.cu: four gates for each element of an LSTM's state, five values for a GRU's."""
    with simulated():
        lstm, gru, x = nn.LSTMCell(6, 6), nn.GRUCell(6, 6), torch.randn(3, 6)
        hidden, _ = lstm(x, (x, x))
        found, _ = saved(gru(x, hidden))
        assert kept(found, "ThnnFusedLstmCell")["result2"] == ("float32", (3, 4 * 6))
        assert kept(found, "ThnnFusedGruCell")["result1"] == ("float32", (3, 5 * 6))
        gru(x, hidden).sum().backward()
        assert lstm.weight_ih.grad.shape == (24, 6)


def test_an_embedding_bag_knows_the_bag_of_each_index():
    """EmbeddingBag.cu: 8 bytes an index, also for sums, where the CPU has a shorter way."""
    with simulated():
        bag, indices = nn.EmbeddingBag(50, 4, mode="sum"), torch.zeros(3, 5, dtype=torch.long)
        found, _ = saved(bag(indices))
        assert kept(found, "EmbeddingBag")["result1"] == ("int64", (15,))


def test_fp16_softmax_to_fp32_makes_no_copy_of_its_input():
    """SoftMax.cpp: `half_to_float`."""
    made = []

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made.append(func.name())
            return func(*args, **(kwargs or {}))

    with simulated(), Seen():
        x = torch.empty(4, 8, dtype=FP16, requires_grad=True)
        made.clear()
        assert x.softmax(-1, dtype=FP32).dtype is x.log_softmax(-1, dtype=FP32).dtype is FP32
    assert [name for name in made if "softmax" in name or "copy" in name] == ["aten::_softmax", "aten::_log_softmax"]


# -- what a program says of CUDA ---------------------------------------------------------------------------------------


def test_cudas_autocast_is_answered_consistently():
    with simulated():
        assert torch.get_autocast_dtype("cuda") is FP16
        assert not torch.is_autocast_enabled("cuda")
        for opened, dtype in (
            (torch.autocast("cuda"), FP16),
            (torch.autocast(device_type="cuda", dtype=BF16), BF16),
            (torch.amp.autocast("cuda", BF16), BF16),
        ):
            with opened:
                assert torch.is_autocast_enabled("cuda")
                assert torch.is_autocast_enabled()
                assert torch.get_autocast_dtype("cuda") is torch.get_autocast_gpu_dtype() is dtype
                assert (torch.randn(2, 2) @ torch.randn(2, 2)).dtype is dtype
                with torch.autocast("cuda", enabled=False):
                    assert not torch.is_autocast_enabled("cuda")
                    assert (torch.randn(2, 2) @ torch.randn(2, 2)).dtype is FP32
            assert not torch.is_autocast_enabled("cuda")


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_older_names_work():
    with simulated():
        with torch.cuda.amp.autocast(dtype=BF16):
            assert (torch.randn(2, 2) @ torch.randn(2, 2)).dtype is BF16
        assert torch.cuda.amp.GradScaler().is_enabled()


def test_loss_scaling_is_on():
    with simulated():
        layer, scaler = nn.Linear(4, 4), torch.amp.GradScaler("cuda")
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        assert scaler.is_enabled()
        assert torch.amp.GradScaler().is_enabled()
        with torch.autocast("cuda"):
            loss = layer(torch.randn(2, 4)).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        assert layer.weight.grad.dtype is FP32


class Product(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=FP32)
    def forward(ctx, x, weight):
        assert x.dtype is FP32
        assert not torch.is_autocast_enabled("cuda")
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        assert not torch.is_autocast_enabled("cuda")
        return grad @ weight.t(), x.t() @ grad


def test_functions_of_ones_own_are_cast():
    with simulated():
        layer, weight = nn.Linear(4, 4), torch.randn(4, 4, requires_grad=True)
        with torch.autocast("cuda", BF16):
            output = Product.apply(layer(torch.randn(2, 4)), weight)
            assert output.dtype is FP32
        output.sum().backward()
        assert weight.grad is not None


def test_checkpointed_blocks_recompute_under_the_same_autocast():
    with simulated():
        blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.GELU()) for _ in range(2))
        x = torch.randn(4, 8)
        with torch.autocast("cuda", BF16):
            y = x
            for block in blocks:
                y = checkpoint(block, y, use_reentrant=False)
        y.sum().backward()
        assert all(parameter.grad.dtype is FP32 for parameter in blocks.parameters())


# -- networks ----------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(20, 8), nn.RMSNorm(8), nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return F.cross_entropy(self.head(self.norm(self.embed(tokens))).flatten(0, 1), tokens.flatten())


def unet():
    layers = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.SiLU(),
        nn.Dropout2d(0.1),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.InstanceNorm2d(16, affine=True),
        nn.Upsample(scale_factor=2),
        nn.ConvTranspose2d(16, 8, 3, padding=1),
        nn.GLU(1),
        nn.Conv2d(4, 4, 1),
        nn.PixelShuffle(2),
    )
    image = torch.randn(2, 3, 16, 16).contiguous(memory_format=torch.channels_last)
    return layers, lambda model: model(image).float().square().mean()


def encoder():
    layers = [nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(2)]
    padding = torch.zeros(2, 10, dtype=torch.bool)

    def run(model):
        x = torch.randn(2, 10, 32)
        for layer in model:
            x = layer(x, src_key_padding_mask=padding)
        return x.sum()

    return nn.ModuleList(layers), run


def recurrent():
    model = nn.ModuleList([nn.LSTM(8, 8, batch_first=True), nn.GRU(8, 8, batch_first=True)])
    return model, lambda model: model[1](model[0](torch.randn(2, 5, 8))[0])[0].sum()


def language_model(model, config, mask=False, **options):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    built = getattr(transformers, model)(getattr(transformers, config)(vocab_size=50, **sizes, **options)).train()
    tokens = torch.zeros(2, 12, dtype=torch.long)
    masks = {"attention_mask": torch.ones(2, 1, 12, 12, dtype=torch.bool)} if mask else {}
    return built, lambda built: built(input_ids=tokens, labels=tokens, **masks).loss


NETWORKS = {
    "unet": unet,
    "encoder": encoder,
    "recurrent": recurrent,
    "tied": lambda: (Tied(), lambda model: model(torch.zeros(2, 5, dtype=torch.long))),
    "attention": lambda: (
        nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True),
        lambda model: model(*[torch.randn(2, 10, 32)] * 3)[0].sum(),
    ),
    "bert": lambda: language_model("BertForMaskedLM", "BertConfig"),
    "bert-mask": lambda: language_model("BertForMaskedLM", "BertConfig", mask=True),
    "llama": lambda: language_model("LlamaForCausalLM", "LlamaConfig", num_key_value_heads=2),
    "t5": lambda: language_model(
        "T5ForConditionalGeneration", "T5Config", d_model=32, d_kv=8, d_ff=64, num_heads=4, decoder_start_token_id=0
    ),
}


@pytest.mark.parametrize("dtype", [None, BF16, FP16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", list(NETWORKS))
def test_networks_run_backward_too(name, dtype):
    with simulated():
        model, run = NETWORKS[name]()
        with region(dtype):
            loss = run(model)
        loss.backward()
        assert all(parameter.grad.shape == parameter.shape for parameter in model.parameters())
        assert all(isinstance(parameter.grad, FakeTensor) for parameter in model.parameters())


def test_double_precision_is_left_alone():
    with simulated(), torch.autocast("cuda", BF16):
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dtype=torch.float64)
        output = layer(torch.randn(2, 5, 16, dtype=torch.float64))
        output.sum().backward()
        assert output.dtype is torch.float64


# -- afterwards --------------------------------------------------------------------------------------------------------


def tables():
    """PyTorch's dispatch tables, of each operator that could have been touched."""
    names = {name for name, _ in [*autocast.kernels(), *composites.kernels()]}
    return {
        name: (torch._C._dispatch_dump(f"aten::{name}"), torch._C._dispatch_dump_table(f"aten::{name}"))
        for name in sorted(names)
    }


def attributes():
    owners = (torch, torch.amp.autocast_mode, torch.amp.autocast_mode.autocast, torch.amp.GradScaler)
    state = torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cpu")
    return [dict(vars(owner)) for owner in owners], dict(vars(torch._meta_registrations)), state


def real_step():
    """A step that all of it would change: (loss, gradients)."""
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True), nn.RMSNorm(16), nn.Linear(16, 5)
    )
    x, targets = torch.randn(4, 6, 16), torch.zeros(24, dtype=torch.long)
    with torch.autocast("cpu", BF16):
        loss = F.cross_entropy(model(x).flatten(0, 1), targets) + F.batch_norm(x, None, None, training=True).std()
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def touch_everything():
    with torch.autocast("cuda"):
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)(torch.randn(2, 4, 16)).sum().backward()


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt], ids=["normal", "error", "interrupt"])
def test_the_process_computes_as_before(error):
    before, mode = (tables(), attributes(), real_step()), FakeMode()
    overrides, copied = mode.overrides, dict(mode.overrides)
    with pytest.raises(error) if error else contextlib.nullcontext(), mode, as_cuda(mode):
        assert tables() != before[0]
        touch_everything()
        if error:
            raise error
    assert tables() == before[0]
    assert attributes() == before[1]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(real_step(), before[2], strict=True))
    assert mode.overrides is overrides
    assert overrides == copied
    assert not autocast._cache


def test_a_plain_fake_mode_is_the_cpus_again():
    def mask():
        with FakeTensorMode():
            x = torch.randn(4, 8, dtype=BF16, requires_grad=True)
            return saved(F.layer_norm(F.dropout(x, 0.5), (8,)), x)

    before = mask()
    with simulated():
        touch_everything()
    assert mask() == before


def test_a_block_within_a_block_changes_nothing():
    with simulated() as mode:
        inside = tables(), attributes(), dict(mode.overrides)
        with as_cuda(mode):
            assert (tables(), attributes(), mode.overrides) == inside
        assert (tables(), attributes(), mode.overrides) == inside
        x = torch.randn(4, requires_grad=True)
        assert nodes(saved(F.dropout(x, 0.5))[0]) == {"NativeDropout"}


def test_another_mode_within_the_block_behaves_as_on_cuda_too():
    with simulated(), simulated():
        x = torch.randn(3, 16, dtype=BF16, requires_grad=True)
        assert saved(F.layer_norm(x, (16,)), x)[1] == [3 * 4, 3 * 4]


def test_it_can_be_opened_before_the_mode():
    mode = FakeMode()
    with as_cuda(mode), mode:
        x = torch.randn(4, requires_grad=True)
        assert saved(F.dropout(x, 0.5), x)[1] == [4]


def test_nothing_is_said_on_the_way():
    program = """
import torch
from memlab.simulation.as_cuda import as_cuda
from memlab.simulation.fake import FakeMode
mode = FakeMode()
with mode, as_cuda(mode), torch.autocast("cuda"):
    torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)(torch.randn(2, 4, 16)).sum().backward()
assert not torch.cuda.is_initialized()
"""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, cwd=HERE.parent
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


def test_what_is_not_emulated_is_listed():
    words = " ".join(absent)
    assert all(word in words for word in ("cuDNN", "LSTM", "cuBLAS", "context", "fragmentation", "attention"))
