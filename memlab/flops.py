"""The arithmetic of operators, and the bytes that they move: counted from shapes, so on tensors without data too.

PyTorch's own formulas (`torch.utils.flop_counter`), plus what they leave out on CPU: fused attention and oneDNN's
recurrent layers. One multiply-add is two operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from .modes import LightMode


class Work(NamedTuple):
    """What one operator does: floating-point operations, bytes read and written (each tensor once), and the type it
    computes in (that of its first floating-point argument, or result)."""

    flops: int
    moved_bytes: int
    dtype: str


def work(func: Any, args: Any, kwargs: Any, out: Any) -> Work:
    """The work of a call of an operator that has returned `out`."""
    moved: dict[int, int] = {}
    dtype = ""
    for value in (*args, *(kwargs or {}).values(), out):
        for tensor in value if isinstance(value, list | tuple) else (value,):
            if isinstance(tensor, torch.Tensor):
                moved[id(tensor)] = tensor.numel() * tensor.element_size()
                if not dtype and tensor.is_floating_point():
                    dtype = str(tensor.dtype).removeprefix("torch.")
    return Work(flops(func, args, kwargs, out), sum(moved.values()), dtype)


def flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """The floating-point operations of that call; 0 for operators without matrix products."""
    packet = func._overloadpacket
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **(kwargs or {}), out_val=out))
    ours = _OURS.get(packet.__name__)
    return 0 if ours is None else int(ours(*args))


class FlopCounter(LightMode):
    """A dispatch mode; read `total` afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.total += flops(func, args, kwargs, out)
        return out


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_backward(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> int:
    return int(sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape))


def _recurrent(inputs: torch.Tensor, weight: torch.Tensor, hidden_weight: torch.Tensor, *_: Any) -> int:
    """One layer of oneDNN's: inputs (T, B, I), weights (gates x H, I) and (gates x H, H)."""
    return 2 * math.prod(inputs.shape[:-1]) * (weight.numel() + hidden_weight.numel())


_OURS: dict[str, Callable[..., int]] = {
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "mkldnn_rnn_layer": _recurrent,
    "mkldnn_rnn_layer_backward": lambda *args: 2 * _recurrent(*args),
}
