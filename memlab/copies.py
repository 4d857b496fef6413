"""Deep copies whose tensors are others (in another precision, in another place), linked as the originals are.

`copy.deepcopy` keeps links through its memo; here the memo is filled first, with every tensor's twin, so that a copy in
host memory never takes device memory. `Recast` makes twins in another dtype and on another device. Rules:

1. Twins share storage where the originals are the same view of one storage (tied parameters).
2. Wrappers (compilation, data-parallel) are left off: the copy is of what they wrap.
3. A scripted module is stored and loaded by TorchScript, whole.
4. numpy's floating arrays follow the tensors' dtype: a batch of them is a batch.
5. A function of the user's is copied with its closure, its defaults and the data and helper functions that it names
   among its globals; what cannot be copied there (an open file) is shared.
"""

from __future__ import annotations

import copy
import io
import types
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import nest
from .clock import unwrapped
from .walk import data_globals, helpers, is_foreign, is_optimizer_hooks, walk

Memo = dict[int, Any]


class Recast:
    """Makes twins: floating tensors in `dtype`, complex ones in its complex counterpart, all on `device`."""

    def __init__(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self._dtype, self._device = dtype, torch.device(device)

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """A new tensor for that view of a storage; all tensors that are the same view share it."""
        return tensor.detach().to(self._device, _counterpart(tensor.dtype, self._dtype), copy=True)

    def like(self, tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        """`data` as a tensor of the original's class (a parameter, a buffer)."""
        return torch.Tensor._make_subclass(type(tensor), data.detach(), tensor.requires_grad)

    def script(self, module: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
        stored = io.BytesIO()  # `copy.deepcopy` of a scripted module runs on the original's parameters
        torch.jit.save(module, stored)
        stored.seek(0)
        twin: torch.jit.ScriptModule = torch.jit.load(stored, map_location=self._device).to(self._dtype)
        return twin

    def array(self, array: Any) -> Any:
        name = str(self._dtype).removeprefix("torch.")  # numpy's name for it is the same, but it has no bfloat16
        return array.astype(name) if array.dtype.kind == "f" and name != "bfloat16" else array.copy()


def copied(*roots: Any, twins: Recast) -> list[Any]:
    """Copies of the roots, with the twins in the tensors' places."""
    memo: Memo = {}
    found = list(walk(*roots))
    tensors = [t for t in found if isinstance(t, torch.Tensor) and not is_lazy(t)]
    for module in found:
        scripted = isinstance(module, torch.jit.ScriptModule)
        if scripted and not any(id(held) in memo for held in (module, *module.parameters())):  # outermost comes first
            twin = twins.script(module)
            for of in (nn.Module.modules, nn.Module.parameters, nn.Module.buffers):
                for old, new in zip(of(module), of(twin), strict=True):
                    memo[id(old)] = new
    tensors = [t for t in tensors if id(t) not in memo]
    _make_twins([t for t in tensors if not is_traceable_wrapper_subclass(t)], memo, twins)
    memo |= {id(array): twins.array(array) for array in found if nest.is_numpy(array)}
    for module in reversed(found):  # a wrapper may hold others, which the walk found later
        if isinstance(module, nn.Module) and unwrapped(module) is not module:
            memo[id(module)] = copy.deepcopy(unwrapped(module), memo)
    for optimizer in found:
        if isinstance(optimizer, torch.optim.Optimizer):
            memo[id(optimizer)] = _copied_optimizer(optimizer, memo)
    return [_copied(root, memo) for root in roots]


def _make_twins(tensors: list[torch.Tensor], memo: Memo, twins: Recast) -> None:
    views: dict[Hashable, torch.Tensor] = {}
    for tensor in tensors:
        if tensor._post_accumulate_grad_hooks:
            raise TypeError("a parameter has post-accumulate-grad hooks, which would act on the original")
        view = view_of(tensor)
        if view not in views:
            views[view] = twins.tensor(tensor)
        memo[id(tensor)] = twins.like(tensor, views[view])
    for tensor in tensors:
        twin = memo[id(tensor)]
        if twin is tensor:
            continue
        twin.__dict__.update(copy.deepcopy(tensor.__dict__, memo))
        for hook in (tensor._backward_hooks or {}).values():
            twin.register_hook(hook)


def view_of(tensor: torch.Tensor) -> Hashable:
    """Equal for tensors that are the same view of one storage."""
    if tensor.layout is not torch.strided or tensor.is_nested or not tensor.numel():
        return id(tensor)
    storage = tensor.untyped_storage()._cdata  # by address, meta tensors would all be one
    return storage, tensor.storage_offset(), tensor.dtype, tensor.size(), tensor.stride()


def _counterpart(own: torch.dtype, wanted: torch.dtype) -> torch.dtype:
    if own.is_complex:
        return wanted.to_complex()
    return wanted if own.is_floating_point else own


def _copied(value: Any, memo: Memo) -> Any:
    if isinstance(value, types.FunctionType) and not is_foreign(value):
        return _copied_function(value, memo)
    return copy.deepcopy(value, memo)


def _copied_function(function: types.FunctionType, memo: Memo) -> Any:
    if id(function) in memo:
        return memo[id(function)]
    space = memo.setdefault(id(function.__globals__), dict(function.__globals__))  # one for all that share the first
    cells = tuple(types.CellType() for _ in function.__closure__ or ())
    new = types.FunctionType(function.__code__, space, function.__name__, None, cells or None)
    memo[id(function)] = new
    new.__qualname__, new.__module__ = function.__qualname__, function.__module__
    for cell, old in zip(cells, function.__closure__ or (), strict=True):
        cell.cell_contents = _copied_or_shared(old.cell_contents, memo)
    if function.__defaults__:
        new.__defaults__ = tuple(_copied_or_shared(default, memo) for default in function.__defaults__)
    for name, default in (function.__kwdefaults__ or {}).items():
        new.__kwdefaults__ = {**(new.__kwdefaults__ or {}), name: _copied_or_shared(default, memo)}
    new.__dict__.update({name: _copied_or_shared(value, memo) for name, value in function.__dict__.items()})
    for name, value in {**data_globals(function), **helpers(function)}.items():
        space[name] = _copied_or_shared(value, memo)
    return new


def _copied_or_shared(value: Any, memo: Memo) -> Any:
    try:
        return _copied(value, memo)
    except Exception:  # rule 3: whatever __deepcopy__ of a user's object raises
        return value


def _copied_optimizer(optimizer: torch.optim.Optimizer, memo: Memo) -> torch.optim.Optimizer:
    """Every attribute, which `copy.deepcopy` of an optimizer would not keep, but a scheduler's `step` on the instance,
    which is bound to the original."""
    new: torch.optim.Optimizer = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if is_optimizer_hooks(name):
            vars(new)[name] = type(value)((key, _copied(hook, memo)) for key, hook in value.items())
        elif name != "step":
            vars(new)[name] = copy.deepcopy(value, memo)
    return new
