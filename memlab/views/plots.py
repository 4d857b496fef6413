"""Pictures: one step's memory over time, and several strategies side by side.

Figures are drawn without pyplot: nothing stays open, no window appears, and a notebook shows a figure once, as the
value of its cell. The colours stacked at an instant add up to the memory in use then (Rule 3 of `trace.py`).
"""

from __future__ import annotations

import io
import itertools
import textwrap
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import MemlabError
from ..trace import Place, Trace
from ..units import format_bytes
from .colours import COLOURS, HATCHES, TOO_SMALL
from .words import figure_summary, percent, unit_for

try:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle
    from matplotlib.text import Text
except ImportError:
    raise MemlabError("figures need matplotlib, which is not installed: `pip install matplotlib`") from None

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..compare import Comparison, Row

Box = tuple[float, float, float, float]  # left, bottom, right, top in pixels
_COLUMNS = 2000  # steps of a timeline; more than a figure has pixels
_ON_ANOTHER = 7  # pixels between the middles of two points that cannot be told apart
_CHARACTER = 6.5  # pixels of one at font size 9
_LABEL = 30  # characters of a label before it is broken
_SHADES = ("#ffffff", "#f1f1f1")  # behind neighbouring phases
_RECOMPUTE = "#d2d2d2"
_GREY = "#94a4a2"
_ORDER = list(COLOURS)


class Picture(Figure):
    """A figure that shows itself in a notebook, with a line of text beside it: `summary`."""

    summary = ""

    def __repr__(self) -> str:
        return self.summary

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        image = {"image/png": png(self), "text/plain": self.summary}
        return image, {"image/png": {"alt": self.summary}}


def png(figure: Figure, dpi: int = 100) -> bytes:
    """The figure as a PNG file's content, in 64 colours: as good to the eye, a third of the bytes in a notebook."""
    from PIL import Image  # matplotlib needs it and brings it

    drawn, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=dpi)
    with Image.open(drawn) as image:
        image.convert("RGB").quantize(64).save(small, format="png", optimize=True)
    return small.getvalue()


# -- one step ----------------------------------------------------------------------------------------------------------


def plot_trace(
    trace: Trace, *, ax: Axes | None = None, figsize: tuple[float, float] = (9.5, 4.0), scale: int | None = None
) -> Any:
    """Memory in use by operator number, stacked by category; phases are shaded, the peak is marked.

    Returns a figure of `figsize` inches (`.savefig(path)` writes it), or that of `ax` where one is given to draw into.
    The axis reaches to the peak, or to `scale` bytes.
    """
    if ax is None:
        picture = Picture(figsize=figsize, dpi=100)
        picture.summary = figure_summary(trace)
        ax = picture.add_axes((0.075, 0.125, 0.665, 0.73))
    scale = trace.peak_bytes if scale is None else scale
    name, unit = unit_for(scale)
    edges, stacks = timeline_stacks(trace)
    corners = np.repeat(edges, 2)[1:-1]
    bottom = np.zeros(len(edges) - 1)
    for category, nbytes in stacks.items():
        top = bottom + nbytes / unit
        ax.fill_between(corners, np.repeat(bottom, 2), np.repeat(top, 2), linewidth=0, **look(category))
        bottom = top
    ax.set_xlim(0, edges[-1])
    ax.set_ylim(0, max(1.16 * scale / unit, 1e-9))
    ax.set_xlabel("operator number")
    ax.set_ylabel(f"{name} in use")
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_title(f"{trace.strategy} ({trace.source})", loc="left", fontsize=11, pad=20, parse_math=False)
    _shade_phases(ax, trace)
    _mark_peak(ax, trace, edges, bottom, unit)
    seen = [category for category, nbytes in stacks.items() if nbytes.max() >= TOO_SMALL * scale]
    marks = []
    if any(operator.place.phase == "recompute" for operator in trace.operators):
        marks.append(Patch(label="recomputation runs", facecolor=_RECOMPUTE))
    peak_legend(ax, trace, seen, marks)
    return ax.figure


