"""Pages hold the values, nothing from elsewhere, and nothing that a name could smuggle in."""

import re
from html import escape
from html.parser import HTMLParser

import pytest
from views_samples import EMPTY, EVIL, EVIL_ROWS, FAILED, IN_BACKWARD, IN_OPTIMIZER, comparison, every_trace, row, trace

from memlab import Checkpoint, Comparison
from memlab.units import MiB, format_bytes
from memlab.views.html import comparison_html, comparison_page, trace_html
from memlab.views.verdicts import comparison_sentences
from memlab.views.words import figure_summary, trace_sentences

VOID = {"meta", "img", "br"}
ROWS = comparison(
    row(Checkpoint("blocks.*"), IN_OPTIMIZER, time_ratio=1.25, notes=("something to know",)),
    FAILED,
)


class Reader(HTMLParser):
    """Reads a page: its tags with their attributes, its text, the texts of each table's rows. Tags must be balanced."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.text, self.rows = [], [], [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text.append(data)
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data

    @property
    def words(self):
        return " ".join(self.text)


def widths(page):
    """The widths of the parts of each bar, in per cent."""
    return [
        [float(width) for width in re.findall(r'style="width:([\d.]+)%', bar)]
        for bar in re.findall(r'<div style="display:flex[^>]*>(.*?)</div>', page)
    ]


# -- a notebook's cell -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("its", every_trace(), ids=lambda its: its.strategy)
def test_a_trace_is_a_table_of_what_is_alive_at_its_peak(its):
    page = trace_html(its)
    reader = Reader(page)
    head, *rows = reader.rows
    assert head[:3] == ["alive at the peak", "bytes", "share"]
    shown = {row[0]: row[1] for row in rows}
    assert shown == {category: format_bytes(nbytes) for category, nbytes in its.by_category().items()}
    assert sum(sum(bar) for bar in widths(page)) == pytest.approx(100 if its.peak_bytes else 0, abs=0.1)
    for nbytes in (*its.by_phase().values(), its.saved_bytes, its.peak_bytes):
        assert format_bytes(nbytes) in reader.words


def test_what_a_trace_does_not_see_is_told():
    its = trace((1, "parameters", 0, 3), absent=("workspace: unseen",), notes=("cut short",))
    words = Reader(trace_html(its)).words
    assert "not seen: workspace: unseen" in words
    assert "cut short" in words


def test_a_comparison_is_a_table_with_bars_and_footnotes():
    page = comparison_html(ROWS)
    reader = Reader(page)
    head, *rows = reader.rows
    assert head[:2] == ["strategy", "peak MiB"]
    assert [row[1] for row in rows] == ["65.00", "30.00", "–"]
    assert rows[1][0] == "checkpoint blocks.* [1]"
    assert "[1] something to know" in reader.words
    assert "[2] could not run: 999 micro-batches" in reader.words
    baseline, checkpoint = widths(page)
    assert sum(baseline) == pytest.approx(100, abs=0.1)
    assert sum(checkpoint) == pytest.approx(100 * 30 / 65, abs=0.1)


def test_cells_take_the_colours_of_their_surroundings():
    for page in (trace_html(IN_BACKWARD), comparison_html(ROWS)):
        styles = " ".join(attributes.get("style", "") for _, attributes in Reader(page).tags)
        assert not re.search(r"(^|[;\s])color:", styles)


# -- a page ------------------------------------------------------------------------------------------------------------


def test_a_page_holds_all_that_was_found():
    page = comparison_page(ROWS)
    words = Reader(page).words
    for sentence in (*comparison_sentences(ROWS), "How to read it", "could not run"):
        assert sentence.removeprefix("- ") in words
    for its in (IN_BACKWARD, IN_OPTIMIZER):
        for sentence in trace_sentences(its):
            assert sentence.removeprefix("- ") in words
    (image,) = [attributes for tag, attributes in Reader(page).tags if tag == "img"]
    assert image["src"].startswith("data:image/png;base64,iVBOR")
    assert image["alt"] == figure_summary(ROWS)


def test_a_page_tells_how_it_was_measured_and_what_is_missing():
    its = trace((1, "parameters", 0, 3), provenance={"device": "cpu", "torch": "2.x"}, absent=("the context",))
    words = Reader(comparison_page(Comparison((row(Checkpoint(), its),)))).words
    assert "measured · device cpu · torch 2.x" in words
    assert "the context" in words


@pytest.mark.parametrize("rows", [ROWS, EVIL_ROWS, comparison()], ids=["rows", "evil", "alone"])
def test_a_page_is_one_file_and_runs_nothing(rows):
    for tag, attributes in Reader(comparison_page(rows)).tags:
        assert tag not in ("script", "link", "iframe", "object", "a", "form")
        assert not [name for name in attributes if name.startswith("on")]
        assert attributes.get("src", "data:").startswith("data:")
        assert "url(" not in attributes.get("style", "")


def test_names_are_escaped_everywhere():
    evil = trace((1, "parameters", 0, 3), strategy=EVIL, notes=(EVIL,), absent=(EVIL,), provenance={"device": EVIL})
    for page in (trace_html(evil), comparison_html(EVIL_ROWS), comparison_page(EVIL_ROWS), evil._repr_html_()):
        assert "<b onclick" not in page
        assert escape(EVIL) in page
        assert EVIL in Reader(page).words


def test_nothing_at_all_is_still_a_page():
    assert "0 strategies" in comparison_page(Comparison(()))
    assert Reader(trace_html(EMPTY)).words
    assert format_bytes(65 * MiB) in comparison_page(comparison())
