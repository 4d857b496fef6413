"""Fake tensors switched on, and what has to be different around a program while they are.

    with faking() as mode:
        step = faked(step, mode)

Rule 1. Everything is on the CPU, whatever the program asks for: a fake CUDA tensor in a process without a GPU aborts
        the process. `OnCPU` answers each request for another device with a tensor of the CPU's.
Rule 2. A number that nobody knows (`loss.item()`) is an `Unknown`: it can be added up and printed. A program that
        steers by it (`if`, a size) cannot be simulated, and is told in which line.
Rule 3. Afterwards all is as it was: attributes that were replaced, warnings, random streams.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch.overrides import TorchFunctionMode

from .clock import line_of
from .errors import MemlabError
from .fake import MOST_KNOWN, FakeMode, is_known
from .patch import replaced
from .state import snapshot
from .unknown import Unknown, needs_data

_log = logging.getLogger(fake_tensor.__name__)


@contextlib.contextmanager
def faking() -> Iterator[FakeMode]:
    """The modes on, until the block ends; what cannot be simulated is a `MemlabError` that names the user's line."""
    mode, streams = FakeMode(), snapshot()
    try:
        with contextlib.ExitStack() as stack:
            for context in _circumstances(mode):
                stack.enter_context(context)
            with explained(), mode, OnCPU():
                yield mode
    finally:
        streams.restore()


# -- the devices that a program asks for (Rule 1) ----------------------------------------------------------------------


class OnCPU(TorchFunctionMode):
    """Every request for a device is answered with the CPU; numbers asked of tensors without data are `Unknown`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ASKS and isinstance(args[0], FakeTensor) and not is_known(args[0]):
            return _ASKS[func](*args)
        if func is torch.Tensor.cuda:
            return args[0]
        if kwargs.get("device") is not None and func is not torch.device:
            kwargs = {**kwargs, "device": _on_cpu(kwargs["device"])}
        if func is torch.Tensor.to:
            args = tuple(
                _on_cpu(arg) if isinstance(arg, str | torch.device | int) and not isinstance(arg, bool) else arg
                for arg in args
            )
        return func(*args, **kwargs)


def _on_cpu(device: Any) -> Any:
    if isinstance(device, int):
        return torch.device("cpu")
    if isinstance(device, str | torch.device) and torch.device(device).type != "meta":
        return torch.device("cpu")
    return device


# -- what a program asks of a tensor without data (Rule 2) -------------------------------------------------------------


def _refuse(what: str) -> Callable[..., NoReturn]:
    def ask(*_: Any) -> NoReturn:
        raise needs_data(what)

    return ask


_ASKS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.item: lambda _: Unknown(),
    torch.Tensor.__format__: lambda tensor, form: str(tensor) if tensor.dim() else str(Unknown()),
    torch.Tensor.__float__: lambda _: math.nan,  # Python makes a plain float of it
    torch.Tensor.__bool__: _refuse("decides by the value of a tensor"),
    torch.Tensor.__int__: _refuse("takes the value of a tensor as a whole number"),
    torch.Tensor.__index__: _refuse("takes the value of a tensor as a whole number"),
    torch.Tensor.numpy: _refuse("reads the values of a tensor with .numpy()"),
    torch.Tensor.__array__: _refuse("reads the values of a tensor as an array"),
}


_OF_DATA = ("Unknown", "data pointer", "data_ptr", "data is not allocated")  # in PyTorch's errors


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """PyTorch's own errors on tensors without data, in words."""
    try:
        yield
    except MemlabError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise needs_data(f"calls {error.func}, whose result depends on data", _line(error)) from None
    except UnsupportedOperatorException as error:
        raise _without_shapes(str(error.func), error) from None
    except NotImplementedError as error:
        if "'Meta' backend" in str(error) or "fake impl" in str(error):
            raise _without_shapes(str(error).split("'")[1] if "'" in str(error) else "an operator", error) from None
        raise
    except (RuntimeError, TypeError) as error:
        if any(words in str(error) for words in _OF_DATA):
            raise needs_data("takes the value of a tensor", _line(error)) from None
        raise


def _without_shapes(operator: str, error: BaseException) -> MemlabError:
    return MemlabError(
        f"{operator} (called from {_line(error) or 'the step'}) cannot be simulated: nobody has told PyTorch the "
        "shapes of its results. Register them with torch.library.register_fake, or measure() the step"
    )


def _line(error: BaseException) -> str | None:
    """The innermost line of the user's that an error passed through."""
    found, trail = None, error.__traceback__
    while trail is not None:
        found = line_of(trail.tb_frame.f_code, trail.tb_lineno) or found
        trail = trail.tb_next
    return found


# -- what has to be different while tensors are fake -------------------------------------------------------------------


def _circumstances(mode: FakeMode) -> Iterator[contextlib.AbstractContextManager[Any]]:
    yield replaced(fake_tensor, {"CONSTANT_NUMEL_LIMIT": MOST_KNOWN})
    yield replaced(_log, {"disabled": True})  # it logs the user's own errors a second time
    yield _swappable(mode)
    yield _no_overflow()
    yield replaced(torch.distributions.Distribution, {"_validate_args": False})  # by looking at values
    yield replaced(nn.init, {"_no_grad_trunc_normal_": lambda tensor, *_, **__: tensor})  # draws until all fit
    if "torch._dynamo" in sys.modules:  # compiled functions and modules run as they are written
        yield torch.compiler.set_stance("force_eager")
    hugging_face = sys.modules.get("transformers.utils.import_utils")  # keeps masks for tensors that it sees to be fake
    yield replaced(hugging_face, {"is_fake_tensor": lambda tensor: False})
    yield _ignoring("Accessing the data pointer of FakeTensor")  # by `copy.deepcopy` of a parameter


@contextlib.contextmanager
def _ignoring(message: str) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message)
        yield


def _swappable(mode: FakeMode) -> contextlib.AbstractContextManager[None]:
    """`model.bfloat16()` swaps fake parameters for others, which PyTorch refuses to do with tensors that are weakly
    referred to; and its fake mode does refer to those that it made."""
    swap: Callable[[torch.Tensor, torch.Tensor], None] = torch.utils.swap_tensors
    memo = mode.fake_tensor_converter.meta_converter.tensor_memo

    def forgotten_and_swapped(one: torch.Tensor, other: torch.Tensor) -> None:
        for key in [key for key, tensor in memo.items() if tensor is one or tensor is other]:
            del memo[key]
        swap(one, other)

    return replaced(torch.utils, {"swap_tensors": forgotten_and_swapped})


def _no_overflow() -> contextlib.AbstractContextManager[None]:
    """Loss scaling takes every step: whether a gradient overflows is a matter of data."""

    def step(self: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)

    return replaced(torch.amp.GradScaler, {"_maybe_opt_step": step, "get_scale": lambda self: self._init_scale})
