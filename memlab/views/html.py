"""A `Trace` or a `Comparison` in HTML: for a notebook's cell, and as a page to hand to a colleague.

Rule 1. Everything is in the text itself: no script, no link, no file from elsewhere.
Rule 2. Whatever a user may have named (a strategy, a module, a note) is escaped.
Rule 3. Text takes the colours of its surroundings, light or dark; where styles are stripped, tables still read well.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from html import escape
from typing import TYPE_CHECKING

from ..trace import Trace
from ..units import format_bytes
from .colours import COLOURS, HATCHES
from .table import HEADS, cells, footnotes, unit
from .words import explain_comparison, explain_trace, figure_summary, operator_name, pass_name, percent

if TYPE_CHECKING:
    from ..compare import Comparison, Row

_CELL = "padding:.15em .7em;text-align:right;white-space:nowrap"
_FIRST = "padding:.15em .7em .15em 0;text-align:left"
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
    facts.append(f"saved for backward: {format_bytes(trace.saved_bytes)}")
    remarks = [*(f"not seen: {sentence}" for sentence in trace.absent), *trace.notes]
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
    rows = "".join(
        f'<tr><td style="{_FIRST}">{category}</td><td style="{_CELL}">{format_bytes(nbytes)}</td>'
        f'<td style="{_CELL}">{percent(nbytes, trace.peak_bytes)}</td>'
        f'<td style="{_FIRST}">{_bar({category: nbytes}, trace.peak_bytes)}</td></tr>'
        for category, nbytes in trace.by_category().items()
    )
    heads = f'<th style="{_FIRST}">alive at the peak</th><th style="{_CELL}">bytes</th><th style="{_CELL}">share</th>'
    return f'<table style="border-collapse:collapse"><tr>{heads}<th></th></tr>{rows}</table>'


def _bar(alive: dict[str, int], whole: int) -> str:
    """A bar of colours whose full length is `whole` bytes."""
    parts = "".join(
        f'<span title="{category} {format_bytes(alive[category])}" '
        f'style="width:{100 * alive[category] / max(whole, 1):.2f}%;background:{_paint(category)}"></span>'
        for category in COLOURS
        if category in alive
    )
    return f'<div style="display:flex;width:14em;height:.9em">{parts}</div>'


def _paint(category: str) -> str:
    colour = COLOURS[category]
    if category not in HATCHES:
        return colour
    return f"repeating-linear-gradient(135deg,{colour} 0 3px,#fff 3px 5px)"


def _table(comparison: Comparison) -> str:
    """One row per strategy: the figures of `table.cells`, with a bar after the peak."""
    name, _ = unit(comparison)
    heads = [f"{head} {name}" if head in ("peak", "saved") else head for head in HEADS]
    marks, _ = footnotes(comparison)
    longest = max((row.peak_bytes or 0 for row in comparison.rows), default=0)
    columns = "".join(f'<th style="{_CELL}">{head}</th>' for head in heads[1:])
    lines = [f'<tr><th style="{_FIRST}">strategy</th><th style="{_CELL}">{heads[0]}</th><th></th>{columns}</tr>']
    for row, mark, (peak, *others) in zip(comparison.rows, marks, cells(comparison), strict=True):
        label = escape(row.label) + (f" <sup>{mark}</sup>" if mark else "")
        bar = _bar(row.trace.by_category(), longest) if row.trace is not None else ""
        rest = "".join(f'<td style="{_CELL}">{cell}</td>' for cell in others)
        lines.append(
            f'<tr><td style="{_FIRST}">{label}</td><td style="{_CELL}">{peak}</td><td style="{_FIRST}">{bar}</td>{rest}</tr>'
        )
    return f'<table style="border-collapse:collapse">{"".join(lines)}</table>'


def _legend(comparison: Comparison) -> str:
    alive = {category for row in comparison.rows if row.trace is not None for category in row.trace.by_category()}
    swatch = "display:inline-block;width:.9em;height:.9em;margin:0 .3em 0 .9em;vertical-align:-.1em;background:"
    entries = (f'<span style="{swatch}{_paint(c)}"></span>{c}' for c in COLOURS if c in alive)
    return f'<div style="{_SMALL}">at the peak:{" ".join(entries)}</div>' if alive else ""


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
.wide { overflow-x: auto; }
img { max-width: 100%; background: white; border-radius: 4px; }
summary { cursor: pointer; margin: .4em 0; }
.two { display: flex; flex-wrap: wrap; gap: 1em 4em; margin: .5em 0 1.5em 1em; }
"""

