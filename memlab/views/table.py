"""A `Comparison` as a table: a pandas frame, and aligned text for a terminal.

Both show the same figures. Bytes are exact; times and FLOPs are ratios to the plain step's, the first row.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..units import MiB, format_ratio
from .words import percent, unit_for

if TYPE_CHECKING:
    import pandas as pd

    from ..compare import Comparison, Row

_SAME = {True: "yes", False: "no", None: "not proven"}
_LABEL = 34  # characters of a label before it is broken

# -- the frame ---------------------------------------------------------------------------------------------------------


def comparison_frame(comparison: Comparison, strict: bool = False) -> pd.DataFrame:
    """A row per strategy, indexed by label. Sizes are MiB; what is unknown, or could not run, is empty.

    `strict` keeps to what is the same on every machine: tensor bytes and the verdict. No workspace, no times, no
    rounding errors, no notes.
    """
    import pandas as pd

    rows = comparison.rows
    columns = _strict_columns(rows) if strict else _columns(rows)
    return pd.DataFrame(columns, index=pd.Index([row.label for row in rows], name="strategy"))


def _strict_columns(rows: tuple[Row, ...]) -> dict[str, list[Any]]:
    plain = rows[0].tensor_peak_bytes if rows else None
    return {
        "tensor peak MiB": [_mib(row.tensor_peak_bytes) for row in rows],
        "relative to baseline": [_relative(row.tensor_peak_bytes, plain) for row in rows],
        "saved MiB": [_mib(row.saved_bytes) for row in rows],
        "phase of peak": [row.trace and row.trace.tensor_peak.phase for row in rows],
        "same model": [verdict(row) for row in rows],
    }


def _columns(rows: tuple[Row, ...]) -> dict[str, list[Any]]:
    plain = rows[0].peak_bytes if rows else None
    return {
        "peak MiB": [_mib(row.peak_bytes) for row in rows],
        "relative to baseline": [_relative(row.peak_bytes, plain) for row in rows],
        "saved MiB": [_mib(row.saved_bytes) for row in rows],
        "phase of peak": [row.trace and row.trace.peak.phase for row in rows],
        "time ratio": [row.time_ratio for row in rows],
        "FLOPs ratio": [row.flops_ratio for row in rows],
        "same model": [verdict(row) for row in rows],
        "gradient difference": [row.gradient_difference for row in rows],
        "gradient error": [row.gradient_error for row in rows],
        "notes": ["; ".join(remarks(row)) for row in rows],
    }


def _mib(nbytes: int | None) -> float | None:
    return None if nbytes is None else round(nbytes / MiB, 2)


def _relative(nbytes: int | None, plain: int | None) -> float | None:
    return round(nbytes / plain, 3) if nbytes is not None and plain else None


def verdict(row: Row) -> str:
    """Whether the strategy trains the same model: yes, no, not proven; empty where it could not run."""
    return "" if row.error is not None else _SAME[row.equivalent]


def remarks(row: Row) -> tuple[str, ...]:
    """What a reader of the row should know: why it could not run, then its notes."""
    return (*([f"could not run: {row.error}"] if row.error is not None else []), *row.notes)


# -- cells, for the terminal and for pages -----------------------------------------------------------------------------

HEADS = ("peak", "of plain", "saved", "peak in", "time", "FLOPs", "same model", "gradient error")


def cells(comparison: Comparison) -> list[tuple[str, ...]]:
    """The figures of each row as text, under `HEADS`; sizes in the unit that `unit` names."""
    rows = comparison.rows
    plain = rows[0].peak_bytes if rows else None
    _, size = unit(comparison)
    return [
        (
            _shown(row.peak_bytes, lambda nbytes: f"{nbytes / size:.2f}"),
            _shown(row.peak_bytes, lambda nbytes: percent(nbytes, plain or 0)),
            _shown(row.saved_bytes, lambda nbytes: f"{nbytes / size:.2f}"),
            "–" if row.trace is None else row.trace.peak.phase,
            _shown(row.time_ratio, format_ratio),
            _shown(row.flops_ratio, format_ratio),
            verdict(row) or "–",
            _shown(row.gradient_error, lambda error: f"{error:.0e}"),
        )
        for row in rows
    ]


def unit(comparison: Comparison) -> tuple[str, int]:
    """The unit for all the sizes of a comparison: its name and its bytes."""
    return unit_for(max((row.peak_bytes or 0 for row in comparison.rows), default=0))


def _shown(value: Any, form: Callable[[Any], str]) -> str:
    return "–" if value is None else form(value)


def footnotes(comparison: Comparison) -> tuple[list[str], list[str]]:
    """Marks such as `[1] [2]` for each row, and the remarks they stand for; equal remarks share a number."""
    numbers: dict[str, int] = {}
    marks = []
    for row in comparison.rows:
        found = [numbers.setdefault(remark, len(numbers) + 1) for remark in remarks(row)]
        marks.append(" ".join(f"[{number}]" for number in found))
    return marks, list(numbers)


# -- the terminal ------------------------------------------------------------------------------------------------------


def comparison_text(comparison: Comparison) -> str:
    """An aligned table of at most 120 columns, remarks below it."""
    marks, notes = footnotes(comparison)
    name, _ = unit(comparison)
    heads = tuple(f"{head} {name}" if head in ("peak", "saved") else head for head in HEADS)
    body = cells(comparison)
    widths = [max(len(row[column]) for row in (heads, *body)) for column in range(len(heads))]
    labels = [
        textwrap.wrap(f"{row.label} {mark}".strip(), _LABEL, subsequent_indent="  ", break_on_hyphens=False)
        for row, mark in zip(comparison.rows, marks, strict=True)
    ]
    wide = max((len(line) for lines in labels for line in lines), default=0)
    lines = [_line("", heads, wide, widths)]
    for label, row in zip(labels, body, strict=True):
        *above, last = label or [""]
        lines += [*above, _line(last, row, wide, widths)]
    for number, note in enumerate(notes, 1):
        lines += textwrap.wrap(f"[{number}] {note}", 116, subsequent_indent="    ", break_on_hyphens=False)
    return "\n".join(line.rstrip() for line in lines)


def _line(label: str, row: tuple[str, ...], wide: int, widths: list[int]) -> str:
    return "  ".join([label.ljust(wide), *(cell.rjust(width) for cell, width in zip(row, widths, strict=True))])
