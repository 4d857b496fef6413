"""A CPU build of PyTorch that, on fake tensors, saves for backward what CUDA would save.

While `as_cuda(mode)` is open, fake tensors of the CPU behave for autograd, autocast and the choice of kernels as on a
CUDA device of compute capability 8.0 or later. Read in this order: `policies.py` and `autocast.py` (what is cast),
`redirect.py` (what a program says of CUDA's autocast), `device.py` (what it asks of the GPU itself), `composites.py`
and `attention.py` (what operators are composed of), `results.py` (what kernels return).

Rule 1. Kernels are registered with PyTorch's dispatcher for as long as the block is open. Afterwards its tables are
        what they were, and so are the attributes that were replaced, also after an exception.
Rule 2. Kernels hold for the whole process: nothing real may run inside. In other threads operators are composed as they
        were, and the CPU's autocast, for which there is no way back, is refused.
Rule 3. No tensor is made on CUDA.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import _meta_registrations
from torch._subclasses.fake_tensor import FakeTensorMode

from ...patch import replaced
from ..fake import FakeMode
from . import autocast, composites, results
from .device import present
from .redirect import redirected

absent: tuple[str, ...] = (
    "what cuDNN reserves for backward (nn.LSTM, nn.GRU, batch norm with channels last)",
    "workspaces of cuBLAS and cuDNN",
    "the CUDA context",
    "fragmentation",
    "which attention kernel the card takes: assumed is that of compute capability 8.0 or later, without cuDNN's",
)

_open = False


@contextlib.contextmanager
def as_cuda(mode: FakeMode) -> Iterator[None]:
    """Fake CPU tensors of `mode` behave as on CUDA, until the block ends. The caller enters `mode`, before or inside.

    What this version of PyTorch does not have is left out. A block within a block changes nothing more.
    """
    answers = replaced(mode, {"overrides": {**mode.overrides, **results.overrides()}})
    if _open:
        with answers:
            yield
    else:
        with _registered(), redirected(), present(), _shapes(), answers:
            yield


@contextlib.contextmanager
def _registered() -> Iterator[None]:
    global _open
    library = torch.library.Library("aten", "IMPL")
    try:
        _open = True
        FakeTensorMode.cache_clear()  # it is of the CPU's kernels, and every mode's
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"(?s).*Overriding a previously registered kernel")  # that is the purpose
            for (name, key), kernel in {**autocast.kernels(), **composites.kernels()}.items():
                library.impl(name, _in_this_thread(name, kernel), key)
        yield
    finally:
        library._destroy()
        FakeTensorMode.cache_clear()
        _open = False


def _in_this_thread(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    if kernel is torch.library.fallthrough_kernel:
        return kernel
    thread, operator = threading.get_ident(), autocast.operator_named(name)

    def chosen(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            return kernel(*args, **kwargs)
        if kernel in composites.COMPOSED:
            return operator.decompose(*args, **kwargs)
        raise RuntimeError(
            f"{name} was called while memlab.simulate(device='cuda') runs in another thread, which changes PyTorch's "
            "operators for the whole process meanwhile: wait for it, or simulate in a process of its own"
        )

    return chosen


def _shapes() -> contextlib.AbstractContextManager[None]:
    """PyTorch's shape functions ask `device_hint` where results differ on CUDA: embedding bags, pixel shuffle, FFTs."""
    hint: Callable[[torch.Tensor], str] = getattr(_meta_registrations, "device_hint", lambda _: "")

    def on_cuda(tensor: torch.Tensor) -> str:
        device = hint(tensor)
        return "cuda" if device == "cpu" else device

    return replaced(_meta_registrations, {"device_hint": on_cuda})