def timeline_stacks(trace: Trace) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Bytes of each category while each operator's memory is highest: edges in operator numbers, and for each category
    present the bytes between them, in the order of `COLOURS`. Neighbouring operators of a long trace are drawn as one,
    the highest of them, so that the peak stays."""
    present = [category for category in COLOURS if any(a.category == category for a in trace.allocations)]
    ticks = max((max(a.born, a.freed or 0) for a in trace.allocations), default=0) + 1
    changes = np.zeros((len(present), ticks), dtype=np.int64)
    for number, category in enumerate(present):
        mine = [a for a in trace.allocations if a.category == category]
        freed = [(a.freed, -a.nbytes) for a in mine if a.freed is not None]
        for at, nbytes in (*((a.born, a.nbytes) for a in mine), *freed):
            changes[number, at] += nbytes
    running = changes.cumsum(axis=1)
    total = running.sum(axis=0)

    ends = [operator.tick for operator in trace.operators[:-1]] + [ticks]
    highest = np.array([_highest(total, start, end) for start, end in itertools.pairwise([0, *ends])])
    if len(highest) <= _COLUMNS:
        edges = np.arange(len(highest) + 1)
    else:
        edges = np.linspace(0, len(highest), _COLUMNS + 1).astype(int)
        bins = itertools.pairwise(edges)
        highest = np.array([highest[start + total[highest[start:end]].argmax()] for start, end in bins])
    return edges, {category: running[number, highest] for number, category in enumerate(present)}


def _highest(total: np.ndarray, start: int, end: int) -> int:
    """The tick from `start` and before `end` at which most is in use; the one before where there is none."""
    return start + int(total[start:end].argmax()) if end > start else max(start - 1, 0)


def _shade_phases(ax: Axes, trace: Trace) -> None:
    """Shade the passes and name them above, where the name fits; the last one's may reach out to the left."""
    width = ax.get_window_extent().width
    pixels = width / max(len(trace.operators), 1)
    free = width  # what lies to the right of it has its name
    passes = list(_passes(trace))
    for number, (name, first, end) in reversed(list(enumerate(passes))):
        ax.axvspan(first, end, color=_SHADES[number % 2], zorder=0, linewidth=0)
        left, right = first * pixels, min(end * pixels, free)
        if number == len(passes) - 1:
            left = min(left, width - (len(name) + 1) * _CHARACTER)
        short = name.replace("forward", "fwd").replace("backward", "bwd")
        shown = next((text for text in (name, short) if (len(text) + 1) * _CHARACTER <= right - left), None)
        if shown is not None:
            x = (left + right) / 2 / pixels
            ax.text(x, 1.015, shown, transform=ax.get_xaxis_transform(), ha="center", va="bottom", fontsize=9)
            free = left
    again = itertools.groupby(enumerate(trace.operators), key=lambda item: item[1].place.phase)
    runs = [[number for number, _ in run] for phase, run in again if phase == "recompute"]
    spans = [(run[0], len(run)) for run in runs]
    ax.broken_barh(spans, (0, 1), transform=ax.get_xaxis_transform(), color=_RECOMPUTE, linewidth=0, zorder=0)


def _passes(trace: Trace) -> Iterator[tuple[str, int, int]]:
    """Name, first operator and end of each pass. What recomputes or updates amid backward is part of it."""
    places = [operator.place for operator in trace.operators]
    numbered = any(place.micro_batch for place in places if place.phase == "backward")
    last_backward = {place.step: number for number, place in enumerate(places) if place.phase == "backward"}

    def key(item: tuple[int, Place]) -> tuple[int, str, int]:
        number, place = item
        amid = place.phase == "optimizer" and number < last_backward.get(place.step, -1)
        return place.step, "backward" if place.phase == "recompute" or amid else place.phase, place.micro_batch

    for (_, phase, micro_batch), run in itertools.groupby(enumerate(places), key=key):
        numbers, inside = zip(*run, strict=True)
        name = f"{phase} {micro_batch + 1}" if numbered and phase != "optimizer" else phase
        if phase == "backward" and any(place.phase == "optimizer" for place in inside):
            name += " + optimizer"
        yield name, numbers[0], numbers[-1] + 1


def _mark_peak(ax: Axes, trace: Trace, edges: np.ndarray, total: np.ndarray, unit: int) -> None:
    column = int(total.argmax())
    x = (edges[column] + edges[column + 1]) / 2
    y = trace.peak_bytes / unit
    early = x < edges[-1] / 2
    ax.plot([x], [y], marker="o", markersize=4, color="black", clip_on=False)
    text = f"peak {format_bytes(trace.peak_bytes)}, {trace.peak.phase}"
    ax.annotate(
        text,
        (x, y),
        xytext=(2 if early else -2, 6),
        textcoords="offset points",
        ha="left" if early else "right",
        fontsize=9,
        fontweight="bold",
    )


