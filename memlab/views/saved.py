"""What autograd saved for backward: a table with the reason for each tensor, and a picture of the largest.

Both show the entry to backward at which most was held, each storage once (`memlab.held`).
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from ..errors import MemlabError
from ..held import Held, counted_bytes, held
from ..trace import Trace
from ..units import MiB, format_bytes
from .blocks import NOWHERE, pattern
from .reasons_saved import why
from .words import listed

if TYPE_CHECKING:
    import pandas as pd

_PRINTED = 40  # rows of a table in a terminal
_HEADS = ("module", "saved as", "bytes", "why", "shape", "dtype", "kind", "state", "also saved as")  # of a page

# -- the table ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class SavedTable:
    """Storages held for backward, the largest first; after those that `Trace.saved_bytes` adds up, the others
    (parameters, buffers and the batch, which are there anyway, and what is recomputed or moved away).

    rows: those shown; `left` those that are not
    """

    trace: Trace
    rows: tuple[Held, ...]
    left: tuple[Held, ...] = ()

    def to_frame(self) -> pd.DataFrame:
        """A pandas frame, a row per storage, sizes in MiB."""
        import pandas as pd

        columns = ("module", "operator", "slot", "shape", "dtype", "MiB", "kind", "state", "also saved as", "why")
        rows = [
            (
                item.first.module,
                item.first.operator,
                slot_name(item),
                item.first.shape,
                item.first.dtype,
                round(item.nbytes / MiB, 3),
                item.first.kind,
                item.first.state,
                ", ".join(others(item)),
                why(item.first),
            )
            for item in self.rows
        ]
        return pd.DataFrame(rows, columns=columns)

    @property
    def heading(self) -> str:
        """What is in the table, in one sentence."""
        entries = len({tensor.entry for tensor in self.trace.saved})
        which = f" at the largest of {entries} entries to backward" if entries > 1 else ""
        return f"{self.trace.strategy}: {format_bytes(self.trace.saved_bytes)} saved for backward{which}, by storage"

    @property
    def remark(self) -> str:
        """What is not shown, in one sentence; empty where everything is."""
        size = format_bytes(counted_bytes(self.left))
        return f"and {len(self.left)} more, with {size} of the bytes saved" if self.left else ""

    def __str__(self) -> str:
        shown = self.rows[:_PRINTED]
        rest = SavedTable(self.trace, (), (*self.rows[_PRINTED:], *self.left))
        return "\n".join([self.heading, "", *_printed(shown), *filter(None, [rest.remark])])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return saved_html(self)


def saved_table(trace: Trace, top: int | None = None) -> SavedTable:
    """The table of what is saved, of its `top` largest rows or of all."""
    if top is not None and (not isinstance(top, int) or top < 1):
        raise MemlabError(f"top={top!r}: give how many rows to show, from 1, or None for all")
    rows = sorted(held(trace), key=lambda item: (not item.counted, item.first.state == "recomputed", -item.nbytes))
    return SavedTable(trace, tuple(rows[:top]), () if top is None else tuple(rows[top:]))


def slot_name(item: Held) -> str:
    """The slot without its operator: `mat1`."""
    return item.first.slot.removeprefix(f"{item.first.operator}.")


def others(item: Held) -> list[str]:
    """The other slots of a storage, with their modules."""
    return [f"{tensor.slot} ({tensor.module or 'no module'})" for tensor in item.tensors[1:]]


def _cells(item: Held) -> tuple[str, ...]:
    first = item.first
    shape = " x ".join(map(str, first.shape)) or "one number"
    size = format_bytes(item.nbytes) if item.first.storage is not None else "–"
    return first.module or NOWHERE, first.slot, shape, first.dtype, size, first.kind, first.state


def _printed(rows: tuple[Held, ...]) -> Iterator[str]:
    """Aligned columns; the reason and the other slots below each row. Kind and state are one column, as what is not
    kept has no other kind."""
    heads = ("module", "saved as", "shape", "dtype", "bytes", "kind")
    body: list[tuple[str, ...]] = []
    for item in rows:
        *cells, kind, state = _cells(item)
        body.append((*cells, kind if state == "kept" else state))
    widths = [max(len(row[column]) for row in (heads, *body)) for column in range(len(heads))]
    for number, line in enumerate((heads, *body)):
        aligned = [c.rjust(w) if n == 4 else c.ljust(w) for n, (c, w) in enumerate(zip(line, widths, strict=True))]
        yield "  ".join(aligned).rstrip()
        if number:
            item = rows[number - 1]
            yield textwrap.fill(why(item.first), 116, initial_indent="    ", subsequent_indent="    ")
            if item.tensors[1:]:
                also = f"also saved as {listed(others(item))}"
                yield textwrap.fill(also, 116, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)


def saved_html(table: SavedTable) -> str:
    """The table for a notebook's cell or a page: it scrolls in a window of its own."""
    cell = "padding:.15em .6em;text-align:left;vertical-align:top"
    head = "".join(f'<th style="{cell}">{name}</th>' for name in _HEADS)
    rows = []
    for item in table.rows:
        module, slot, shape, dtype, size, *role = _cells(item)
        cells = (module, slot, size, why(item.first), shape, dtype, *role, ", ".join(others(item)))
        parts = (
            f'<td style="{cell}{_width(name)}">{escape(text)}</td>' for name, text in zip(_HEADS, cells, strict=True)
        )
        rows.append(f"<tr>{''.join(parts)}</tr>")
    remark = f"<div>{escape(table.remark)}</div>" if table.remark else ""
    return (
        f"<div><div>{escape(table.heading)}</div>"
        '<div style="max-height:30em;overflow:auto"><table style="border-collapse:collapse;font-size:90%">'
        f"<tr>{head}</tr>{''.join(rows)}</table></div>{remark}</div>"
    )


