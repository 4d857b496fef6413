"""Which kernel CUDA takes for attention, and what is done before and after it.

Source: `select_sdp_backend` and its checks (`native/transformers/cuda/sdp_utils.cpp`, `sdp_utils_cpp.h`), and
`scaled_dot_product_attention` (`native/transformers/attention.cpp`), for compute capability 8.0. The user's switches
(`torch.nn.attention.sdpa_kernel`, `torch.backends.cuda.enable_...`) are obeyed, and their order of priority.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn.functional import pad

_C: Any = torch._C
aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_MATH, _FLASH, _EFFICIENT, _CUDNN = range(4)  # SDPBackend's numbers
_DEFAULT_ORDER = (_FLASH, _EFFICIENT, _MATH, _CUDNN)
_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
_EVERY_FUSED_TAKES_GROUPS = _VERSION >= (2, 14)  # before, flash and cuDNN; and no single head unless it was asked for


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if is_causal and attn_mask is not None:
        raise RuntimeError("_scaled_dot_product_attention: Explicit attn_mask should not be set when is_causal=True")
    kernel = _kernel(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    mask = _additive(attn_mask, query.dtype)
    if kernel == _FLASH:
        width = query.size(-1)
        scale = 1 / math.sqrt(width) if scale is None else scale
        padded = (_pad_last(tensor, 8) for tensor in (query, key, value))
        out = aten._scaled_dot_product_flash_attention.default(*padded, dropout_p, is_causal, False, scale=scale)[0]
        return out if out.size(-1) == width else out[..., :width]  # type: ignore[no-any-return]
    if kernel == _EFFICIENT:
        if mask is not None:
            mask = _aligned(mask, 8).expand(*query.shape[:3], key.size(2))
        return aten._scaled_dot_product_efficient_attention.default(  # type: ignore[no-any-return]
            query, key, value, mask, grad, dropout_p, is_causal, scale=scale
        )[0]
    if kernel == _CUDNN:
        return aten._scaled_dot_product_cudnn_attention.default(  # type: ignore[no-any-return]
            query, key, value, mask, grad, dropout_p, is_causal, False, scale=scale
        )[0]
    return aten._scaled_dot_product_attention_math.default(  # type: ignore[no-any-return]
        query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]


# -- the mask ----------------------------------------------------------------------------------------------------------


def _additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """`convert_boolean_attn_mask`: 0 where attention goes, minus infinity elsewhere."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.where(mask, 0.0, mask.new_full((), -math.inf, dtype=dtype))


def _pad_last(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    over = tensor.size(-1) % multiple
    return pad(tensor, (0, multiple - over)) if over else tensor


def _aligned(mask: torch.Tensor, multiple: int) -> torch.Tensor:
    """`preprocess_mask`: a view of a padded copy, unless each row starts at a multiple of 8."""
    strides = mask.stride()
    if strides[-1] == 1 and not any(stride % multiple for stride in strides[:-1]):
        return mask
    width = mask.size(-1)
    return pad(mask, (0, multiple - width % multiple))[..., :width]


# -- the choice --------------------------------------------------------------------------------------------------------


def _kernel(q: Any, k: Any, v: Any, mask: Any, dropout_p: float, is_causal: bool, gqa: bool) -> int:
    for kernel in _order():
        if kernel == _FLASH and _C._get_flash_sdp_enabled() and _may_be_flash(q, k, v, mask, is_causal, gqa):
            return _FLASH
        if kernel == _EFFICIENT and _C._get_mem_efficient_sdp_enabled() and _may_be_efficient(q, k, v, mask, gqa):
            return _EFFICIENT
        if kernel == _CUDNN and _C._get_cudnn_sdp_enabled() and _may_be_cudnn(q, k, v, mask, dropout_p, gqa):
            return _CUDNN
        if kernel == _MATH and _C._get_math_sdp_enabled():
            return _MATH
    raise RuntimeError("No available kernel. Aborting execution.")


def _order() -> Any:
    return _C._get_sdp_priority_order() if hasattr(_C, "_get_sdp_priority_order") else _DEFAULT_ORDER


def _may_be_flash(q: Any, k: Any, v: Any, mask: Any, is_causal: bool, gqa: bool) -> bool:
    return (
        mask is None
        and _are_dense(q, k, v, _HALF)
        and _heads_fit(q, k, v, gqa)
        and q.size(3) == k.size(3) == v.size(3) <= 256
        and not (is_causal and q.size(2) != k.size(2))
        and (q.size(3) == 1 or _rows_are_dense(q, k, v))
    )


def _may_be_efficient(q: Any, k: Any, v: Any, mask: Any, gqa: bool) -> bool:
    multiple = 8 if q.dtype in _HALF else 4  # 128 bits, for tensor cores
    return (
        _are_dense(q, k, v, (*_HALF, torch.float32))
        and _heads_fit(q, k, v, gqa and _EVERY_FUSED_TAKES_GROUPS)
        and q.size(3) == k.size(3) > 0
        and v.size(3) > 0
        and not (q.size(3) % multiple or v.size(3) % multiple)
        and not any(tensor.storage_offset() % multiple for tensor in (q, k, v))
        and _rows_are_dense(q, k, v)
        and (mask is None or mask.stride(-1) == 1)
    )


def _may_be_cudnn(q: Any, k: Any, v: Any, mask: Any, dropout_p: float, gqa: bool) -> bool:
    return (
        _are_dense(q, k, v, _HALF)
        and _heads_fit(q, k, v, gqa)
        and not (q.size(3) % 8 or v.size(3) % 8)
        and max(q.size(3), v.size(3)) <= 128
        and k.size(2) != 1
        and not (q.size(2) == 1 and dropout_p > 0)
        and (dropout_p * 16).is_integer()
        and (q.size(3) == 1 or _rows_are_dense(q, k, v))
        and (mask is None or (mask.dim() in (2, 4) and not mask.requires_grad))
        and not torch.are_deterministic_algorithms_enabled()
    )


def _are_dense(q: Any, k: Any, v: Any, types: tuple[torch.dtype, ...]) -> bool:
    """Of one of these types, with four dimensions, none of the sequences empty."""
    return (
        q.dtype is k.dtype is v.dtype
        and q.dtype in types
        and q.dim() == k.dim() == v.dim() == 4
        and q.size(2) > 0
        and k.size(2) > 0
    )


def _heads_fit(q: Any, k: Any, v: Any, groups: bool) -> bool:
    """As many heads of queries as of keys and values, or, in groups, a multiple of them."""
    if not (q.size(0) == k.size(0) == v.size(0) and k.size(1) == v.size(1)):
        return False
    if groups:
        return bool(q.size(1) % k.size(1) == 0)
    return bool(q.size(1) == k.size(1) or (k.size(1) == 1 and _EVERY_FUSED_TAKES_GROUPS))


def _rows_are_dense(q: Any, k: Any, v: Any) -> bool:
    return bool(q.stride(3) == k.stride(3) == v.stride(3) == 1)
