"""CUDA's autocast on tensors of the CPU: a kernel for each operator that CUDA casts, and its cache of cast weights.

Source: `ATen/autocast_mode.h` (`WrapFunction_`, one for each policy; `prioritize`) and `autocast_mode.cpp`
(`cached_cast`). Every kernel casts, then calls the operator again with autocast off, so that what an operator is
composed of is not cast a second time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .policies import (
    BANNED,
    FP32,
    FP32_APPEND_DTYPE,
    FP32_SET_DTYPE,
    LOWER_PRECISION,
    LOWER_PRECISION_CUDNN,
    PROMOTE,
)

_C: Any = torch._C
_Kernel = Callable[..., Any]
_OFF = _C.DispatchKeySet(_C.DispatchKey.AutocastCPU)


def kernels() -> dict[tuple[str, str], _Kernel]:
    """By operator and dispatch key, for each operator that CUDA's autocast treats, or the CPU's."""
    makers: dict[str, _Kernel] = {
        **dict.fromkeys(LOWER_PRECISION + LOWER_PRECISION_CUDNN, _lower_precision),
        **dict.fromkeys(FP32, _fp32),
        **dict.fromkeys(FP32_SET_DTYPE, _fp32_set_dtype),
        **dict.fromkeys(FP32_APPEND_DTYPE, _fp32_append_dtype),
        **dict.fromkeys(PROMOTE, _promote),
        **dict.fromkeys(BANNED, _banned),
    }
    cast = {name: makers[name](name) for name in _registered("AutocastCUDA") if name in makers}
    untouched = dict.fromkeys(_registered("AutocastCPU") - cast.keys(), torch.library.fallthrough_kernel)
    return {(name, "AutocastCPU"): kernel for name, kernel in {**untouched, **cast}.items()}


def _registered(key: str) -> set[str]:
    return {name.removeprefix("aten::") for name in _C._dispatch_get_registrations_for_dispatch_key(key)}


def operator_named(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


# -- the cache of cast weights -----------------------------------------------------------------------------------------

_cache: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}


def clear_cache() -> None:
    _cache.clear()


def _is_eligible(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not torch.float64


def _cast(value: Any, to: torch.dtype) -> Any:
    """`cached_cast`: one cast for each weight while the outermost autocast region is open."""
    if isinstance(value, list | tuple):
        return [_cast(item, to) for item in value]
    if not _is_eligible(value) or value.dtype is to:
        return value
    if not (
        value.requires_grad
        and value.dtype is torch.float32
        and value.is_leaf
        and not value._is_view()
        and torch.is_autocast_cache_enabled()
        and not torch.is_inference_mode_enabled()
        and to is _lower()
    ):
        return value.to(to)
    held = _cache.get(id(value))
    if held is None or held[0]() is not value:
        with torch.enable_grad():  # under no_grad too: a later use may take a gradient
            held = _cache[id(value)] = weakref.ref(value), value.to(to)
    return held[1]


_dtype_of = torch.get_autocast_dtype  # the function itself: while a scope is open, another stands in its place


def _lower() -> torch.dtype:
    return _dtype_of("cpu")


# -- the policies ------------------------------------------------------------------------------------------------------


def _calling(name: str, dtype: Callable[[Iterable[Any]], torch.dtype]) -> _Kernel:
    """A kernel that casts all arguments to the type that `dtype` finds for them."""
    call = operator_named(name)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _C._ExcludeDispatchKeyGuard(_OFF):
            to = dtype((*args, *kwargs.values()) if kwargs else args)
            if not kwargs:
                return call(*[_cast(value, to) for value in args])
            return call(*[_cast(value, to) for value in args], **{key: _cast(kwargs[key], to) for key in kwargs})

    return kernel


def _lower_precision(name: str) -> _Kernel:
    return _calling(name, lambda _: _lower())


def _fp32(name: str) -> _Kernel:
    return _calling(name, lambda _: torch.float32)


def _promote(name: str) -> _Kernel:
    return _calling(name, lambda values: _widest(values, _lower()))


def _widest(values: Iterable[Any], current: torch.dtype) -> torch.dtype:
    lower = _lower()
    for value in values:
        if isinstance(value, list | tuple):
            current = _widest(value, current)
        elif _is_eligible(value):
            if torch.float32 in (current, value.dtype):
                current = torch.float32
            elif (current, value.dtype) != (lower, lower):
                raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
    return current


def _fp32_set_dtype(name: str) -> _Kernel:
    call = operator_named(name)
    place = [argument.name for argument in call._schema.arguments].index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _C._ExcludeDispatchKeyGuard(_OFF):
            given = args[place] if place < len(args) else kwargs.get("dtype")
            if given is None and _is_eligible(args[0]):
                args, kwargs = args[:place], {**kwargs, "dtype": torch.float32}
            return call(*args, **kwargs)

    return kernel


def _fp32_append_dtype(name: str) -> _Kernel:
    call = operator_named(FP32_APPEND_DTYPE[name])
    optional = [a.default_value for a in operator_named(name)._schema.arguments]  # the other overload has no defaults

    def kernel(*args: Any) -> Any:
        with _C._ExcludeDispatchKeyGuard(_OFF):
            to = torch.float32 if _is_eligible(args[0]) else args[0].dtype
            return call(*args, *optional[len(args) :], dtype=to)

    return kernel


def _banned(name: str) -> _Kernel:
    def kernel(*_: Any, **__: Any) -> Any:
        raise RuntimeError(BANNED[name])

    return kernel