def _width(name: str) -> str:
    if name in ("why", "also saved as"):
        return ";min-width:16em"
    return ";white-space:nowrap" + (";text-align:right" if name == "bytes" else "")


# -- the picture -------------------------------------------------------------------------------------------------------


def alike(trace: Trace) -> list[tuple[str, tuple[Held, ...]]]:
    """What is counted as saved, the same layer of each block together: the name of the modules (`blocks.*.norm1`) and
    the storages, largest sum first."""
    groups: dict[tuple[Any, ...], list[Held]] = {}
    for item in held(trace):
        if item.counted:
            first = item.first
            key = pattern(first.module), first.slot, first.shape, first.dtype, first.kind, item.nbytes
            groups.setdefault(key, []).append(item)
    named = []
    for key, items in groups.items():
        modules = {item.first.module for item in items}
        named.append((next(iter(modules)) if len(modules) == 1 else key[0], tuple(items)))
    return sorted(named, key=lambda group: -counted_bytes(group[1]))


def plot_saved(trace: Trace, *, top: int = 12) -> Any:
    """The largest saved tensors as bars, by module, with operator and slot; the same tensor of each block is one bar.

    The bars add up to `saved_bytes`: the last is that of all others. Returns a figure.
    """
    from .canvas import bar, canvas, shortened, title, write

    if not isinstance(top, int) or top < 1:
        raise MemlabError(f"top={top!r}: give how many bars to draw, from 1")
    groups = alike(trace)
    shown, rest = groups[:top], groups[top:]
    row, left, longest = 40.0, 330.0, 330.0
    height = 46 + row * max(len(shown) + bool(rest), 1) + 12
    picture, ax = canvas(height, saved_summary(trace))
    title(ax, trace, f": {format_bytes(trace.saved_bytes)} saved for backward")
    if not groups:
        write(ax, left, 60, "nothing is saved for backward here")
    remaining = sum(counted_bytes(items) for _, items in rest)
    scale = longest / max([counted_bytes(items) for _, items in shown] + [remaining, 1])
    for number, (name, items) in enumerate(shown):
        y = 46 + row * (number + 0.5)
        first, nbytes = items[0].first, counted_bytes(items)
        write(
            ax,
            left - 10,
            y - 8,
            shortened(ax, name or NOWHERE, left - 22, fontweight="bold"),
            ha="right",
            fontweight="bold",
        )
        write(ax, left - 10, y + 8, shortened(ax, first.slot, left - 22, fontsize=8.5), ha="right", fontsize=8.5)
        end = bar(ax, left, y, {first.kind: nbytes * scale}, height=22)
        each = f" = {len(items)} × {format_bytes(items[0].nbytes)}" if len(items) > 1 else ""
        write(ax, end + 6, y - 8, f"{format_bytes(nbytes)}{each}")
        shape = " x ".join(map(str, first.shape)) or "one number"
        kind = "" if first.kind == "activations" else f", {first.kind}"
        write(ax, end + 6, y + 8, f"{shape} {first.dtype}{kind}", fontsize=8.5, color="#555555")
    if rest:
        y = 46 + row * (len(shown) + 0.5)
        count = sum(len(items) for _, items in rest)
        write(ax, left - 10, y, f"{count} other{'s' if count > 1 else ''}", ha="right", style="italic")
        write(ax, bar(ax, left, y, {"other": remaining * scale}, height=22) + 6, y, format_bytes(remaining))
    return picture


def saved_summary(trace: Trace) -> str:
    """What the picture shows, in one line."""
    largest = [
        f"{name or NOWHERE} {items[0].first.slot} {format_bytes(counted_bytes(items))}"
        for name, items in alike(trace)[:3]
    ]
    whole = format_bytes(trace.saved_bytes)
    return f"Saved for backward by {trace.strategy}, {whole}; the largest: {listed(largest) or 'nothing'}"
