"""Fake tensors switched on, and what has to be different around a program while they are.

    with faking() as mode:
        step = faked(step, mode)

Rule 1. Everything is on the CPU, whatever the program asks for: a fake CUDA tensor in a process without a GPU aborts
        the process. `OnCPU` answers each request for another device with a tensor of the CPU's, and puts twins in the
        places of real tensors (`fake.py`, Rule 4).
Rule 2. A number that nobody knows (`loss.item()`) is an `Unknown`: it can be added up and printed. A program that
        steers by it (`if`, a size) cannot be simulated, and is told in which line.
Rule 3. Afterwards all is as it was: attributes that were replaced, warnings, random streams.
Rule 4. What is replaced is so for this thread alone: in others, real steps go on. One simulation runs at a time.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import MemlabError
from ..patch import replaced
from ..state import snapshot
from .fake import MOST_KNOWN, FakeMode, is_known
from .unknown import Unknown, decided, needs_data, refused, where

_log = logging.getLogger(fake_tensor.__name__)
_autograd: Any = torch.autograd


_turn = threading.RLock()


@contextlib.contextmanager
def faking() -> Iterator[FakeMode]:
    """The modes on, until the block ends; what cannot be simulated is a `MemlabError` that names the user's line."""
    mode, streams = FakeMode(), snapshot()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_turn)
            for context in _circumstances(mode):
                stack.enter_context(context)
            on_cpu = OnCPU(mode)
            stack.enter_context(
                here(_autograd, {"_engine_run_backward": on_cpu.throughout(_autograd._engine_run_backward)})
            )
            with explained(), mode, on_cpu:
                yield mode
    finally:
        mode.twins.clear()  # a gradient among them would hold the mode, and the mode them
        streams.restore()


# -- the devices that a program asks for (Rule 1) ----------------------------------------------------------------------


_STAYS = frozenset({torch.Tensor.cuda, torch.Tensor.pin_memory})
_PROPERTIES = ("shape", "dtype", "device", "layout", "is_cpu", "is_leaf", "is_nested", "itemsize", "nbytes")
# What instruments ask of any tensor, a real one too: the state of a random stream, which a checkpoint keeps.
_LOOKS = frozenset({torch.Tensor.untyped_storage, *(getattr(torch.Tensor, name).__get__ for name in _PROPERTIES)})