_HOW_TO_READ = (
    ("peak", "the most memory in use at one instant of the step; a device must have at least so much. Its categories "
     "add up to it."),
    ("saved", "what autograd holds for backward when backward begins: activations, weight copies and checkpoint "
     "inputs, each storage once. It is not the peak, and a technique may lower the one and not the other."),
    ("of plain", "the peak in per cent of the plain step's, which is the first row."),
    ("time, FLOPs", "of one step, to the plain step's. Times are of this machine: medians of interleaved runs without "
     "instruments."),
    ("same model", "whether loss, gradients, buffers and updated parameters equal the plain step's in a proof in "
     "float64. Lower precision is left out there: it shows in the gradient error."),
    ("gradient error", "how far gradients are from the exact ones, in the strategy's own precision; that of the plain "
     "step is the rounding to read the others by."),
    ("workspace", "memory that operators take and give back within one call. It varies with the processor and the "
     "number of threads; all other bytes do not."),
    ("MiB", "1,048,576 bytes."),
)  # fmt: skip


def comparison_page(comparison: Comparison) -> str:
    """One whole page, in one file: what was compared, table, figure, explanation, each strategy in detail, what cannot
    be seen, how to read it. Needs matplotlib, for the figure."""
    return "\n".join(_page(comparison)) + "\n"


def _page(comparison: Comparison) -> Iterator[str]:
    from .plots import plot_comparison, png

    title = f"memlab: one training step, {len(comparison.rows)} strategies"
    yield f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>"
    yield f"<p>{_provenance(comparison)}</p>"
    yield f'<div class="wide">{comparison_html(comparison)}</div>'
    image = base64.b64encode(png(plot_comparison(comparison), dpi=150)).decode("ascii")
    yield f'<p><img src="data:image/png;base64,{image}" alt="{escape(figure_summary(comparison))}"></p>'
    yield f"<h2>What it says</h2>\n{_sentences(explain_comparison(comparison).splitlines())}"
    yield "<h2>Each strategy</h2>"
    for row in comparison.rows:
        yield _details(row)
    yield f"<h2>What cannot be seen here</h2>\n{_sentences(_absent(comparison))}"
    meanings = "".join(f"<dt><b>{term}</b></dt><dd>{meaning}</dd>" for term, meaning in _HOW_TO_READ)
    yield f"<h2>How to read it</h2>\n<dl>{meanings}</dl>\n</body>\n</html>"


def _provenance(comparison: Comparison) -> str:
    """How, on what and with what it was measured, as far as the first trace tells in single words and numbers."""
    trace = next((row.trace for row in comparison.rows if row.trace is not None), None)
    if trace is None:
        return "nothing ran"
    told = {name: value for name, value in trace.provenance.items() if not name.startswith("max_memory")}
    parts = [trace.source, *(f"{name.replace('_', ' ')} {value}" for name, value in told.items())]
    return escape(" · ".join(parts))


def _details(row: Row) -> str:
    """One strategy: what is alive at its peak, the highest point of each phase, and its own explanation."""
    if row.trace is None:
        return (
            f"<details><summary>{escape(row.label)}: could not run</summary><p>{escape(row.error or '')}</p></details>"
        )
    trace = row.trace
    phases = "".join(
        f'<tr><td style="{_FIRST}">{phase}</td><td style="{_CELL}">{format_bytes(nbytes)}</td></tr>'
        for phase, nbytes in trace.by_phase().items()
    )
    heads = f'<tr><th style="{_FIRST}">phase</th><th style="{_CELL}">highest</th></tr>'
    summary = f"{escape(row.label)}: {format_bytes(trace.peak_bytes)} in {pass_name(trace.peak.place)}"
    return (
        f'<details><summary>{summary}</summary><div class="two"><div>{_categories(trace)}</div>'
        f'<table style="border-collapse:collapse">{heads}{phases}</table></div>'
        f"{_sentences(explain_trace(trace).splitlines())}</details>"
    )


def _absent(comparison: Comparison) -> list[str]:
    """What the traces cannot see, each once."""
    traces = [row.trace for row in comparison.rows if row.trace is not None]
    return list(dict.fromkeys(sentence for trace in traces for sentence in trace.absent)) or ["Nothing is missing."]


def _sentences(lines: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line.removeprefix("- "))}</li>' for line in lines)}</ul>"
