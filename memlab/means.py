"""Random draws replaced by their means, so that steps which draw in another order can be compared.

With `Means` entered, dropout keeps everything at its expected size, noise is zero, a random time step the middle one.
Operators that drew and have no mean (`randperm`, `multinomial`) are left to draw, and their names are in `no_mean`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from .modes import LightMode

_Given = dict[str, Any]  # an operator's arguments by name


class Means(LightMode):
    """A dispatch mode; read `no_mean` afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.no_mean: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        name = func.name().removeprefix("aten::").partition(".")[0]
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        before = global_streams()
        out = func(*args, **kwargs)
        given = _given(func, args, kwargs)
        if name in _MEANS:
            mean = _MEANS[name](given)
            return out.copy_(mean) if isinstance(mean, torch.Tensor) else out.fill_(mean)
        if given.get("generator") is not None or any(map(differ, before, global_streams())):
            self.no_mean.add(name)
        return out


def _given(func: Any, args: Any, kwargs: Any) -> _Given:
    given: _Given = {argument.name: argument.default_value for argument in func._schema.arguments}
    return {**given, **dict(zip(given, args, strict=False)), **kwargs}


def global_streams() -> list[torch.Tensor]:
    """The states of torch's global generators."""
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if cuda else ())]


def differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    return not torch.equal(one, other)


def _middle(given: _Given) -> Any:
    """Of the whole numbers from `low` or `from` (0) to below `high` or `to`."""
    low, high = given.get("low", given.get("from")) or 0, given.get("high", given.get("to"))
    return (low + (2 if high is None else high) - 1) // 2


_MEANS: dict[str, Callable[[_Given], Any]] = {
    **dict.fromkeys(("rand", "rand_like"), lambda given: 0.5),
    **dict.fromkeys(("randn", "randn_like"), lambda given: 0.0),
    **dict.fromkeys(("randint", "randint_like", "random_"), _middle),
    "bernoulli": lambda given: given["self"] if given.get("p") is None else given["p"],
    "bernoulli_": lambda given: given["p"],
    "uniform_": lambda given: (given["from"] + given["to"]) / 2,
    **dict.fromkeys(("normal", "normal_", "normal_functional"), lambda given: given["mean"]),
    "log_normal_": lambda given: math.exp(given["mean"] + given["std"] ** 2 / 2),
    "exponential_": lambda given: 1 / given["lambd"],
    "geometric_": lambda given: 1 / given["p"],
    "poisson": lambda given: given["self"],
    "binomial": lambda given: given["count"] * given["prob"],
}
