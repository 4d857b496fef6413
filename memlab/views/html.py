"""A `Trace` or a `Comparison` in HTML: for a notebook's cell, and as a page to hand to a colleague.

Rule 1. Everything is in the text itself: no script, no link, no file from elsewhere.
Rule 2. Whatever a user may have named (a strategy, a module, a note) is escaped.
Rule 3. Text takes the colours of its surroundings, light or dark; where styles are stripped, tables still read well.
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING

from ..trace import Trace
from ..units import format_bytes
from .colours import COLOURS, HATCHES, TOO_SMALL
from .table import HEADS, cells, footnotes, unit
from .verdicts import comparison_sentences
from .words import growth, operator_name, pass_name, percent, saved_text, trace_sentences

if TYPE_CHECKING:
    from ..compare import Comparison, Row
    from .plots import Picture

_CELL = "padding:.15em .6em;text-align:right;white-space:nowrap"
_FIRST = "padding:.15em .6em .15em 0;text-align:left;min-width:13em"
_SMALL = "font-size:90%;opacity:.8"

# -- a notebook's cell -------------------------------------------------------------------------------------------------


def trace_html(trace: Trace) -> str:
    """The peak, what is alive there as a table with bars, each phase's highest point, what is not seen."""
    place = trace.peak.place
    where = ", ".join(filter(None, (place.module, operator_name(place))))
    device = trace.provenance.get("device", "cpu")
    head = f"<b>{escape(trace.strategy)}</b> · {trace.source} on {escape(str(device))} · peak "
    head += f"<b>{format_bytes(trace.peak_bytes)}</b> in {pass_name(place)}"
    head += f" ({escape(where)})" if where else ""
    facts = [f"highest in {phase}: {format_bytes(nbytes)}" for phase, nbytes in trace.by_phase().items()]
    facts.append(f"saved for backward: {saved_text(trace)}")
    remarks = [*growth(trace), *(f"not seen: {sentence}" for sentence in trace.absent), *trace.notes]
    return "".join(
        [
            f"<div><div>{head}</div>",
            _categories(trace),
            f"<div>{' · '.join(facts)}</div>",
            *(f'<div style="{_SMALL}">{escape(remark)}</div>' for remark in remarks),
            "</div>",
        ]
    )


def comparison_html(comparison: Comparison) -> str:
    """The table of the comparison, a bar of categories in each row, remarks below."""
    return f"<div>{_table(comparison)}{_legend(comparison)}{_footnotes(comparison)}</div>"


# -- parts -------------------------------------------------------------------------------------------------------------


def _categories(trace: Trace) -> str:
    """What is alive at the peak, as a table with a bar for each category."""
    whole = trace.peak_bytes
    rows = [
        table_row("td", category, format_bytes(nbytes), percent(nbytes, whole), _bar({category: nbytes}, whole))
        for category, nbytes in trace.by_category().items()
    ]
    return table_of([table_row("th", "alive at the peak", "bytes", "share", ""), *rows])


def table_of(rows: Iterable[str]) -> str:
    return f'<table style="border-collapse:collapse">{"".join(rows)}</table>'


def table_row(tag: str, first: str, *others: str) -> str:
    """A row of a table, its first cell to the left; cells are HTML already."""
    style = _CELL if tag == "td" else _CELL.replace("nowrap", "normal")
    cells = "".join(f'<{tag} style="{style}">{other}</{tag}>' for other in others)
    return f'<tr><{tag} style="{_FIRST}">{first}</{tag}>{cells}</tr>'


def _bar(alive: dict[str, int], whole: int) -> str:
    """A bar of colours whose full length is `whole` bytes."""
    parts = "".join(
        f'<span title="{category} {format_bytes(alive[category])}" '
        f'style="width:{100 * alive[category] / max(whole, 1):.2f}%;background:{_paint(category)}"></span>'
        for category in COLOURS
        if category in alive
    )
    return f'<div style="display:flex;width:12em;height:.9em">{parts}</div>'


def _paint(category: str) -> str:
    colour = COLOURS[category]
    if category not in HATCHES:
        return colour
    return f"repeating-linear-gradient(135deg,{colour} 0 3px,#fff 3px 5px)"


def _table(comparison: Comparison) -> str:
    """One row per strategy: the figures of `table.cells`, with a bar after the peak."""
    name, _ = unit(comparison)
    peak, *heads = (f"{head} {name}" if head in ("peak", "saved") else head for head in HEADS)
    rows = [table_row("th", "strategy", peak, "", *heads)]
    longest = max((row.peak_bytes or 0 for row in comparison.rows), default=0)
    marks, _ = footnotes(comparison)
    for row, mark, (peak, *others) in zip(comparison.rows, marks, cells(comparison), strict=True):
        label = escape(row.label) + (f' <sup style="white-space:nowrap">{mark}</sup>' if mark else "")
        bar = _bar(row.trace.by_category(), longest) if row.trace is not None else ""
        rows.append(table_row("td", label, peak, bar, *others))
    return table_of(rows)


def _legend(comparison: Comparison) -> str:
    traces = [row.trace for row in comparison.rows if row.trace is not None]
    least = TOO_SMALL * max((trace.peak_bytes for trace in traces), default=0)
    seen = {category for trace in traces for category, nbytes in trace.by_category().items() if nbytes >= least}
    swatch = "display:inline-block;width:.9em;height:.9em;margin:0 .3em 0 .9em;vertical-align:-.1em;background:"
    entries = (f'<span style="{swatch}{_paint(c)}"></span>{c}' for c in COLOURS if c in seen)
    return f'<div style="{_SMALL}">at the peak:{" ".join(entries)}</div>'


