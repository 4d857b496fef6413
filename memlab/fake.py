"""Tensors that know their shape and hold no bytes: on them a step runs without memory and without arithmetic.

With a `FakeMode` entered, whatever makes a tensor makes a fake one, and each operator does no more than work out the
shapes, types and strides of its results; storages have their true sizes all the same. `faked` makes a training step of
such tensors from any other.

Rule 1. Everything is on the CPU, whatever the program asks for: a fake CUDA tensor in a process without a GPU aborts
        the process. `OnCPU` answers each request for another device with a tensor of the CPU's.
Rule 2. Values that the batch brings are known as long as they are few and no floating-point numbers (token numbers,
        masks, lengths) and nothing unknown enters: they are computed beside, on copies, so that a program may ask for
        the number of unmasked tokens.
Rule 3. A number that nobody knows (`loss.item()`) is an `Unknown`: it can be added up and printed. A program that
        steers by it (`if`, a size) cannot be simulated, and is told in which line.
Rule 4. Where the size of a result depends on unknown data (boolean indexing), it is the largest that it can be.
"""

from __future__ import annotations

import contextlib
import copy
import math
import sys
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from .clock import line_of, user_line
from .copies import Recast
from .errors import MemlabError
from .state import snapshot
from .step import TrainingStep
from .unknown import Unknown, needs_data
from .walk import walk

_KNOWN = 2**16  # elements of the largest tensor whose values are computed beside
aten = torch.ops.aten


