"""Where PyTorch's shape functions say something else than what its CPU kernels do, and what the kernels do.

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


OVERRIDES: dict[Any, Callable[..., Any]] = {
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
