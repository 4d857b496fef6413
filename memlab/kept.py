"""What modules keep from one forward pass to the next outside parameters and buffers: counters, averages kept by hand.

With `kept(modules)` one can see what a step left there. Not all of it is state: an attention map that is kept for a
picture is another after each pass, and matters to none. What a second, identical pass changes once more is state, and
that is how `proof.py` tells. Of lists and the like the length counts too, as `len(path)`.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from .clock import clean_name
from .nest import is_numpy
from .walk import attributes, slots

Kept: TypeAlias = dict[str, complex | torch.Tensor]

LENGTH = "len("
_DEPTH = 4
_OWN = frozenset(vars(nn.Module()))


def kept(roots: Mapping[str, nn.Module]) -> Kept:
    """The numbers and tensors among the attributes of all modules below some roots (by prefix for their names), of
    their containers and plain objects, by path; tensors as copies in host memory."""
    modules = {prefix + name: module for prefix, root in roots.items() for name, module in root.named_modules()}
    seen = {id(module) for module in modules.values()}
    found: Kept = {}
    for name, module in modules.items():
        for attribute, value in vars(module).items():
            if attribute not in _OWN:
                path = clean_name(f"{name}.{attribute}").removeprefix(".")
                found.update(_numbers(value, path, seen, _DEPTH))
    return found


def _numbers(value: Any, path: str, seen: set[int], depth: int) -> Iterator[tuple[str, complex | torch.Tensor]]:
    if isinstance(value, int | float | complex):
        yield path, value
    elif isinstance(value, torch.Tensor) or is_numpy(value):
        tensor = value.detach() if isinstance(value, torch.Tensor) else _tensor(value)
        if tensor is not None and tensor.layout is torch.strided and not tensor.is_nested:
            yield path, tensor.to("cpu", copy=True)
    elif depth and id(value) not in seen:
        seen.add(id(value))
        if isinstance(value, list | dict | set | collections.deque):
            yield f"{LENGTH}{path})", len(value)
        for name, inner in _inside(value):
            yield from _numbers(inner, f"{path}{name}", seen, depth - 1)


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", inner) for key, inner in value.items())
    elif isinstance(value, list | tuple | collections.deque):
        yield from ((f"[{index}]", inner) for index, inner in enumerate(value))
    else:
        own = {**(attributes(value) or {}), **slots(value)}
        yield from ((f".{name}", inner) for name, inner in own.items())


def _tensor(array: Any) -> torch.Tensor | None:
    return torch.from_numpy(array.copy()) if array.dtype.kind in "biufc" else None
