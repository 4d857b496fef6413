"""The network as a chain of blocks in forward order, with the bytes that each keeps for backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..held import held
from ..trace import SAVED_CATEGORIES, Trace
from ..units import format_bytes
from .blocks import NOWHERE, block_names, pattern, runs, span
from .canvas import bar, canvas, shortened, title, write
from .plots import rectangle
from .words import listed

_ROW, _BOX = 36.0, 22.0  # pixels: of a row, and of the box in it
_LEFT, _RIGHT = 285.0, 525.0  # of the boxes
_MIDDLE = (_LEFT + _RIGHT - 6) / 2
_GREY = "#555555"
_LONGEST = 150.0, 190.0  # bars to the left and to the right
_MOST = 12  # rows before blocks that are alike are drawn as one
_TOP = 66.0


@dataclass(frozen=True)
class Block:
    """A block of the network: bytes of its parameters and, by category, of what it holds for backward.

    `count` of how many blocks it stands for; all bytes are those of all of them. `recomputed`: whether it drops what
    it would save and runs again in backward.
    """

    name: str
    parameters: int
    saved: dict[str, int]
    recomputed: bool = False
    count: int = 1
    alike: bool = True

    @property
    def saved_bytes(self) -> int:
        return sum(self.saved.values())

    @property
    def shown(self) -> int:
        """What to divide by: a box that stands for several that are alike shows the bytes of each."""
        return self.count if self.alike else 1


def plot_network(trace: Trace) -> Any:
    """A box for each block in forward order: to the left its parameters, to the right what it saves for backward at
    the entry to backward that holds most, each storage once, at the block that saved it first.

    In a long chain, neighbouring blocks that are alike are one box. Returns a figure.
    """
    rows = chain(network_blocks(trace))
    sizes = [(row.parameters / row.shown, row.saved_bytes / row.shown) for row in rows]
    largest = [max([*side, 1]) for side in zip(*sizes, strict=True)] or [1, 1]
    scale = min(longest / nbytes for longest, nbytes in zip(_LONGEST, largest, strict=True))
    height = _TOP + _ROW * max(len(rows), 1) + 40
    picture, ax = canvas(height, network_summary(trace))
    title(ax, trace)
    write(ax, _LEFT - 12, 46, "parameters", ha="right", color=_GREY)
    write(ax, _MIDDLE, 46, "forward, from top to bottom", ha="center", color=_GREY)
    write(ax, _RIGHT + 12, 46, f"saved for backward, {format_bytes(trace.saved_bytes)} in all", color=_GREY)
    if not rows:
        write(ax, _MIDDLE, _TOP + 18, "no parameters, and nothing saved", ha="center")
    for number, row in enumerate(rows):
        y = _TOP + _ROW * (number + 0.5)
        if number:
            above, here = (_MIDDLE, y - _ROW + _BOX / 2), (_MIDDLE, y - _BOX / 2)
            arrow = {"arrowstyle": "-|>", "shrinkA": 1, "shrinkB": 0, "color": _GREY}
            ax.annotate("", here, above, arrowprops=arrow)
        _draw(ax, row, y, scale)
    x = 12.0
    for category in dict.fromkeys(category for row in rows for category in row.saved):
        written = write(ax, bar(ax, x, height - 20, {category: 20}, height=10) + 5, height - 20, category)
        x = written.get_window_extent().x1 + 16
    if any(row.recomputed for row in rows):
        write(ax, x, height - 20, "dashed: runs again in backward")
    return picture


def _draw(ax: Any, row: Block, y: float, scale: float) -> None:
    style = {"linestyle": "dashed" if row.recomputed else "solid", "linewidth": 1, "zorder": 3}
    for behind in (6, 3, 0) if row.count > 1 else (0,):
        top = y - _BOX / 2 - behind
        box = (_LEFT + behind, top, _RIGHT - 6 + behind, top + _BOX)
        rectangle(ax, box, facecolor="white", edgecolor="#333333", **style)
    text = row.name + (f" ({row.count} alike)" if row.count > 1 and row.alike else "")
    text += f" ({row.count} blocks)" if not row.alike else ""
    write(ax, _MIDDLE, y, shortened(ax, text, _RIGHT - _LEFT - 18), ha="center", zorder=4)
    each = "each " if row.shown > 1 else ""
    if row.parameters:
        end = bar(ax, _LEFT - 8, y, {"parameters": -row.parameters / row.shown * scale})
        write(ax, end - 6, y, f"{each}{format_bytes(row.parameters // row.shown)}", ha="right")
    end = bar(ax, _RIGHT + 8, y, {category: nbytes / row.shown * scale for category, nbytes in row.saved.items()})
    told = f", {format_bytes(row.saved_bytes)} in all" if each and row.saved_bytes else ""
    write(ax, end + 6, y, f"{each}{format_bytes(row.saved_bytes // row.shown)}{told}")


def network_blocks(trace: Trace) -> list[Block]:
    """The blocks that own parameters or save something, in forward order; last what is outside modules, the loss as a
    rule."""
    names = block_names(trace)
    parameters: dict[str, int] = {}
    for allocation in trace.allocations:
        if allocation.category == "parameters":
            block = names[allocation.place.module]
            parameters[block] = parameters.get(block, 0) + allocation.nbytes
    saved: dict[str, dict[str, int]] = {}
    recomputed = set()
    for item in held(trace):
        block, kind = names[item.first.module], item.first.kind
        if item.counted:
            own = saved.setdefault(block, {})
            own[kind] = own.get(kind, 0) + item.nbytes
        if item.first.state == "recomputed":
            recomputed.add(block)
    order = dict.fromkeys(names.values())
    return [
        Block(block, parameters.get(block, 0), saved.get(block, {}), block in recomputed)
        for block in sorted(order, key=lambda block: block == NOWHERE)
        if block in parameters or block in saved or block in recomputed
    ]


def chain(blocks: list[Block], most: int = _MOST) -> list[Block]:
    """The rows to draw: in a long chain, blocks that are alike are one, and so is what is in the middle."""

    def look(block: Block) -> tuple[Any, ...]:
        return pattern(block.name), block.parameters, tuple(block.saved.items()), block.recomputed

    return [_joined(run, len({look(block) for block in run}) == 1) for run in runs(blocks, look, most)]


def _joined(run: list[Block], alike: bool) -> Block:
    if len(run) == 1:
        return run[0]
    saved = {c: sum(block.saved.get(c, 0) for block in run) for c in SAVED_CATEGORIES}
    return Block(
        span(block.name for block in run),
        sum(block.parameters for block in run),
        {category: nbytes for category, nbytes in saved.items() if nbytes},
        any(block.recomputed for block in run),
        len(run),
        alike,
    )


def network_summary(trace: Trace) -> str:
    """What the picture shows, in one line."""
    rows = chain(network_blocks(trace), most=4)
    text = listed(f"{row.name} {format_bytes(row.saved_bytes)}" for row in rows)
    return f"The network of {trace.strategy} in forward order, with bytes saved for backward: {text or 'nothing'}"
