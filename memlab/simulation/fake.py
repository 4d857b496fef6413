"""Tensors that know their shape and hold no bytes: on them a step runs without memory and without arithmetic.

A `FakeMode` makes a fake tensor of whatever makes a tensor, and each operator does no more than work out the shapes,
types and strides of its results; storages have their true sizes all the same. `faked` makes a training step of such
tensors from any other. `faking.py` enters the mode.

Rule 1. Values that the batch brings are known as long as they are few and no floating-point numbers (token numbers,
        masks, lengths) and nothing unknown enters: they are computed beside, on copies, so that a program may ask for
        the number of unmasked tokens.
Rule 2. Where the size of a result depends on unknown data (boolean indexing), it is the largest that it can be.
Rule 3. A step is faked without its weights ever being copied, or made.
Rule 4. A real tensor that a program reaches all the same (a global of another file) has one fake twin, which is used in
        its stead everywhere: no operator sees the real one, and nothing is written into it.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Hashable
from typing import Any, NoReturn

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from ..copies import Recast
from ..errors import MemlabError
from ..step import TrainingStep
from ..walk import walk
from . import as_computed
from .unknown import decided, where

MOST_KNOWN = 2**16  # elements of the largest tensor whose values are computed beside
aten = torch.ops.aten


class FakeMode(FakeTensorMode):
    """PyTorch's fake mode, with Rules 1 and 2.

    `overrides` has, by operator, what runs in its stead: a function of the original and of the operator's arguments,
    called with this mode on, so that it may call the original, other operators, and make tensors. `notes` are sentences
    on what was assumed.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self.overrides: dict[Any, Callable[..., Any]] = {
            aten.nonzero.default: self._all_nonzero,
            aten.masked_select.default: self._all_selected,
            aten._unique2.default: self._all_unique,
            aten.unique_consecutive.default: self._all_unique,
            aten.bincount.default: self._all_counted,
            aten._local_scalar_dense.default: self._truth,
            **{operator: functools.partial(self._filled, value) for operator, value in _FILLED.items()},
            **{operator: functools.partial(self._counted, operator) for operator in _COUNTS},
            **as_computed.OVERRIDES,
        }
        self.notes: list[str] = []
        self.twins: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}  # by the real one's `id`

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # PyTorch's own work, on real tensors too
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

    def twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake tensor that stands in for a real one (Rule 4)."""
        held = self.twins.get(id(tensor))
        if held is None or held[0]() is not tensor:
            with torch._C.DisableTorchFunction(), _disable_current_modes(), self:  # made before the step, for its trace
                twins = Twins(self)
                twin = twins.like(tensor, twins.tensor(tensor))
                if tensor.is_leaf and tensor.grad is not None:
                    twin.grad = twins.tensor(tensor.grad)  # its own: it goes when another takes its place
            held = self.twins[id(tensor)]
        return held[1]

    def stands_in(self, twin: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """Note that `twin` is used in the stead of `tensor` from now on."""
        key, twins = id(tensor), self.twins
        twins[key] = weakref.ref(tensor, lambda _: twins.pop(key, None)), twin
        return twin

    def _filled(self, value: Any, original: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """`torch.ones` and the like: a mask of ones is known as one. Of floating-point numbers those that masks for
        attention begin with: a matrix of one value, or what is made in the likeness of a known tensor."""
        out: torch.Tensor = original(*args, **kwargs)
        like = args[0] if isinstance(args[0], torch.Tensor) else None
        begins = out.dim() > 1 and out.numel() <= MOST_KNOWN if like is None else is_known(like)
        if not (_may_be_known(out) or (begins and not out.is_complex())):
            return out
        with _disable_current_modes():
            values = torch.full(out.shape, args[-1] if value is None else value, dtype=out.dtype)
        return self.known(values)

    def _counted(self, operator: Any, original: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        out: torch.Tensor = original(*args, **kwargs)
        if not _may_be_known(out):
            return out
        with _disable_current_modes():
            values = operator(*args, dtype=out.dtype)
        return self.known(values)

    # Rule 2

    def _largest(self, what: str) -> None:
        line = where()
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

    def _all_counted(self, original: Any, tensor: torch.Tensor, weights: Any = None, minlength: int = 0) -> Any:
        if is_known(tensor) or not minlength:  # as many bins as the caller says
            return original(tensor, weights, minlength)
        return torch.empty(minlength, dtype=torch.int64 if weights is None else weights.dtype)

    def _truth(self, original: Any, tensor: torch.Tensor) -> Any:
        """Asked by PyTorch's own functions, which no function mode sees inside."""
        if is_known(tensor) or tensor.dtype is not torch.bool:
            return original(tensor)
        return decided()


