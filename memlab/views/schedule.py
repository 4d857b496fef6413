"""The schedule of a checkpointed chain, as a picture and in words: which block runs, what is alive then, and memory
over the whole step.

Both take a `Chain`, a placement and the number of an instant in its schedule; they measure nothing.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..chain import Chain, Instant, Placement, Regions, pareto, regions_of, schedule, weigh
from ..errors import MemlabError
from ..units import format_bytes
from .colours import COLOURS, HATCHES
from .plots import Picture
from .words import percent, unit_for

try:
    from matplotlib.patches import Patch, Rectangle
except ImportError:
    raise MemlabError("figures need matplotlib, which is not installed: `pip install matplotlib`") from None

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RESIDENT = "parameters, state, batch"
_LOOKS = {  # what is stacked, from below: its name, and the category that it looks like
    "resident": (RESIDENT, "parameters"),
    "gradients": ("gradients", "gradients"),
    "outside": ("before and after blocks", "batch"),
    "input": ("blocks' inputs", "checkpoint inputs"),
    "saved": ("saved tensors", "activations"),
    "working": ("at work", "temporaries"),
}
_DOES = {"forward": "runs forward", "recompute": "runs again", "backward": "runs backward"}
_AGAIN = "#d2d2d2"
_BLACK = "#222222"


# --------------------------------------------------------------------------------------------------------------- words


def instant_sentences(chain: Chain, placement: Sequence[Any], number: int) -> list[str]:
    """What happens at that instant and what is alive, in two sentences."""
    instants = schedule(chain, placement)
    now = instants[number]
    alive = [f"{RESIDENT} ({format_bytes(now.resident)})"]
    for kind, words in (("saved", "saved tensors of"), ("input", "inputs of"), ("gradients", "gradients of")):
        blocks = sorted(number for its, number in now.held if its == kind and not _only_random(chain, now, its, number))
        if blocks:
            alive.append(f"{words} {_numbers(chain, blocks)} ({format_bytes(now.total(kind))})")
    if outside := now.total("outside"):
        alive.append(f"saved before and after the blocks ({format_bytes(outside)})")
    alive.append(f"at work ({format_bytes(now.working)})")
    where = f"{number + 1} of {len(instants)}: {doing(chain, now)}"
    return [f"{where}, {format_bytes(now.nbytes)} at its highest.", f"Alive: {', '.join(alive)}."]


def _only_random(chain: Chain, now: Instant, kind: str, number: int) -> bool:
    """Whether a checkpointed block holds no more than the states of random streams."""
    return kind == "saved" and now.held[kind, number] <= chain.blocks[number].random_bytes


def doing(chain: Chain, now: Instant) -> str:
    """`blocks.2 runs again`."""
    if now.phase == "optimizer":
        return "the optimizer steps"
    outside = {-1: "what comes before the blocks", len(chain.blocks): "what comes after the blocks"}
    return f"{outside.get(now.block) or chain.blocks[now.block].name} {_DOES[now.phase]}"


def placement_sentences(chain: Chain, placement: Sequence[Any], front: Sequence[Placement] | None = None) -> list[str]:
    """What the placement costs, and how far it is from the best ones. `front`: `pareto(chain)`, where it is known."""
    own, plain, front = weigh(chain, placement), weigh(chain), front or pareto(chain)
    says = [f"Your placement: {format_bytes(own.peak_bytes)}, {_cost(chain, own)}."]
    if own.regions:
        part = percent(own.peak_bytes, plain.peak_bytes)
        says.append(f"That is {part} of the {format_bytes(plain.peak_bytes)} without checkpoints.")
    least = front[-1]
    for_no_more = max((its for its in front if its.work <= own.work), key=lambda its: its.work)
    for_this_memory = next((its for its in front if its.peak_bytes <= own.peak_bytes), own)
    if own.peak_bytes <= least.peak_bytes:
        says.append("No placement of single blocks has a lower peak.")
    else:
        away = format_bytes(own.peak_bytes - least.peak_bytes)
        says.append(f"The lowest peak is {format_bytes(least.peak_bytes)}, {away} less: {_plan(chain, least)}.")
        if own.regions and for_no_more.peak_bytes < own.peak_bytes and for_no_more != least:
            better = format_bytes(for_no_more.peak_bytes)
            says.append(f"The best for this arithmetic is {better}: {_plan(chain, for_no_more)}.")
    if for_this_memory.work < own.work:
        says.append(f"The best for this memory: {_plan(chain, for_this_memory)}.")
    elif own.regions and for_no_more.peak_bytes >= own.peak_bytes:
        says.append("No other placement has less memory for this arithmetic, or less arithmetic for this memory.")
    return says


def _plan(chain: Chain, its: Placement) -> str:
    return f"{_where(chain, its.regions)}, {_cost(chain, its)}"


def _cost(chain: Chain, its: Placement) -> str:
    """`2 blocks run again (8.3 % more arithmetic)`."""
    count = sum(map(len, its.regions))
    if not count:
        return "nothing runs again"
    more = f" (+{100 * its.work / chain.work:.3g} % arithmetic)" if chain.work else ""
    return f"{count} block{'s' * (count > 1)} run{'s' * (count == 1)} again{more}"


def _where(chain: Chain, its: Regions) -> str:
    blocks = [block for region in its for block in region]
    return f"checkpoints on {_numbers(chain, blocks)}" if blocks else "no checkpoints"


def _numbers(chain: Chain, blocks: Iterable[int]) -> str:
    """`blocks 0–3, 5`; what stands around the blocks by name."""
    count = len(chain.blocks)
    inside = [block for block in blocks if 0 <= block < count]
    runs = [
        [block for _, block in run] for _, run in itertools.groupby(enumerate(inside), lambda item: item[1] - item[0])
    ]
    spans = ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)
    parts = [f"block{'s' * (len(inside) > 1)} {spans}"] if inside else []
    if count in blocks:
        parts.append("what comes after")
    if -1 in blocks:
        parts.append("what comes before")
    return " and ".join(parts)


def schedule_summary(chain: Chain, placement: Sequence[Any] = ()) -> str:
    """One line: the peak, where it is, and its price."""
    instants, own = schedule(chain, placement), weigh(chain, placement)
    top = max(instants, key=lambda now: now.nbytes)
    more = f"; {_cost(chain, own)}" if own.regions else ""
    count = sum(map(len, own.regions))
    where = f"{count} of {len(chain.blocks)} blocks checkpointed" if count else "no checkpoints"
    return f"{where}: peak {format_bytes(own.peak_bytes)}, as {doing(chain, top)}{more}"


# ------------------------------------------------------------------------------------------------------------- picture


def plot_schedule(
    chain: Chain,
    placement: Sequence[Any] = (),
    instant: int = 0,
    *,
    front: Sequence[Placement] | None = None,
    figsize: tuple[float, float] = (9.5, 4.9),
) -> Any:
    """Above, the chain at one instant: a box for each block, hatched where it is checkpointed and filled with what it
    holds then. Below, memory over the whole schedule, with that instant in a frame.

    `front`: `pareto(chain)`, where it is known. Returns a figure of `figsize` inches.
    """
    found = regions_of(chain, placement)
    instants = schedule(chain, found)
    if not 0 <= instant < len(instants):
        raise MemlabError(f"instant {instant}: this schedule has 0 to {len(instants) - 1}")
    picture = Picture(figsize=figsize, dpi=100)
    picture.summary = schedule_summary(chain, found)
    picture.text(0.012, 0.985, textwrap.fill(picture.summary, 104), fontsize=10.5, va="top", parse_math=False)
    _draw_chain(picture.add_axes((0.012, 0.6, 0.976, 0.32)), chain, found, instants[instant])
    axes = picture.add_axes((0.072, 0.105, 0.62, 0.435))
    _draw_memory(axes, chain, instants, instant, (front or pareto(chain))[-1].peak_bytes)
    return picture


def _draw_chain(ax: Axes, chain: Chain, found: Regions, now: Instant) -> None:
    count = len(chain.blocks)
    checkpointed = {block for region in found for block in region}
    largest = max((*(block.saved_bytes for block in chain.blocks), 1))
    margin = max(1.0, 0.07 * count)
    ax.set_xlim(-margin, count + 0.1 + margin)
    ax.set_ylim(-0.62, 1.95)
    ax.axis("off")
    middle = {-1: -margin / 2, count: count + 0.1 + margin / 2} | {number: number + 0.54 for number in range(count)}
    for number in range(count):
        left, wide = middle[number] - 0.37, 0.74
        if number in checkpointed:
            ax.add_patch(Rectangle((left, 0), wide, 1, facecolor="#f4f4f4", edgecolor="#bbbbbb", hatch="xx"))
        holds = now.held.get(("saved", number), 0)
        ax.add_patch(Rectangle((left, 0), wide, min(holds / largest, 1), linewidth=0, **_look("saved")))
        line = "--" if number in checkpointed else "-"
        ax.add_patch(Rectangle((left, 0), wide, 1, fill=False, edgecolor=_BLACK, linewidth=1.1, linestyle=line))
        if count <= 12:
            held = sum(nbytes for (_, block), nbytes in now.held.items() if block == number)
            words = format_bytes(held) if held else "–"
            ax.text(middle[number], -0.26, words, ha="center", va="top", fontsize=8)
        if count <= 26 or number % 5 == 0:
            ax.text(middle[number], 1.06, f"{number}", ha="center", va="bottom", fontsize=9)
    for number in range(count + 1):  # the tensors between the blocks
        alive = ("input", number) in now.held
        look = _look("input") if alive else {"facecolor": "none", "edgecolor": "#aaaaaa"}
        ax.add_patch(Rectangle((number - 0.02, 0.12), 0.1, 0.76, linewidth=0.8, **look))
    for number in (block for kind, block in now.held if kind == "gradients"):
        ax.add_patch(Rectangle((middle[number] - 0.37, -0.2), 0.74, 0.13, linewidth=0, **_look("gradients")))
    for region in found:
        if len(region) > 1:
            ax.plot([middle[region[0]] - 0.37, middle[region[-1]] + 0.37], [1.36, 1.36], color=_BLACK, linewidth=2.2)
    for number, name in ((-1, "before"), (count, "after")):
        ax.text(middle[number], 0.5, name, ha="center", va="center", fontsize=9)
    _draw_position(ax, middle[now.block], now, right=now.block < count / 2)


def _draw_position(ax: Axes, x: float, now: Instant, right: bool) -> None:
    """An arrow over the block that runs, and beside it what it does."""
    ax.plot([x], [1.66], marker="<" if now.phase == "backward" else ">", markersize=10, color=_BLACK)
    ax.annotate(
        _DOES.get(now.phase, now.phase),
        (x, 1.66),
        xytext=(9 if right else -9, 0),
        textcoords="offset points",
        ha="left" if right else "right",
        va="center",
        fontsize=10,
        fontweight="bold",
    )


def _draw_memory(ax: Axes, chain: Chain, instants: Sequence[Instant], instant: int, least: int) -> None:
    plain, top = weigh(chain).peak_bytes, max(now.nbytes for now in instants)
    name, unit = unit_for(max(plain, top))
    edges = np.arange(len(instants) + 1)
    corners, bottom = np.repeat(edges, 2)[1:-1], np.zeros(len(instants))
    for kind in _LOOKS:
        high = bottom + np.array([_bytes(now, kind) for now in instants]) / unit
        ax.fill_between(corners, np.repeat(bottom, 2), np.repeat(high, 2), linewidth=0, **_look(kind))
        bottom = high
    spans = [(number, 1) for number, now in enumerate(instants) if now.phase == "recompute"]
    ax.broken_barh(spans, (0, 1), transform=ax.get_xaxis_transform(), color=_AGAIN, linewidth=0, zorder=0)
    ax.set_xlim(0, len(instants))
    ax.set_ylim(0, 1.2 * max(plain, top) / unit)
    ax.add_patch(Rectangle((instant, 0), 1, ax.get_ylim()[1], fill=False, edgecolor=_BLACK, linewidth=1.6, zorder=4))
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_ylabel(f"{name} in use")
    _name_passes(ax, instants)
    _draw_lines(ax, plain, least, unit)
    _mark_peak(ax, instants, top, unit)
    handles = [
        Patch(label=f"{_LOOKS[kind][0]}  {format_bytes(_bytes(instants[instant], kind))}", **_look(kind))
        for kind in reversed(_LOOKS)
    ]
    if spans:
        handles.append(Patch(label="runs again", facecolor=_AGAIN))
    legend = ax.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(1.01, 1.06),
        frameon=False,
        fontsize=9,
        title="alive in the frame",
    )
    legend.set_alignment("left")


def _name_passes(ax: Axes, instants: Sequence[Instant]) -> None:
    """Under the axis, where each pass of the step begins and what it is."""
    turn = next(number for number, now in enumerate(instants) if now.phase != "forward")
    ends = [0, turn, len(instants) - 1, len(instants)]
    ax.set_xticks(ends[:-1], [])
    names = (
        "forward",
        "backward" + (", with blocks run again" if any(n.phase == "recompute" for n in instants) else ""),
    )
    for name, (start, end) in zip(names, itertools.pairwise(ends), strict=False):
        ax.text((start + end) / 2, -0.045, name, transform=ax.get_xaxis_transform(), ha="center", va="top", fontsize=9)
    ax.text(len(instants), -0.045, "optimizer", transform=ax.get_xaxis_transform(), ha="right", va="top", fontsize=9)


def _draw_lines(ax: Axes, plain: int, least: int, unit: int) -> None:
    """Dashed lines at the peaks without checkpoints and of the best placement; where they are close to one another, the
    lower one's name is under its line, and where they are one, it has both names."""
    lines = {"without checkpoints": plain, "best of single blocks": least}
    if plain == least:
        lines = {"best: without checkpoints": plain}
    close = (plain - least) / unit < 0.09 * ax.get_ylim()[1]
    for name, nbytes in lines.items():
        ax.axhline(nbytes / unit, color=_BLACK, linewidth=1, linestyle="--", zorder=3)
        under = close and name.startswith("best of")
        ax.annotate(
            f"{name} {format_bytes(nbytes)}",
            (0, nbytes / unit),
            xytext=(4, -3 if under else 2),
            textcoords="offset points",
            va="top" if under else "bottom",
            fontsize=8.5,
            bbox={"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 0.6},
            zorder=5,
        )


def _mark_peak(ax: Axes, instants: Sequence[Instant], top: int, unit: int) -> None:
    number = next(number for number, now in enumerate(instants) if now.nbytes == top)
    ax.plot([number + 0.5], [top / unit], marker="o", markersize=4, color="black", zorder=6)
    right = number > len(instants) / 2
    ax.annotate(
        f"peak {format_bytes(top)}",
        (number + 0.5, top / unit),
        xytext=(0, 6),
        textcoords="offset points",
        ha="right" if right else "left",
        fontsize=9,
        fontweight="bold",
        zorder=6,
    )


def _bytes(now: Instant, kind: str) -> int:
    return {"resident": now.resident, "working": now.working}.get(kind, now.total(kind))


def _look(kind: str) -> dict[str, Any]:
    category = _LOOKS[kind][1]
    return {"facecolor": COLOURS[category], "edgecolor": "white", "hatch": HATCHES.get(category, "")}