class FakeMode(FakeTensorMode):
    """PyTorch's fake mode, with Rules 2 and 4.

    `overrides` has, by operator, what runs in its stead: a function of the original and of the operator's arguments,
    called with this mode on, so that it may call the original, other operators, and make tensors. `notes` are sentences
    on what was assumed.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.overrides: dict[Any, Callable[..., Any]] = {
            aten.nonzero.default: self._all_nonzero,
            aten.masked_select.default: self._all_selected,
            aten._unique2.default: self._all_unique,
            aten.unique_consecutive.default: self._all_unique,
            aten.native_batch_norm.default: _statistics_as_weight,
            aten._native_batch_norm_legit.default: _statistics_as_weight,
        }
        self.notes: list[str] = []

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        override = self.overrides.get(func)
        if override is None:
            return super().dispatch(func, types, args, kwargs or {})

        def original(*args: Any, **kwargs: Any) -> Any:
            return super(FakeMode, self).dispatch(func, types, args, kwargs)

        with self:
            return override(original, *args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> FakeMode:
        return self  # `nn.TransformerEncoder` copies its layer, and with the layer's parameters their mode

    def known(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor whose values are known: a copy of `tensor`'s."""
        with _disable_current_modes():
            values = tensor.detach().cpu().clone()
        fake: torch.Tensor = self.fake_tensor_converter.from_real_tensor(self, values, make_constant=True)
        return fake

    # Rule 4

    def _largest(self, what: str) -> None:
        line = user_line()
        note = (
            f"{what}{f' ({line})' if line else ''} has a result whose size depends on data that a simulation does not "
            "have: it is counted as large as it can be, with everything selected"
        )
        if note not in self.notes:
            self.notes.append(note)

    def _all_nonzero(self, original: Any, tensor: torch.Tensor) -> torch.Tensor:
        if is_known(tensor):
            return original(tensor)  # type: ignore[no-any-return]
        self._largest("boolean indexing")
        return torch.empty(tensor.numel(), tensor.dim(), dtype=torch.int64)

    def _all_selected(self, original: Any, tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        self._largest("masked_select")
        return torch.empty(torch.broadcast_shapes(tensor.shape, mask.shape).numel(), dtype=tensor.dtype)

    def _all_unique(self, original: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if is_known(tensor):
            return original(tensor, *args, **kwargs)
        self._largest("unique")
        indices = torch.empty(tensor.shape, dtype=torch.int64)
        return torch.empty(tensor.numel(), dtype=tensor.dtype), indices, torch.empty(tensor.numel(), dtype=torch.int64)


def _statistics_as_weight(original: Any, tensor: torch.Tensor, weight: torch.Tensor | None, *args: Any) -> Any:
    """PyTorch's fake batch norm has its statistics in the input's type; on the CPU they have the weight's."""
    out, *statistics = original(tensor, weight, *args)
    dtype = tensor.dtype if weight is None else weight.dtype
    return out, *(s if s.dtype == dtype or not s.numel() else torch.empty(s.shape, dtype=dtype) for s in statistics)


def is_known(tensor: torch.Tensor) -> bool:
    """Whether the values of a fake tensor are known (Rule 2)."""
    return getattr(tensor, "constant", None) is not None


@contextlib.contextmanager
def faking() -> Iterator[FakeMode]:
    """The modes on, until the block ends; what cannot be simulated is a `MemlabError` that names the user's line."""
    mode, streams = FakeMode(), snapshot()
    try:
        with _patched(fake_tensor, "CONSTANT_NUMEL_LIMIT", _KNOWN), _swappable(mode), _eager(), _no_overflow():
            with explained(), mode, OnCPU():
                yield mode
    finally:
        streams.restore()


# -- a step of fake tensors --------------------------------------------------------------------------------------------


def faked(step: TrainingStep, mode: FakeMode) -> TrainingStep:
    """The same step of fake tensors, while `faking()` is open. Callables build here, so that a model too large for this
    machine never exists; of what exists already a copy is made whose tensors are fake, and the step stays as it is."""
    anew = copy.copy(step) if step.is_built else step.rebuilt()
    tensors = [t for t in walk(anew.model, anew.batch, anew.loss_fn, anew.optimizer) if isinstance(t, torch.Tensor)]
    if any(not mode.is_our_fake(tensor) for tensor in tensors):
        anew = anew.copy(_Fakes(mode))
    return anew


class _Fakes(Recast):
    """Makes fake twins. Storages that are shared stay so."""

    def __init__(self, mode: FakeMode) -> None:
        super().__init__(torch.float32)
        self._mode = mode
        self._storages: dict[Hashable, torch.Tensor] = {}

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._mode.is_our_fake(tensor):
            return tensor
        if tensor.layout is not torch.strided or tensor.is_nested:
            return self._mode.from_tensor(tensor.detach())
        storage = tensor.untyped_storage()
        if _has_few_values(tensor) and storage.nbytes() == tensor.nbytes:
            return self._mode.known(tensor)
        key = storage._cdata, tensor.dtype
        if key not in self._storages:
            self._storages[key] = torch.empty(storage.nbytes() // tensor.itemsize, dtype=tensor.dtype)
        return self._storages[key].as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def like(self, tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(data.detach(), tensor.requires_grad)
        return data if is_known(data) else data.detach().requires_grad_(tensor.requires_grad)

    def script(self, module: torch.jit.ScriptModule) -> NoReturn:
        raise MemlabError(
            f"{type(module).__name__} is TorchScript, which computes with data and cannot be simulated: give the module "
            "that it was made from, or measure() it"
        )

    def array(self, array: Any) -> Any:
        return array


def _has_few_values(tensor: torch.Tensor) -> bool:
    """Whether its values may be known (Rule 2): an optimizer's count of its steps is a floating-point number."""
    if tensor.device.type == "meta" or isinstance(tensor, FakeTensor):
        return False
    return tensor.numel() <= (1 if tensor.is_floating_point() or tensor.is_complex() else _KNOWN)


# -- the devices that a program asks for (Rule 1) ------------------------------------------------------------------------


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
            args = tuple(_on_cpu(arg) if isinstance(arg, str | torch.device | int) and not isinstance(arg, bool) else arg for arg in args)
        return func(*args, **kwargs)


def _on_cpu(device: Any) -> Any:
    if isinstance(device, int):
        return torch.device("cpu")
    if isinstance(device, str | torch.device) and torch.device(device).type != "meta":
        return torch.device("cpu")
    return device


# -- what a program asks of a tensor without data (Rule 3) ---------------------------------------------------------------


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
        if "Unknown" in str(error) or "data pointer" in str(error) or "data_ptr" in str(error):
            raise needs_data("takes the value of a tensor", _line(error)) from None
        raise


def _without_shapes(operator: str, error: BaseException) -> MemlabError:
    return MemlabError(
        f"{operator} (called from {_line(error) or 'the step'}) cannot be simulated: nobody has told PyTorch the shapes of its "
        "results. Register them with torch.library.register_fake, or measure() the step"
    )


def _line(error: BaseException) -> str | None:
    """The innermost line of the user's that an error passed through."""
    found, trail = None, error.__traceback__
    while trail is not None:
        found = line_of(trail.tb_frame.f_code, trail.tb_lineno) or found
        trail = trail.tb_next
    return found


# -- what has to be different while tensors are fake -----------------------------------------------------------------------


@contextlib.contextmanager
def _patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _swappable(mode: FakeMode) -> contextlib.AbstractContextManager[None]:
    """`model.bfloat16()` swaps fake parameters for others, which PyTorch refuses to do with tensors that are weakly
    referred to; and its fake mode does refer to those that it made."""
    swap = torch.utils.swap_tensors
    memo = mode.fake_tensor_converter.meta_converter.tensor_memo

    def forgotten_and_swapped(one: torch.Tensor, other: torch.Tensor) -> None:
        for key in [key for key, tensor in memo.items() if tensor is one or tensor is other]:
            del memo[key]
        swap(one, other)

    return _patched(torch.utils, "swap_tensors", forgotten_and_swapped)


def _eager() -> contextlib.AbstractContextManager[Any]:
    """Compiled functions and modules run as they are written."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()


@contextlib.contextmanager
def _no_overflow() -> Iterator[None]:
    """Loss scaling takes every step: whether a gradient overflows is a matter of data."""
    scaler = torch.amp.GradScaler
    with (
        _patched(scaler, "_maybe_opt_step", lambda self, optimizer, state, *args, **kwargs: optimizer.step(*args, **kwargs)),
        _patched(scaler, "get_scale", lambda self: self._init_scale),
    ):
        yield
