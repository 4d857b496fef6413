"""One choice beside the plain step, and both beside the memory of a device: the explorer's figure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..trace import Trace
from ..units import format_bytes
from .canvas import DPI, WIDTH, bar
from .colours import COLOURS, TOO_SMALL
from .plots import Picture, peak_legend, plot_trace
from .words import figure_summary, percent, unit_for

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HEIGHT = 580  # pixels
_LEFT, _WIDE = 0.075, 0.665  # of the figure's width; legends are to the right
_NEAR = 1.5  # budgets up to so many times the peak are drawn; a farther one would press the rest into a corner
_LINE: dict[str, Any] = {"color": "black", "linewidth": 1.2, "linestyle": (0, (5, 3)), "zorder": 3}
_ON_WHITE = {"facecolor": "white", "linewidth": 0, "pad": 1}  # text that the line would cross


def plot_fit(plain: Trace | None, trace: Trace | None, budget: int | None = None) -> Picture:
    """Above, the peak of the plain step and of the choice by category; below, the choice's timeline; in both a line at
    `budget` bytes. A trace is None where the step cannot run; the timeline is then the plain step's.
    """
    picture = Picture(figsize=(WIDTH / DPI, _HEIGHT / DPI), dpi=DPI)
    picture.summary = "This choice cannot run." if trace is None else figure_summary(trace)
    _draw_peaks(picture.add_axes((_LEFT, 0.74, _WIDE, 0.25)), plain, trace, budget)
    shown = trace or plain
    if shown is not None:
        _draw_timeline(picture.add_axes((_LEFT, 0.085, _WIDE, 0.46)), shown, budget)
    return picture


def _draw_peaks(ax: Axes, plain: Trace | None, trace: Trace | None, budget: int | None) -> None:
    end = _end(max((each.peak_bytes for each in (plain, trace) if each is not None), default=1), budget)
    name, unit = unit_for(end)
    style: dict[str, Any]
    for number, each in enumerate((plain, trace)):
        words, style = f"{('the plain step', 'this choice')[number]} cannot run", {"fontweight": "bold"}
        if number and trace is plain is not None:
            words, style = "with a technique on, its peak stands here", {"color": "#717581"}
        elif each is not None:
            alive = each.by_category()
            bar(ax, 0, number, {name: alive[name] / unit for name in COLOURS if name in alive}, height=0.42)
            words = f"{each.strategy}: {format_bytes(each.peak_bytes)}"
            if number and plain is not None:
                words += f", {percent(each.peak_bytes, plain.peak_bytes)}"
        ax.text(0, number - 0.3, words, fontsize=9, parse_math=False, va="bottom", bbox=_ON_WHITE, zorder=4, **style)
    ax.set_xlim(0, 1.05 * end / unit)
    ax.set_ylim(1.65, -0.7)
    ax.set_yticks([])
    ax.set_xlabel(f"{name} at the peak")
    ax.spines[["top", "right", "left"]].set_visible(False)
    if plain is not None and plain is not trace:
        peak_legend(ax, plain, [name for name, n in plain.by_category().items() if n >= TOO_SMALL * plain.peak_bytes])
        if (legend := ax.get_legend()) is not None:
            legend.set_title("alive at the plain step's peak")
    if budget is not None and budget <= end:
        ax.axvline(budget / unit, **_LINE)
        at_right = budget > end / 2
        _name_budget(ax, budget, (budget / unit, 1.58), (-4 if at_right else 4, 0), "right" if at_right else "left")


def _draw_timeline(ax: Axes, trace: Trace, budget: int | None) -> None:
    end = _end(trace.peak_bytes, budget)
    plot_trace(trace, ax=ax, scale=end)
    if budget is not None and budget <= end:
        height = budget / unit_for(end)[1]
        ax.axhline(height, **_LINE)
        _name_budget(ax, budget, (ax.get_xlim()[1], height), (-2, 3), "right")  # late in a step there is room


def _name_budget(ax: Axes, budget: int, at: tuple[float, float], offset: tuple[int, int], side: str) -> None:
    text = f"device memory, {format_bytes(budget)}"
    ax.annotate(text, at, offset, textcoords="offset points", fontsize=9, ha=side, annotation_clip=False)


def _end(peak: int, budget: int | None) -> int:
    """Where an axis ends: at the budget if that is not far above the peak."""
    return max(peak, budget) if budget is not None and budget <= _NEAR * peak else peak
