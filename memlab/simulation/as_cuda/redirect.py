"""What a program says of CUDA's autocast reaches the CPU's: `torch.autocast("cuda")`, loss scaling, `custom_fwd`.

One state serves both names, and starts with CUDA's default type, fp16. Known limit: `torch.autocast("cuda")` made
before the scope was opened (a decorator) has been disabled by PyTorch itself, and stays so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.amp import autocast_mode, grad_scaler

from ..faking import here
from .autocast import clear_cache


@contextlib.contextmanager
def redirected() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if not torch.is_autocast_enabled("cpu"):
            stack.callback(torch.set_autocast_dtype, "cpu", torch.get_autocast_dtype("cpu"))
            torch.set_autocast_dtype("cpu", torch.get_autocast_dtype("cuda"))
        stack.callback(clear_cache)
        stack.enter_context(here(torch, _state()))
        autocast, scaler = autocast_mode.autocast, grad_scaler.GradScaler
        stack.enter_context(here(autocast, {"__init__": _starting(autocast.__init__)}))
        stack.enter_context(here(scaler, {"__init__": _starting(scaler.__init__)}))
        stack.enter_context(here(autocast_mode, {"_cast": _casting(autocast_mode._cast)}))
        yield


def _on_cpu(device: Any) -> Any:
    return "cpu" if str(device).startswith("cuda") else device


def _state() -> dict[str, Callable[..., Any]]:
    """The functions of `torch` that ask for, or set, the state of autocast; without a device they mean CUDA."""
    is_enabled, set_enabled = torch.is_autocast_enabled, torch.set_autocast_enabled
    get_dtype, set_dtype, clear = torch.get_autocast_dtype, torch.set_autocast_dtype, torch.clear_autocast_cache

    def clear_both() -> None:
        clear()
        clear_cache()

    def switch(*args: Any) -> None:
        set_enabled("cpu" if len(args) == 1 else _on_cpu(args[0]), args[-1])

    return {
        "is_autocast_enabled": lambda device_type="cuda": is_enabled(_on_cpu(device_type)),
        "set_autocast_enabled": switch,
        "get_autocast_dtype": lambda device_type: get_dtype(_on_cpu(device_type)),
        "set_autocast_dtype": lambda device_type, dtype: set_dtype(_on_cpu(device_type), dtype),
        "get_autocast_gpu_dtype": lambda: get_dtype("cpu"),
        "set_autocast_gpu_dtype": lambda dtype: set_dtype("cpu", dtype),
        "clear_autocast_cache": clear_both,
    }


def _starting(init: Callable[..., None]) -> Callable[..., None]:
    """An `__init__` whose first argument is a device, CUDA where the caller does not say."""

    def on_cpu(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in ("device_type", "device"):
            if name in kwargs:
                kwargs[name] = _on_cpu(kwargs[name])
                return init(self, *args, **kwargs)
        return init(self, _on_cpu(args[0] if args else "cuda"), *args[1:], **kwargs)

    return on_cpu


def _casting(cast: Callable[..., Any]) -> Callable[..., Any]:
    return lambda value, device_type, dtype: cast(value, _on_cpu(device_type), dtype)
