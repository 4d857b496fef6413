"""The arithmetic of operators, and the bytes that they move: counted from shapes, so on tensors without data too.

Arithmetic is by PyTorch's own formulas (`torch.utils.flop_counter`), plus what they leave out on CPU: fused attention
and oneDNN's recurrent layers. One multiply-add is two operations; causal attention counts in full.

Bytes are those that no kernel can do without: each argument is read once, each result is written once, what is changed
in place is both. A view moves nothing, and an expanded tensor no more than its storage holds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from .modes import LightMode
from .tracker import parts, tensors_in


class Work(NamedTuple):
    """What one operator does: floating-point operations, bytes read and written, and the type it computes in (that of
    its first floating-point argument, or result)."""

    flops: int
    moved_bytes: int
    dtype: str


def work(func: Any, args: Any, kwargs: Any, out: Any) -> Work:
    """The work of a call of an operator that has returned `out`."""
    traffic = _TRAFFIC.get(id(func)) or _traffic(func)
    read: dict[int, int] = {}
    written: dict[int, int] = {}
    given: set[int] = set()
    dtype = ""
    for key, value in itertools.chain(enumerate(args), kwargs.items() if kwargs else ()):
        for tensor in tensors_in(value):
            given.add(id(tensor))
            if key not in traffic.unread:
                read[id(tensor)] = _held(tensor)
            if key in traffic.changed:
                written[id(tensor)] = _held(tensor)
            dtype = dtype or _floating(tensor)
    for tensor in tensors_in(out):
        if id(tensor) not in given:
            written[id(tensor)] = _held(tensor)
        dtype = dtype or _floating(tensor)
    moved = 0 if traffic.still else sum(read.values()) + sum(written.values())
    return Work(flops(func, args, kwargs, out), moved, dtype)


def _floating(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.") if tensor.is_floating_point() else ""


def _held(tensor: torch.Tensor) -> int:
    """The bytes of a tensor's elements; those that an expanded one repeats are there once."""
    return sum(min(part.nbytes, part.untyped_storage().nbytes()) for part in parts(tensor))


class _Traffic(NamedTuple):
    """Which arguments an operator need not read, and which it changes, each by its position and by its name. `still`:
    it moves nothing at all."""

    function: Any  # held, so that its `id` is not used again
    unread: frozenset[int | str]
    changed: frozenset[int | str]
    still: bool


_TRAFFIC: dict[int, _Traffic] = {}  # by the function's `id`: its hash is slower
_OVERWRITE = ("copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_")
_REACH_INTO = ("index_put_", "index_add_", "scatter_", "scatter_add_")  # change only what another argument points to
_READ_LITTLE = {  # position of the argument that is there for its shape, or of which only what is pointed to is read
    "nll_loss_backward": 1,
    "nll_loss2d_backward": 1,
    "max_pool2d_with_indices_backward": 1,
    "avg_pool2d_backward": 1,
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward", "embedding", "index", "index_select", "gather"), 0),
}
_STILL = ("_unsafe_view", "empty", "new_empty", "resize_", "set_", "lift")


def _traffic(func: Any) -> _Traffic:
    name = func._schema.name.rpartition("::")[2].removeprefix("_foreach_")
    arguments = list(enumerate(func._schema.arguments))
    changed = [(place, a) for place, a in arguments if a.alias_info is not None and a.alias_info.is_write]
    unread = [(place, a) for place, a in changed if a.is_out or name in _OVERWRITE + _REACH_INTO]
    little = 0 if name.endswith("_like") or name.startswith("new_") else _READ_LITTLE.get(name)
    if little is not None:
        unread.append(arguments[little])
    if name in _REACH_INTO:
        changed = []
    still = func.is_view or name.startswith(_STILL)
    found = _TRAFFIC[id(func)] = _Traffic(func, _keys(unread), _keys(changed), still)
    return found


def _keys(arguments: Iterable[tuple[int, Any]]) -> frozenset[int | str]:
    return frozenset(key for place, argument in arguments for key in (place, argument.name))


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