def _footnotes(comparison: Comparison) -> str:
    _, notes = footnotes(comparison)
    return "".join(f'<div style="{_SMALL}">[{number}] {escape(note)}</div>' for number, note in enumerate(notes, 1))


# -- a whole page ------------------------------------------------------------------------------------------------------

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72em; margin: 2em auto; padding: 0 1.5em; }
h1 { font-size: 1.6em; margin-bottom: 0; } h2 { font-size: 1.2em; margin-top: 2em; }
th { font-weight: 600; } table { font-variant-numeric: tabular-nums; }
tr + tr td { border-top: 1px solid color-mix(in srgb, currentColor 18%, transparent); }
li:has(> ul) { list-style: none; }
.wide { overflow-x: auto; }
img { max-width: 100%; background: white; border-radius: 4px; }
summary { cursor: pointer; margin: .4em 0; }
.two { display: flex; flex-wrap: wrap; gap: 1em 4em; margin: .5em 0 1.5em 1em; }
"""

ALL_SEEN = "Nothing that the traces know of."
_HOW_TO_READ = {
    "peak": "the most memory in use at one instant of the step; a device must have at least so much. Its categories "
     "add up to it.",
    "saved": "what autograd holds for backward when backward begins: activations, weight copies and checkpoint "
     "inputs, each storage once. It is not the peak, and a technique may lower the one and not the other.",
    "of plain": "the peak in per cent of the plain step's, which is the first row.",
    "time, FLOPs": "of one step, to the plain step's. Times are of this machine: medians of interleaved runs without "
     "instruments.",
    "same model": "whether loss, gradients, buffers and updated parameters equal the plain step's in a proof in "
     "float64. Lower precision is left out there: it shows in the gradient error.",
    "gradient error": "how far gradients are from the exact ones, in the strategy's own precision; that of the plain "
     "step is the rounding to read the others by.",
    "workspace": "memory that operators take and give back within one call. It varies with the processor and the "
     "number of threads; all other bytes do not.",
    "MiB": "1,048,576 bytes.",
}  # fmt: skip


def comparison_page(comparison: Comparison) -> str:
    """One whole page, in one file: what was compared, table, figure, explanation, each strategy in detail, what cannot
    be seen, how to read it. Needs matplotlib, for the figure."""
    from .plots import plot_comparison

    traces = [row.trace for row in comparison.rows if row.trace is not None]
    absent = dict.fromkeys(sentence for trace in traces for sentence in trace.absent)
    return page(
        f"memlab: one training step, {len(comparison.rows)} strategies",
        traces[0] if traces else None,
        [
            ("", f'<div class="wide">{comparison_html(comparison)}</div>'),
            ("", picture(plot_comparison(comparison))),
            ("What it says", bullets(comparison_sentences(comparison))),
            ("Each strategy", "\n".join(_details(row) for row in comparison.rows)),
            ("What cannot be seen here", bullets(absent or [ALL_SEEN])),
            ("How to read it", meanings(*_HOW_TO_READ)),
        ],
    )


def page(title: str, trace: Trace | None, parts: Iterable[tuple[str, str]]) -> str:
    """A whole page: its title, how `trace` came about, and parts, each a heading ("" for none) and HTML."""
    body = "\n".join((f"<h2>{escape(heading)}</h2>\n" if heading else "") + content for heading, content in parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n<p>{_provenance(trace)}</p>\n"
        f"{body}\n</body>\n</html>\n"
    )


def picture(figure: Picture) -> str:
    """The figure, in the text itself, with its summary for those who cannot see it."""
    from .plots import png

    image = base64.b64encode(png(figure, dpi=150)).decode("ascii")
    return f'<p><img src="data:image/png;base64,{image}" alt="{escape(figure.summary)}"></p>'


def meanings(*terms: str) -> str:
    """What these terms mean."""
    return f"<dl>{''.join(f'<dt><b>{term}</b></dt><dd>{_HOW_TO_READ[term]}</dd>' for term in terms)}</dl>"


def _provenance(trace: Trace | None) -> str:
    """How, on what and with what it was measured, as far as the trace tells in single words and numbers."""
    if trace is None:
        return "nothing ran"
    told = {name: value for name, value in trace.provenance.items() if not name.startswith("max_memory")}
    parts = [trace.source, *(f"{name.replace('_', ' ')} {value}" for name, value in told.items())]
    return escape(" · ".join(parts))


def _details(row: Row) -> str:
    """One strategy: what is alive at its peak, the highest point of each phase, and its own explanation."""
    trace, label = row.trace, escape(row.label)
    if trace is None:
        return f"<details><summary>{label}: could not run</summary><p>{escape(row.error or '')}</p></details>"
    summary = f"{label}: {format_bytes(trace.peak_bytes)} in {pass_name(trace.peak.place)}"
    return f"<details><summary>{summary}</summary>{peak_tables(trace)}{bullets(trace_sentences(trace))}</details>"


def peak_tables(trace: Trace) -> str:
    """What is alive at the peak, and beside it the highest point of each phase."""
    phases = [table_row("td", phase, format_bytes(nbytes)) for phase, nbytes in trace.by_phase().items()]
    highest = table_of([table_row("th", "phase", "highest"), *phases])
    return f'<div class="two"><div>{_categories(trace)}</div><div>{highest}</div></div>'


def bullets(sentences: Iterable[str]) -> str:
    """A list of sentences; those with a dash are a list within it."""
    items = ""
    for dashed, group in itertools.groupby(sentences, key=lambda sentence: sentence.startswith("- ")):
        lines = "".join(f"<li>{escape(sentence.removeprefix('- '))}</li>" for sentence in group)
        items += f"<li><ul>{lines}</ul></li>" if dashed else lines
    return f"<ul>{items}</ul>"
