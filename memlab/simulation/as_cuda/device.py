"""What a program asks of the GPU itself: whether there is one, to wait for it, how its optimizers run there.

The user's own code is told that a GPU of compute capability 8.0 is there, with nothing to wait for; installed packages,
which would go on to ask it for more, are told the truth.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer as optimizers

from ...patch import replaced
from ..faking import here
from ..unknown import Unknown, is_packaged

_NOTHING_TO_DO = (
    "synchronize",
    "empty_cache",
    "ipc_collect",
    "set_device",
    "manual_seed",
    "manual_seed_all",
    "reset_peak_memory_stats",
    "reset_max_memory_allocated",
    "reset_accumulated_memory_stats",
)


@contextlib.contextmanager
def present() -> Iterator[None]:
    """While the block is open, the device is there for this thread's program."""
    streams = {"__new__": lambda *_, **__: _Stream()}  # the classes stay: packages name them in annotations
    with (
        here(torch.cuda, _answers()),
        here(torch.cuda.Stream, streams),
        here(torch.cuda.Event, streams),
        here(torch.Tensor, {"record_stream": lambda *_: None}),
        _as_optimizers_there(),
    ):
        yield


def _answers() -> dict[str, Callable[..., Any]]:
    is_available, count = torch.cuda.is_available, torch.cuda.device_count
    return {
        **dict.fromkeys(_NOTHING_TO_DO, lambda *_, **__: None),
        "is_available": lambda: is_available() if is_packaged(sys._getframe(2)) else True,
        "device_count": lambda: count() if is_packaged(sys._getframe(2)) else 1,
        "current_device": lambda: 0,
        "get_device_name": lambda *_: "a simulated GPU",
        "get_device_capability": lambda *_: (8, 0),
        "is_bf16_supported": lambda *_, **__: True,
        "current_stream": lambda *_: _Stream(),
        "default_stream": lambda *_: _Stream(),
        "stream": lambda *_: contextlib.nullcontext(),
    }


class _Stream:
    """A stream, or an event on one, on which all is done."""

    def _done(self, *_: Any) -> None:
        pass

    record = wait = synchronize = wait_stream = wait_event = record_event = _done

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return Unknown()


@contextlib.contextmanager
def _as_optimizers_there() -> Iterator[None]:
    """Optimizers take their foreach form by default there (`_default_to_fused_or_foreach`), and may be capturable."""
    devices = ("_get_foreach_kernels_supported_devices", "_get_capturable_supported_devices")
    with contextlib.ExitStack() as stack:
        kinds = [*getattr(optimizers, "_foreach_supported_types", ()), FakeTensor]
        stack.enter_context(replaced(optimizers, {"_foreach_supported_types": kinds}))
        for name, module in list(sys.modules.items()):
            if name.startswith("torch.optim"):
                stack.enter_context(here(module, dict.fromkeys(devices, lambda *_, **__: ["cpu", "cuda"])))
        yield
