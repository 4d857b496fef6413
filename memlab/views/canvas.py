"""Axes to draw on in pixels: boxes, bars and texts that are measured before they are written."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .plots import Box, Picture, look, rectangle

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..trace import Trace

DPI = 100
WIDTH = 950.0  # pixels: a notebook's, 9.5 inches


def canvas(height: float, summary: str) -> tuple[Picture, Axes]:
    """A figure of `WIDTH` by `height` pixels and axes that cover it, one unit a pixel, y downwards from its top."""
    picture = Picture(figsize=(WIDTH / DPI, height / DPI), dpi=DPI)
    picture.summary = summary
    ax = picture.add_axes((0, 0, 1, 1))
    ax.set_axis_off()
    ax.set_xlim(0, WIDTH)
    ax.set_ylim(height, 0)
    return picture, ax


def title(ax: Axes, trace: Trace, told: str = "") -> None:
    """Which trace it is, as much of it as there is room for, and what is told of it."""
    rest = f" ({trace.source}){told}"
    room = WIDTH - 24 - write(ax, 12, 18, rest, fontsize=11).get_window_extent().width
    ax.texts[-1].set_text(shortened(ax, trace.strategy, room, fontsize=11) + rest)


def write(ax: Axes, x: float, y: float, text: str, **style: Any) -> Any:
    """Text at that point, its middle line at `y`; names are text and not mathematics."""
    usual: dict[str, Any] = {"va": "center", "fontsize": 9, "parse_math": False}
    return ax.text(x, y, text, **(usual | style))


def write_within(ax: Axes, box: Box, texts: Iterable[str], **style: Any) -> Any:
    """The first of the texts that fits into the box, in its upper left corner, if need be in smaller letters; None
    where none fits."""
    left, top, right, bottom = box
    for text, size in itertools.product(texts, (9, 7.5)):
        written = write(ax, left + 6, top + 5, text, **({"va": "top", "fontsize": size} | style))
        extent = written.get_window_extent()
        if extent.width + 12 <= right - left and extent.height + 10 <= bottom - top:
            return written
        written.remove()
    return None


def shortened(ax: Axes, text: str, width: float, **style: Any) -> str:
    """The text, or as much of its start and end as is not wider than `width`, with `…` between."""
    for kept in range(len(text), 1, -1):
        shown = text if kept == len(text) else f"{text[: kept // 3]}…{text[kept // 3 - kept :]}"
        written = write(ax, 0, 0, shown, **style)
        wide = written.get_window_extent().width
        written.remove()
        if wide <= width:
            return shown
    return text[:1]


def bar(ax: Axes, x: float, y: float, lengths: dict[str, float], height: float = 16.0) -> float:
    """A bar to the right of `x`, or to the left where lengths are negative, of a part for each category; its end."""
    for category, length in lengths.items():
        rectangle(ax, (x, y - height / 2, x + length, y + height / 2), **look(category))
        x += length
    return x
