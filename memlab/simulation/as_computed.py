"""Where PyTorch's shape functions say something else than what its CPU kernels do, or are missing, and what the kernels
do.

Each entry of `OVERRIDES` is for a `FakeMode`: a function of the original and the operator's arguments. Sources are the
kernels in ATen/native; `tests/test_simulate.py` compares each with a real call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten


def _statistics_as_parameters(places: tuple[int, ...], original: Any, *args: Any) -> Any:
    """Means and deviations of a normalisation are in the type of its weight or running mean (layer_norm.cpp,
    group_norm.cpp, Normalization.cpp: `param_scalar_type`); the shape functions have them in the input's."""
    out, *statistics = original(*args)
    dtype = next((args[place].dtype for place in places if args[place] is not None), args[0].dtype)
    return out, *(s if s.dtype == dtype or not s.numel() else torch.empty(s.shape, dtype=dtype) for s in statistics)


def _reduced_in_place(reduction: int, original: Any, *args: Any, **kwargs: Any) -> Any:
    """The losses that reduce into the storage which held a loss for each element (`resize_({})` in BinaryOps.cpp,
    `resize_as_` and `sum_out` in Loss.cpp): that storage keeps its size."""
    loss = original(*args, **kwargs)
    if loss.dim() or (kwargs.get("reduction", args[reduction] if len(args) > reduction else 1) == 0):
        return loss
    elements = torch.broadcast_shapes(args[0].shape, args[1].shape).numel()
    return torch.empty(elements, dtype=loss.dtype).as_strided((), ())


def _like(place: int, original: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Gradients that have no shape function: as large as what they are the gradient of."""
    return torch.empty_like(args[place])


def _in_place(original: Any, *args: Any, **kwargs: Any) -> None:
    """Fused optimizers without a shape function: they write into what they are given."""


def _ctc(original: Any, log_probs: torch.Tensor, targets: Any, inputs: Any, lengths: Any, *args: Any) -> Any:
    """`ctc_loss_allocate_outputs` in LossCTC.cpp: by the longest of the targets, where the lengths are known."""
    lengths = getattr(lengths, "constant", lengths)
    if lengths is None:
        return original(log_probs, targets, inputs, lengths, *args)
    longest = max((int(length) for length in lengths), default=0)
    shape = (1, log_probs.size(0)) if log_probs.dim() == 2 else (log_probs.size(1), log_probs.size(0))
    return log_probs.new_empty(shape[:1]), log_probs.new_empty(*shape, 2 * longest + 1)


def _grouped(original: Any, a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> torch.Tensor:
    """`create_grouped_gemm_output_tensor` in GroupedMMUtils.h: rows begin at multiples of 16 bytes. The shape function
    takes bfloat16 alone, the kernels of both devices other types too."""
    if a.dim() == b.dim() == 2:
        shape = [offs.size(0), a.size(0), b.size(1)]
    else:
        shape = [*(a.shape[:-1] if b.dim() == 3 else a.shape[1:-1]), b.size(-1)]
    aligned = 16 // a.element_size()
    row = -(-shape[-1] // aligned) * aligned
    return torch.empty_strided(shape, (shape[-2] * row, row, 1)[-len(shape) :], dtype=out_dtype or a.dtype)


def _bags(original: Any, *args: Any, **kwargs: Any) -> Any:
    """EmbeddingBag.cpp, `make_offset2bag_out`: the bag of each index is shrunk from one element more."""
    out, bag, *rest = original(*args, **kwargs)
    counted = bag.numel() and bag.numel() == args[1].numel()
    return out, torch.empty(bag.numel() + 1, dtype=bag.dtype)[:-1] if counted else bag, *rest


def of_this_pytorch(table: dict[str, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """By operator, those that this PyTorch has."""
    found = {}
    for name, function in table.items():
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(aten, packet, None), overload or "default", None)
        if operator is not None:
            found[operator] = function
    return found


OVERRIDES: dict[Any, Callable[..., Any]] = {
    **of_this_pytorch(
        {
            "multi_margin_loss_backward": functools.partial(_like, 1),
            "multilabel_margin_loss_backward": functools.partial(_like, 1),
            "fractional_max_pool3d_backward": functools.partial(_like, 1),
            "_standard_gamma_grad": functools.partial(_like, 0),
            "_dirichlet_grad": functools.partial(_like, 0),
            "_fused_sgd_": _in_place,
            "_fused_sgd_.tensor_lr": _in_place,
            "_fused_adagrad_": _in_place,
            "_fused_adagrad_.tensor_lr": _in_place,
            "_ctc_loss": _ctc,
            "_ctc_loss.Tensor": _ctc,
            "_ctc_loss_backward": functools.partial(_like, 1),
            "_ctc_loss_backward.Tensor": functools.partial(_like, 1),
            "_embedding_bag": _bags,
            "_grouped_mm": _grouped,
        }
    ),
    aten.native_batch_norm.default: functools.partial(_statistics_as_parameters, (1, 3)),
    aten._native_batch_norm_legit.default: functools.partial(_statistics_as_parameters, (1, 3)),
    aten._native_batch_norm_legit.no_stats: functools.partial(_statistics_as_parameters, (1,)),
    aten.native_layer_norm.default: functools.partial(_statistics_as_parameters, (2,)),
    aten.native_group_norm.default: functools.partial(_statistics_as_parameters, (1,)),
    aten.mse_loss.default: functools.partial(_reduced_in_place, 2),
    aten.smooth_l1_loss.default: functools.partial(_reduced_in_place, 2),
    aten.soft_margin_loss.default: functools.partial(_reduced_in_place, 2),
    aten.binary_cross_entropy.default: functools.partial(_reduced_in_place, 3),
}
