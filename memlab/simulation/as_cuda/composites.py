"""Operators that PyTorch composes of others, and of others on CUDA than on the CPU: CUDA's composition of each.

Registered for autograd on the CPU; what is composed of the same operators on both is left to PyTorch (`decompose`).
Source: the file of `ATen/native` that each names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .attention import scaled_dot_product_attention

aten = torch.ops.aten
_FLOAT, _HALF, _BFLOAT = torch.float32, torch.float16, torch.bfloat16


def dropout(input: torch.Tensor, p: float, train: bool) -> Any:
    """Dropout.cpp: fused, with a mask of one byte an element (`is_fused_kernel_acceptable`)."""
    if not train or p == 0 or not input.numel():
        return input
    if p == 1:
        return input * torch.zeros((), dtype=input.dtype)
    return aten.native_dropout.default(input, p, train)[0]


def batch_norm(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    """Normalization.cpp: cuDNN's (`_select_batch_norm_backend`) or PyTorch's own, never a decomposition."""
    running = running_mean, running_var
    if not input.numel():
        return aten.batch_norm.default.decompose(input, weight, bias, *running, training, momentum, eps, cudnn_enabled)
    if (
        cudnn_enabled
        and weight is not None
        and bias is not None
        and _BFLOAT not in (input.dtype, weight.dtype)
        and (input.dtype is not _HALF or weight.dtype is _FLOAT)
        and (running_mean is None) == (running_var is None)
        and (running_mean is not None or training)
        and input.dim() >= 3
        and input.size(0) <= (880801 if training else 65535)
    ):
        input = input.contiguous(memory_format=_suggested_format(input))
        return aten.cudnn_batch_norm.default(input, weight, bias, *running, training, momentum, eps)[0]
    return aten.native_batch_norm.default(input, weight, bias, *running, training, momentum, eps)[0]


def group_norm(input: torch.Tensor, *args: Any) -> Any:
    """group_norm.cpp: only the CPU's kernel takes channels last."""
    return aten.group_norm.default.decompose(input.contiguous(), *args)


def softmax(input: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    """SoftMax.cpp: fp16 to fp32 in one kernel."""
    if input.dtype is _HALF and dtype is _FLOAT:
        return aten._softmax.default(input, dim, True)
    return aten.softmax.int.decompose(input, dim, dtype)


def log_softmax(input: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    """SoftMax.cpp, the same."""
    if input.dtype is _HALF and dtype is _FLOAT:
        return aten._log_softmax.default(input, dim, True)
    return aten.log_softmax.int.decompose(input, dim, dtype)


def lstm_cell(input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    """RNN.cpp, `LSTMCell`: one fused kernel with a workspace."""
    gates = torch.matmul(input, w_ih.t()), torch.matmul(hx[0], w_hh.t())
    return aten._thnn_fused_lstm_cell.default(*gates, hx[1], b_ih, b_hh)[:2]


def gru_cell(input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    """RNN.cpp, `GRUCell`: one fused kernel with a workspace."""
    gates = torch.matmul(input, w_ih.t()), torch.matmul(hx, w_hh.t())
    return aten._thnn_fused_gru_cell.default(*gates, hx, b_ih, b_hh)[0]


def _suggested_format(tensor: torch.Tensor) -> torch.memory_format:
    """`suggest_memory_format`."""
    for dim, format in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if tensor.dim() == dim and tensor.is_contiguous(memory_format=format) and not tensor.is_contiguous():
            return format
    return torch.contiguous_format


def _never(*_: Any) -> Any:
    raise RuntimeError("a simulation as on CUDA is open in this process: nothing real may run inside it")


COMPOSED: dict[Callable[..., Any], str] = {  # the operators that are composed of others, and so have a way back
    dropout: "dropout",
    scaled_dot_product_attention: "scaled_dot_product_attention",
    batch_norm: "batch_norm",
    group_norm: "group_norm",
    softmax: "softmax.int",
    log_softmax: "log_softmax.int",
    lstm_cell: "lstm_cell",
    gru_cell: "gru_cell",
}


def kernels() -> dict[tuple[str, str], Callable[..., Any]]:
    """By operator and dispatch key; of the operators that this PyTorch has."""
    found = {(name, "AutogradCPU"): kernel for kernel, name in COMPOSED.items()}
    if hasattr(aten, "_fused_rms_norm"):  # with a kernel of its own, as on CUDA, autograd takes it as a whole
        found["_fused_rms_norm", "CPU"] = _never
    return found