def peak_legend(ax: Axes, trace: Trace, seen: Iterable[str], further: Iterable[Patch] = ()) -> None:
    """Beside the axes, in the order of the stack, with the bytes alive at the peak; those of categories that cannot be
    seen in one sum, so that the legend adds up to the peak."""
    alive = trace.by_category()
    shown = [category for category in reversed(_ORDER) if category in set(seen)]
    handles = [
        Patch(label=f"{category}  {format_bytes(alive[category]) if category in alive else '–'}", **look(category))
        for category in shown
    ]
    rest = [nbytes for category, nbytes in alive.items() if category not in shown]
    if sum(rest):
        handles.append(Patch(label=f"too small to see  {format_bytes(sum(rest))}", facecolor="none"))
    legend = ax.legend(
        handles=[*handles, *further],
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        frameon=False,
        fontsize=9,
        title="alive at the peak",
    )
    legend.set_alignment("left")


def look(category: str) -> dict[str, Any]:
    """How an area of that category is filled."""
    return {"facecolor": COLOURS[category], "edgecolor": "white", "hatch": HATCHES.get(category, "")}


def rectangle(ax: Axes, box: Box, **style: Any) -> None:
    left, top, right, bottom = box
    ax.add_patch(Rectangle((left, top), right - left, bottom - top, **({"linewidth": 0} | style)))


# -- several strategies ------------------------------------------------------------------------------------------------


def plot_comparison(comparison: Comparison, *, figsize: tuple[float, float] | None = None) -> Any:
    """Left, the peak of each strategy by category; right, peak against time, where there are times.

    Returns a figure of `figsize` inches (default: 10 wide, and higher with more rows).
    """
    rows = comparison.rows
    timed = any(row.time_ratio is not None and row.trace is not None for row in rows)
    picture = Picture(figsize=figsize or (10, max(3.4, 1.6 + 0.46 * len(rows))), dpi=100, layout="constrained")
    picture.summary = figure_summary(comparison)
    name, unit = unit_for(max((row.peak_bytes or 0 for row in rows), default=0))
    grid = picture.add_gridspec(1, 2, width_ratios=(1.25, 1))
    bars = picture.add_subplot(grid[0, 0] if timed else grid[0, :])
    _draw_bars(bars, rows, name, unit, numbered=timed)
    if timed:
        _draw_scatter(picture.add_subplot(grid[0, 1]), rows, name, unit)
    return picture


def _draw_bars(ax: Axes, rows: tuple[Row, ...], name: str, unit: int, numbered: bool) -> None:
    plain = rows[0].peak_bytes or 0 if rows else 0
    seen: set[str] = set()
    written: list[tuple[float, Text]] = []  # where a bar ends, and what stands there
    for number, row in enumerate(rows):
        end, text = 0.0, " could not run"
        if row.trace is not None:
            for category, nbytes in sorted(row.trace.by_category().items(), key=lambda item: _ORDER.index(item[0])):
                ax.barh(number, nbytes / unit, left=end, height=0.66, linewidth=0, **look(category))
                end += nbytes / unit
                if nbytes >= TOO_SMALL * plain:
                    seen.add(category)
            text = f" {format_bytes(row.trace.peak_bytes)}, {percent(row.trace.peak_bytes, plain)}"
            text += ", not the same model" if row.equivalent is False else ""
        written.append((end, ax.text(end, number, text, va="center", fontsize=9)))
        if numbered:
            at = ax.get_yaxis_transform()
            ax.text(-0.02, number, f"{number + 1}", transform=at, ha="right", va="center", fontsize=9, weight="bold")
    labels = [_broken(row.label) for row in rows]
    ax.set_yticks(range(len(rows)), labels, fontsize=9, parse_math=False, linespacing=1.2)
    ax.tick_params(axis="y", length=0, pad=20 if numbered else 4)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.set_xlabel(f"{name} at the peak")
    ax.spines[["top", "right"]].set_visible(False)
    ax.figure.legend(
        handles=[Patch(label=category, **look(category)) for category in _ORDER if category in seen],
        loc="outside lower center",
        ncols=6,
        frameon=False,
        fontsize=9,
    )
    settle(ax)
    width = ax.get_window_extent().width
    ends = [end / max(1 - (text.get_window_extent().width + 6) / width, 0.2) for end, text in written]
    ax.set_xlim(0, max([*ends, 1e-9]))  # as far as the longest bar with its text


