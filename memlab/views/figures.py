"""The figures of one trace, by kind: what `Trace.plot` chooses from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import MemlabError
from ..trace import Trace
from .modules import plot_modules
from .network import plot_network
from .plots import plot_trace
from .saved import plot_saved

FIGURES: dict[str, Callable[..., Any]] = {
    "timeline": plot_trace,
    "modules": plot_modules,
    "network": plot_network,
    "saved": plot_saved,
}


def plot(trace: Trace, kind: str = "timeline", **options: Any) -> Any:
    """The figure of that kind. Raises MemlabError for a kind that there is not."""
    if kind not in FIGURES:
        raise MemlabError(f"plot({kind!r}): there are {', '.join(repr(name) for name in FIGURES)}")
    return FIGURES[kind](trace, **options)
