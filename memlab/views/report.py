"""A `Trace` as one HTML page, in one file, to hand to a colleague: what `Trace.to_html` writes."""

from __future__ import annotations

from ..trace import Trace
from .html import ALL_SEEN, bullets, meanings, page, peak_tables, picture
from .saved import saved_html, saved_table
from .words import bounds, findings

_ROWS = 400  # of the table of saved tensors; a larger network has thousands, and they repeat


def trace_page(trace: Trace) -> str:
    """The page: the peak in words and over time, by category, phase and module, the network, what is saved and why, how
    far techniques could lower the peak, what is not seen. Needs matplotlib, for the figures."""
    steps = f"{len(trace.steps)} training steps" if len(trace.steps) > 1 else "one training step"
    parts = [
        ("The peak", bullets(findings(trace))),
        ("", picture(trace.plot())),
        ("", peak_tables(trace)),
        ("By module", picture(trace.plot("modules"))),
        ("The network", picture(trace.plot("network"))),
        ("Saved for backward", picture(trace.plot("saved"))),
        ("", saved_html(saved_table(trace, _ROWS))),
        ("How far techniques could lower the peak", bullets(bounds(trace)) if trace.peak_bytes else ""),
        ("What cannot be seen here", bullets(trace.absent or [ALL_SEEN])),
        ("Notes", bullets(trace.notes)),
        ("How to read it", meanings("peak", "saved", "workspace", "MiB")),
    ]
    return page(
        f"memlab: {steps}, {trace.strategy}", trace, [part for part in parts if part[1] not in ("", bullets(()))]
    )
