"""What CUDA's kernels return where PyTorch's shape functions answer for the CPU, or have no answer.

Each stands in for an operator on fake tensors (`FakeMode.overrides`): the operator's own answer, then its arguments.
Statistics of half-precision inputs are fp32 on CUDA (`toAccumulateType`); group norm's keep the type of the input
there too (group_norm.cpp). Source: the file of `ATen/native` that each names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..as_computed import of_this_pytorch

_HALF = (torch.float16, torch.bfloat16)
_Results = tuple[torch.Tensor, ...]


def _accumulated(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in _HALF else dtype


def _statistics(input: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    kept = [*input.shape[: input.dim() - len(shape)], *(1 for _ in shape)]
    return input.new_empty(kept, dtype=_accumulated(input.dtype))


def layer_norm(original: Any, input: Any, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    """cuda/layer_norm_kernel.cu."""
    if input.dtype not in _HALF:
        return original(input, shape, weight, bias, eps)
    out = torch.empty_like(input, memory_format=torch.contiguous_format)
    return out, _statistics(input, shape), _statistics(input, shape)


def rms_norm(_: Any, input: Any, shape: Any, weight: Any, eps: float | None) -> _Results:
    """cuda/layer_norm_kernel.cu."""
    return torch.empty_like(input, memory_format=torch.contiguous_format), _statistics(input, shape)


def rms_norm_backward(_: Any, grad: Any, input: Any, shape: Any, rstd: Any, weight: Any, mask: Any) -> Any:
    """cuda/layer_norm_kernel.cu."""
    grads = [torch.empty_like(input, memory_format=torch.contiguous_format) if mask[0] else None]
    return *grads, torch.empty_like(weight) if mask[1] and weight is not None else None


def native_batch_norm(_: Any, input: Any, weight: Any, *rest: Any) -> _Results:
    """cuda/Normalization.cu: statistics of every channel, in evaluation too."""
    mean, invstd = (input.new_empty(input.size(1), dtype=_accumulated(input.dtype)) for _ in range(2))
    return torch.empty_like(input), mean, invstd


def cudnn_batch_norm(
    _: Any, input: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *rest: Any
) -> Any:
    """cudnn/BatchNorm.cpp: statistics of the weight's type, none in evaluation; what cuDNN reserves is not known."""
    statistics = (weight.new_empty(input.size(1) if training else 0) for _ in range(2))
    return torch.empty_like(input), *statistics, input.new_empty(0, dtype=torch.uint8)


def cudnn_batch_norm_backward(_: Any, input: Any, grad: Any, weight: Any, *rest: Any) -> _Results:
    """cudnn/BatchNorm.cpp."""
    return torch.empty_like(input), torch.empty_like(weight), torch.empty_like(weight)


def embedding_bag(original: Any, *args: Any, **kwargs: Any) -> Any:
    """cuda/EmbeddingBag.cu: nothing is left over, as on the CPU."""
    return original(*args, **kwargs)


def log_sigmoid(_: Any, input: Any) -> _Results:
    """cuda/ActivationLogSigmoidKernel.cu: no buffer."""
    return torch.empty_like(input), input.new_empty(0)


def gru_cell(_: Any, input_gates: Any, hidden_gates: Any, hx: Any, *biases: Any) -> _Results:
    """cuda/RNN.cu: a workspace of five values for each element of the state."""
    return torch.empty_like(hx, memory_format=torch.contiguous_format), hx.new_empty(hx.size(0), 5 * hx.size(1))


def gru_cell_backward(_: Any, grad: Any, workspace: Any, has_bias: bool) -> Any:
    """cuda/RNN.cu: of the gates, the state, and the biases."""
    batch, width = grad.shape
    gates = [grad.new_empty(batch, 3 * width) for _ in range(2)]
    biases = [grad.new_empty(3 * width) if has_bias else None for _ in range(2)]
    return *gates, torch.empty_like(grad), *biases


def overrides() -> dict[Any, Callable[..., Any]]:
    """By operator; those that this PyTorch has."""
    by_name: dict[str, Callable[..., Any]] = {
        "native_layer_norm": layer_norm,
        "_fused_rms_norm": rms_norm,
        "_fused_rms_norm_backward": rms_norm_backward,
        "native_batch_norm": native_batch_norm,
        "cudnn_batch_norm": cudnn_batch_norm,
        "cudnn_batch_norm_backward": cudnn_batch_norm_backward,
        "_embedding_bag": embedding_bag,
        "log_sigmoid_forward": log_sigmoid,
        "_thnn_fused_gru_cell": gru_cell,
        "_thnn_fused_gru_cell_backward": gru_cell_backward,
    }
    return of_this_pytorch(by_name)
