"""Counts the floating-point operations of whatever runs inside.

PyTorch's own formulas (`torch.utils.flop_counter`), plus what they leave out on CPU: fused attention and oneDNN's
recurrent layers. One multiply-add is two operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from .modes import LightMode


class FlopCounter(LightMode):
    """A dispatch mode; read `total` afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if packet in flop_registry:
            self.total += int(flop_registry[packet](*args, **(kwargs or {}), out_val=out))
        elif packet.__name__ in _OURS:
            self.total += int(_OURS[packet.__name__](*args))
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