_FILLED: dict[Any, Any] = {
    aten.ones.default: 1,
    aten.ones_like.default: 1,
    aten.new_ones.default: 1,
    aten.zeros.default: 0,
    aten.zeros_like.default: 0,
    aten.new_zeros.default: 0,
    aten.full.default: None,  # the second argument
    aten.full_like.default: None,
    aten.new_full.default: None,
}
_COUNTS = (aten.arange.default, aten.arange.start, aten.arange.start_step)


def is_known(tensor: torch.Tensor) -> bool:
    """Whether the values of a fake tensor are known (Rule 1)."""
    return getattr(tensor, "constant", None) is not None


# -- a step of fake tensors --------------------------------------------------------------------------------------------


def faked(step: TrainingStep, mode: FakeMode) -> TrainingStep:
    """The same step of fake tensors, while `faking()` is open. Callables build here, so that a model too large for this
    machine never exists; of what exists already a copy is made whose tensors are fake, and the step stays as it is."""
    anew = copy.copy(step) if step.is_built else step.rebuilt()
    parts = anew.model, anew.batch, anew.loss_fn, anew.optimizer  # built here, where devices are answered
    with torch._C.DisableTorchFunction():
        tensors = [found for found in walk(*parts) if isinstance(found, torch.Tensor)]
        if any(not mode.is_our_fake(tensor) for tensor in tensors):
            anew = anew.copy(Twins(mode))
    return anew


class Twins(Recast):
    """Makes fake twins. Storages that are shared stay so."""

    def __init__(self, mode: FakeMode) -> None:
        super().__init__(torch.float32)
        self._mode = mode
        self._storages: dict[Hashable, torch.Tensor] = {}

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunction():  # it is the real one that is asked
            return tensor if self._mode.is_our_fake(tensor) else self._twin(tensor)

    def _twin(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided or tensor.is_nested:
            return self._mode.from_tensor(tensor.detach())
        storage = tensor.untyped_storage()
        has_values = tensor.device.type != "meta" and not isinstance(tensor, FakeTensor)
        if has_values and storage.nbytes() == tensor.nbytes and (_may_be_known(tensor) or _is_additive_mask(tensor)):
            return self._mode.known(tensor)
        key = storage._cdata, tensor.dtype
        if key not in self._storages:
            self._storages[key] = torch.empty(storage.nbytes() // tensor.itemsize, dtype=tensor.dtype)
        return self._storages[key].as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def like(self, tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        if self._mode.is_our_fake(tensor):
            return tensor
        if isinstance(tensor, nn.Parameter):
            twin: torch.Tensor = nn.Parameter(data.detach(), tensor.requires_grad)
        else:
            twin = data if is_known(data) else data.detach().requires_grad_(tensor.requires_grad)
        return self._mode.stands_in(twin, tensor)

    def script(self, module: torch.jit.ScriptModule) -> NoReturn:
        raise MemlabError(
            f"{type(module).__name__} is TorchScript, which computes with data and cannot be simulated: give the "
            "module that it was made from, or measure() it"
        )

    def array(self, array: Any) -> Any:
        return array


def _may_be_known(tensor: torch.Tensor) -> bool:
    """Rule 1. (An optimizer's count of its steps is a floating-point number.)"""
    counts = not tensor.is_floating_point() and not tensor.is_complex()
    return (
        tensor.layout is torch.strided and not tensor.requires_grad and tensor.numel() <= (MOST_KNOWN if counts else 1)
    )


def _is_additive_mask(tensor: torch.Tensor) -> bool:
    """0 where attention goes, minus infinity elsewhere: PyTorch's own layers ask whether such a mask is causal."""
    floats = tensor.is_floating_point() and not tensor.requires_grad
    if not (floats and tensor.dim() > 1 and tensor.numel() <= MOST_KNOWN):
        return False
    with _disable_current_modes():
        nowhere = tensor.isneginf()
        return bool(nowhere.any()) and bool((nowhere | (tensor == 0)).all())
