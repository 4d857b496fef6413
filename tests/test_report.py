"""The page of a trace holds all that the trace tells, in one file that runs nothing."""

import dataclasses
from html import escape

import pytest
from test_views_html import Reader
from views_samples import EMPTY, EVIL, IN_BACKWARD, every_trace, measured

from memlab import Checkpoint
from memlab.units import format_bytes
from memlab.views.figures import FIGURES
from memlab.views.words import bounds, findings


def images(page):
    return [attributes for tag, attributes in Reader(page).tags if tag == "img"]


@pytest.mark.parametrize("its", every_trace(), ids=lambda its: its.strategy)
def test_a_page_tells_everything(its):
    page = its.to_html()
    reader = Reader(page)
    for sentence in (*findings(its), *(bounds(its) if its.peak_bytes else ()), *its.absent, *its.notes):
        assert sentence.removeprefix("- ") in reader.words
    shown = {row[0]: row[1] for row in reader.rows if len(row) > 1}
    for names in (its.by_category(), its.by_phase()):
        for name, nbytes in names.items():
            assert shown[name] == format_bytes(nbytes)
    assert [image["alt"] for image in images(page)] == [its.plot(kind).summary for kind in FIGURES]
    for name in ("device", "torch"):
        if name in its.provenance:
            assert f"{name} {its.provenance[name]}" in reader.words


def test_a_page_lists_saved_tensors_with_their_reasons():
    its = measured(Checkpoint("blocks.*"))
    rows = [row for row in Reader(its.to_html()).rows if len(row) == 9]
    assert len(rows) == 1 + len(its.saved_table().rows)
    for row in its.saved_table().rows:
        assert any(cells[:2] == [row.first.module or "(no module)", row.first.slot] for cells in rows)


@pytest.mark.parametrize("its", [EMPTY, IN_BACKWARD, measured()], ids=["empty", "by hand", "measured"])
def test_a_page_is_one_file_and_runs_nothing(its):
    for tag, attributes in Reader(its.to_html()).tags:
        assert tag not in ("script", "link", "iframe", "object", "a", "form")
        assert not [name for name in attributes if name.startswith("on")]
        assert attributes.get("src", "data:").startswith("data:")
        assert "url(" not in attributes.get("style", "")


def test_names_are_escaped():
    saved = tuple(dataclasses.replace(tensor, module=EVIL) for tensor in IN_BACKWARD.saved)
    evil = dataclasses.replace(IN_BACKWARD, strategy=EVIL, notes=(EVIL,), saved=saved, provenance={"device": EVIL})
    for page in (evil.to_html(), evil.saved_table()._repr_html_(), evil.diff(IN_BACKWARD)._repr_html_()):
        assert "<b onclick" not in page
        assert escape(EVIL) in page


def test_several_steps_are_told():
    its = dataclasses.replace(IN_BACKWARD, step_ends=(1, 3))
    assert "2 training steps" in its.to_html()