class OnCPU(TorchFunctionMode):
    """Every request for a device is answered with the CPU; numbers asked of tensors without data are `Unknown`."""

    def __init__(self, mode: FakeMode) -> None:
        super().__init__()
        self._mode = mode

    def throughout(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """With this mode on also where PyTorch has taken it off: in `loss.backward()`, where checkpoints recompute."""

        def on(*args: Any, **kwargs: Any) -> Any:
            if any(mode is self for mode in _get_current_function_mode_stack()):
                return function(*args, **kwargs)
            with self:
                return function(*args, **kwargs)

        return on

    def _no_real(self, value: Any) -> Any:
        if type(value) is FakeTensor:
            return value
        if isinstance(value, torch.Tensor):
            return self._mode.twin(value) if _is_real(value) else value
        if type(value) in (tuple, list) and any(
            isinstance(item, torch.Tensor) and type(item) is not FakeTensor for item in value
        ):
            return type(value)(self._no_real(item) for item in value)
        return value

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        looks = func in _LOOKS and not (isinstance(args[0], nn.Parameter) or id(args[0]) in self._mode.twins)
        if not looks:
            args = tuple([self._no_real(arg) for arg in args])
            kwargs = {name: self._no_real(value) for name, value in kwargs.items()}
        if func in _ASKS and isinstance(args[0], FakeTensor) and not is_known(args[0]):
            return _ASKS[func](*args)
        if func in _STAYS:
            return args[0]
        if kwargs.get("device") is not None and func is not torch.device:
            kwargs = {**kwargs, "device": _on_cpu(kwargs["device"])}
        if func is torch.Tensor.to:
            args = tuple(
                _on_cpu(arg) if isinstance(arg, str | torch.device | int) and not isinstance(arg, bool) else arg
                for arg in args
            )
        return func(*args, **kwargs)


def _is_real(tensor: torch.Tensor) -> bool:
    """Whether it is a tensor with bytes: not fake, no wrapper around others, not waiting for its shape."""
    return not (
        isinstance(tensor, FakeTensor)
        or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        or is_traceable_wrapper_subclass(tensor)
        or is_lazy(tensor)
    )


def _on_cpu(device: Any) -> Any:
    if isinstance(device, int):
        return torch.device("cpu")
    if isinstance(device, str | torch.device) and torch.device(device).type != "meta":
        return torch.device("cpu")
    return device


@contextlib.contextmanager
def _no_default_device() -> Iterator[None]:
    """`torch.set_default_device("cuda")`, `with torch.device("cuda")`: opened before, they would be asked after us."""
    modes = [_pop_mode() for _ in _get_current_function_mode_stack()]
    for mode in reversed(modes):
        if not isinstance(mode, DeviceContext):
            _push_mode(mode)
    try:
        with here(torch, {"set_default_device": lambda device: None}):
            yield
    finally:
        for _ in _get_current_function_mode_stack():
            _pop_mode()
        for mode in reversed(modes):
            _push_mode(mode)


# -- what a program asks of a tensor without data (Rule 2) -------------------------------------------------------------


_ASKS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.item: lambda _: Unknown(),
    torch.Tensor.__format__: lambda tensor, form: str(tensor) if tensor.dim() else str(Unknown()),
    torch.Tensor.__float__: lambda _: math.nan,  # Python makes a plain float of it
    torch.Tensor.__bool__: lambda _: decided(),
    torch.Tensor.__int__: refused("takes the value of a tensor as a whole number"),
    torch.Tensor.__index__: refused("takes the value of a tensor as a whole number"),
    torch.Tensor.numpy: refused("reads the values of a tensor with .numpy()"),
    torch.Tensor.__array__: refused("reads the values of a tensor as an array"),
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
    trail = list(traceback.walk_tb(error.__traceback__))
    return where([(frame.f_code, number) for frame, number in reversed(trail)])


# -- what has to be different while tensors are fake -------------------------------------------------------------------


def here(owner: Any, values: Mapping[str, Callable[..., Any]]) -> contextlib.AbstractContextManager[None]:
    """`owner`'s functions have these stand-ins in this thread, while the block is open (Rule 4)."""
    thread = threading.get_ident()

    def choosing(stand_in: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original, updated=())
        def function(*args: Any, **kwargs: Any) -> Any:
            return (stand_in if threading.get_ident() == thread else original)(*args, **kwargs)

        return function

    names = [name for name in values if hasattr(owner, name)]
    return replaced(owner, {name: choosing(values[name], getattr(owner, name)) for name in names})


def _autocast_nesting() -> int:
    """How many autocast blocks are open."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


@contextlib.contextmanager
def _switches() -> Iterator[None]:
    """What a program may leave switched, an interrupted one above all."""
    default, autocast = torch.get_default_dtype(), torch.is_autocast_enabled("cpu")
    autocast_type, grad = torch.get_autocast_dtype("cpu"), torch.is_grad_enabled()
    nesting = _autocast_nesting()
    try:
        yield
    finally:
        while _autocast_nesting() > nesting:  # else the weights that it has cast are never let go of
            torch.autocast_decrement_nesting()
        if not nesting:
            torch.clear_autocast_cache()
        torch.set_default_dtype(default)
        torch.set_autocast_enabled("cpu", autocast)
        torch.set_autocast_dtype("cpu", autocast_type)
        torch.set_grad_enabled(grad)


def _circumstances(mode: FakeMode) -> Iterator[contextlib.AbstractContextManager[Any]]:
    yield _no_default_device()
    yield _switches()
    yield replaced(fake_tensor, {"CONSTANT_NUMEL_LIMIT": MOST_KNOWN})
    yield replaced(_log, {"disabled": True})  # it logs the user's own errors a second time
    yield _swappable(mode)
    yield _no_overflow()
    yield _numbers_that_are_finite(math)
    yield _numbers_that_are_finite(sys.modules.get("numpy"))
    yield replaced(torch.distributions.Distribution, {"_validate_args": False})  # by looking at values
    yield here(nn.init, {"_no_grad_trunc_normal_": lambda tensor, *_, **__: tensor})  # draws until all fit
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

    return here(torch.amp.GradScaler, {"_maybe_opt_step": step, "get_scale": lambda self: self._init_scale})


def _numbers_that_are_finite(module: Any) -> contextlib.AbstractContextManager[None]:
    """`if not math.isfinite(loss.item()): stop`. Where nothing is computed, a NaN is a number that nobody knows."""

    def answering(answer: bool, function: Any) -> Callable[..., Any]:
        return lambda x, *args, **kwargs: answer if isinstance(x, float) and x != x else function(x, *args, **kwargs)

    answers = {"isnan": False, "isfinite": True}
    return here(module, {name: answering(answer, getattr(module, name, None)) for name, answer in answers.items()})