def settle(ax: Axes) -> None:
    """Give the axes the place that the layout will give them."""
    figure = ax.figure
    assert isinstance(figure, Figure)
    figure.draw_without_rendering()


def _broken(label: str) -> str:
    """A long label in two lines or more, broken where techniques are added."""
    parts = label.replace(" + ", "\n+ ").split("\n") if len(label) > _LABEL else [label]
    return "\n".join(textwrap.fill(part, _LABEL, break_on_hyphens=False) for part in parts)


def _draw_scatter(ax: Axes, rows: tuple[Row, ...], name: str, unit: int) -> None:
    """Points numbered as the bars are, hollow where another model is trained; a line through those that no other beats
    in both memory and time."""
    points = [
        (number, row.time_ratio, row.trace.peak_bytes / unit)
        for number, row in enumerate(rows, 1)
        if row.trace is not None and row.time_ratio is not None
    ]
    other = {number for number, row in enumerate(rows, 1) if row.equivalent is False}
    best = _front([(x, y) for number, x, y in points if number not in other])
    ax.plot(*zip(*best, strict=True), color=_GREY, linewidth=1.2, zorder=1)
    for number, x, y in points:
        colour = "black" if (x, y) in best else _GREY
        ax.plot([x], [y], "o", markersize=6, color=colour, fillstyle="none" if number in other else "full", zorder=2)
    ax.set_ylim(0, 1.12 * max(y for _, _, y in points))
    ax.margins(x=0.12)
    ax.set_xlabel("time of a step (the plain step's: 1)")
    ax.set_ylabel(f"{name} at the peak")
    ax.spines[["top", "right"]].set_visible(False)
    _number_points(ax, points)


def _front(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points than which none is both faster and smaller, from the fastest on."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not front or y < front[-1][1]:
            front.append((x, y))
    return front


def _number_points(ax: Axes, points: list[tuple[int, float, float]]) -> None:
    """Write each point's number beside it, where nothing is yet; points that lie on one another share a text."""
    settle(ax)
    points_per_pixel = 72 / ax.figure.dpi
    at = {number: tuple(ax.transData.transform((x, y))) for number, x, y in points}
    frame = ax.get_window_extent()
    taken: list[Box] = [(x - 4, y - 4, x + 4, y + 4) for x, y in at.values()]
    for numbers in _heaps(at):
        text = ", ".join(map(str, numbers))
        x, y = at[numbers[0]]
        wide, high = len(text) * (_CHARACTER + 1) + 2, 14.0  # of bold digits
        for distance, turn in itertools.product((10, 18, 28, 40), range(12)):
            angle = np.pi * (1 / 4 + turn / 6)  # from above right on
            middle = x + (distance + wide / 4) * np.cos(angle), y + distance * np.sin(angle)
            box = middle[0] - wide / 2, middle[1] - high / 2, middle[0] + wide / 2, middle[1] + high / 2
            inside = frame.x0 < box[0] and frame.y0 < box[1] and box[2] < frame.x1 and box[3] < frame.y1
            if inside and not any(_overlap(box, other) for other in taken):
                break
        taken.append(box)
        ax.annotate(
            text,
            tuple(ax.transData.inverted().transform((x, y))),
            ((middle[0] - x) * points_per_pixel, (middle[1] - y) * points_per_pixel),
            textcoords="offset points",  # not pixels: a figure may be saved with more of them
            ha="center",
            va="center",
            fontsize=9,
            fontweight="bold",
            arrowprops={"arrowstyle": "-", "color": _GREY, "linewidth": 0.7} if distance > 10 else None,
        )


def _heaps(at: dict[int, tuple[float, float]]) -> list[list[int]]:
    """The numbers of points in groups: a point is with the first one that it lies on."""
    heaps: list[list[int]] = []
    for number, (x, y) in at.items():
        near = (heap for heap in heaps if np.hypot(x - at[heap[0]][0], y - at[heap[0]][1]) < _ON_ANOTHER)
        heap = next(near, None)
        if heap is None:
            heaps.append([number])
        else:
            heap.append(number)
    return heaps


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
