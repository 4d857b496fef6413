"""Figures show the values: areas and bars add up to the peak, texts can be read, nothing is left behind."""

import dataclasses
import itertools
import subprocess
import sys

import matplotlib.colors
import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pytest
from matplotlib.text import Text
from nbclient import NotebookClient
from views_samples import EMPTY, EVIL, EVIL_ROWS, FAILED, IN_BACKWARD, comparison, every_trace, measured, row, trace

from memlab import Checkpoint, Comparison, MicroBatch, MixedPrecision, OptimizerInBackward, Trace
from memlab.trace import CATEGORIES, Allocation, Operator, Place
from memlab.units import format_bytes
from memlab.views.colours import COLOURS, HATCHES
from memlab.views.plots import plot_comparison, plot_trace, png, timeline_stacks
from memlab.views.words import figure_summary

every = pytest.mark.parametrize("its", every_trace(), ids=lambda its: its.strategy)


def texts(figure):
    """The texts that are drawn (an axis has more labels than it draws), each with its box in pixels."""
    drawn = []
    draw = Text.draw
    figure.draw_without_rendering()  # the layout is found
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Text, "draw", lambda text, renderer: (drawn.append(text), draw(text, renderer)))
        figure.draw_without_rendering()
    # Of an annotation, the text without its line.
    return [(text.get_text(), Text.get_window_extent(text)) for text in drawn if text.get_text().strip()]


def assert_readable(figure):
    """All texts lie within the figure, and none on another."""
    width, height = figure.get_size_inches() * figure.dpi
    drawn = texts(figure)
    for text, box in drawn:
        assert -1 <= box.x0 < box.x1 <= width + 1, text
        assert -1 <= box.y0 < box.y1 <= height + 1, text
    for (one, a), (other, b) in itertools.combinations(drawn, 2):
        apart = a.x1 <= b.x0 + 1 or b.x1 <= a.x0 + 1 or a.y1 <= b.y0 + 1 or b.y1 <= a.y0 + 1
        assert apart, (one, other)


# -- colours -----------------------------------------------------------------------------------------------------------


def test_every_category_has_a_look_of_its_own():
    assert COLOURS.keys() == set(CATEGORIES)
    looks = {(colour, HATCHES.get(category)) for category, colour in COLOURS.items()}
    assert len(looks) == len(CATEGORIES)
    palette = {matplotlib.colors.to_hex(colour) for colour in matplotlib.color_sequences["petroff10"]}
    assert set(COLOURS.values()) <= palette


# -- one step ----------------------------------------------------------------------------------------------------------


@every
def test_the_stack_is_the_timeline_and_its_top_is_the_peak(its):
    edges, stacks = timeline_stacks(its)
    total = sum(stacks.values(), np.zeros(len(edges) - 1, dtype=int))
    assert total.tolist() == [point.nbytes for point in its.timeline()] or its is EMPTY
    assert total.max() == its.peak_bytes
    at_peak = {category: int(nbytes[total.argmax()]) for category, nbytes in stacks.items()}
    assert {category: nbytes for category, nbytes in at_peak.items() if nbytes} == its.by_category()


def test_a_long_timeline_keeps_its_peak():
    count = 20_011
    places = [Place("forward")] * count
    operators = tuple(Operator(place, tick, 0.0) for tick, place in enumerate(places, 2))
    sizes = [100] * count
    sizes[12_345] = 999
    allocations = tuple(
        Allocation(size, "temporaries", places[number], number + 1, number + 2, number)
        for number, size in enumerate(sizes)
    )
    edges, stacks = timeline_stacks(Trace(allocations, operators, ()))
    assert len(edges) < 3000
    assert (edges[0], edges[-1]) == (0, count)
    column = int(stacks["temporaries"].argmax())
    assert stacks["temporaries"][column] == 999
    assert edges[column] <= 12_345 < edges[column + 1]


@every
def test_a_timeline_can_be_read(its):
    figure = plot_trace(its)
    assert_readable(figure)
    shown = [text for text, _ in texts(figure)]
    if its is not EMPTY:
        assert f"peak {format_bytes(its.peak_bytes)}, {its.peak.phase}" in shown
    for category, nbytes in its.by_category().items():
        if nbytes > 0.01 * its.peak_bytes:
            assert f"{category}  {format_bytes(nbytes)}" in shown


@pytest.mark.parametrize(
    ("strategy", "names"),
    [
        (MicroBatch(count=2), {"forward 1", "backward 1", "forward 2", "backward 2", "optimizer"}),
        (Checkpoint("blocks.*"), {"forward", "backward", "recomputation runs"}),
        (OptimizerInBackward(), {"forward", "backward + optimizer"}),
    ],
    ids=["micro-batches", "checkpoint", "optimizer in backward"],  # a set prints in another order in each process
)
def test_passes_are_named(strategy, names):
    shown = {
        text.replace("fwd", "forward").replace("bwd", "backward") for text, _ in texts(plot_trace(measured(strategy)))
    }
    assert names <= shown


def test_a_timeline_is_drawn_into_axes_of_the_users_own():
    figure, (left, right) = plt.subplots(1, 2)
    try:
        assert plot_trace(IN_BACKWARD, ax=right) is figure
        assert not left.has_data()
        assert right.has_data()
    finally:
        plt.close(figure)


# -- several strategies ------------------------------------------------------------------------------------------------

CHECKPOINT, MICRO, HALF = Checkpoint("blocks.*"), MicroBatch(count=4), MixedPrecision("bf16")


def timed(count=9, same_place=False):
    """A comparison with times, of techniques that lie close together."""
    strategies = [CHECKPOINT, MICRO, HALF, OptimizerInBackward(), CHECKPOINT + MICRO, CHECKPOINT + HALF, MICRO + HALF]
    strategies = [*strategies, CHECKPOINT + MICRO + HALF][: count - 1]
    steps = [0 if same_place else n for n in range(len(strategies))]
    traces = [trace((30 + n % 3, "activations", 1, 2)) for n in steps]
    return comparison(*(row(s, t, time_ratio=1 + n / 100) for s, t, n in zip(strategies, traces, steps, strict=True)))


def bars(figure):
    """The length of each row's bar, in the unit of the axis."""
    lengths = {}
    for patch in figure.axes[0].patches:
        middle = round(patch.get_y() + patch.get_height() / 2)
        lengths[middle] = lengths.get(middle, 0) + patch.get_width()
    return lengths


def test_bars_add_up_to_the_peaks():
    rows = comparison(*(row(CHECKPOINT, its, label=its.strategy) for its in every_trace() if its is not EMPTY), FAILED)
    lengths = bars(plot_comparison(rows))
    expected = {n: r.peak_bytes / 2**20 for n, r in enumerate(rows.rows) if r.trace is not None}
    assert lengths == pytest.approx(expected)


@pytest.mark.parametrize(
    "its",
    [
        comparison(),
        timed(2),
        timed(5),
        timed(9),
        timed(9, same_place=True),
        comparison(FAILED),
        comparison(row(CHECKPOINT, IN_BACKWARD, time_ratio=3.2, equivalent=False), FAILED),
    ],
    ids=["alone", "two", "five", "nine", "all in one place", "failed", "not the same"],
)
def test_a_comparison_can_be_read(its):
    figure = plot_comparison(its)
    assert_readable(figure)
    shown = " ".join(text for text, _ in texts(figure))
    for number, its_row in enumerate(its.rows, 1):
        assert its_row.label in shown.replace("\n", " ")
        assert str(number) in shown
        assert (its_row.trace is None) or format_bytes(its_row.trace.peak_bytes) in shown
    assert ("could not run" in shown) == any(r.error for r in its.rows)
    assert ("not the same model" in shown) == any(r.equivalent is False for r in its.rows)


def test_numbers_stay_beside_their_points_at_any_resolution():
    figure = plot_comparison(timed(5))
    for dpi in (60, 100, 240):
        figure.set_dpi(dpi)
        figure.draw_without_rendering()
        scatter = figure.axes[1]
        points = [scatter.transData.transform(line.get_xydata()[0]) for line in scatter.lines[1:]]
        numbers = {text.get_text(): text.get_window_extent() for text in scatter.texts}
        for number, (x, y) in enumerate(points, 1):
            box = numbers[str(number)]
            away = np.hypot((box.x0 + box.x1) / 2 - x, (box.y0 + box.y1) / 2 - y)
            assert away < 0.45 * dpi, (dpi, number)


def test_without_times_there_are_bars_only():
    quiet = Comparison(tuple(dataclasses.replace(r, time_ratio=None) for r in timed(3).rows))
    assert len(plot_comparison(quiet).axes) == 1
    assert len(plot_comparison(timed(3)).axes) == 2


def test_what_trains_another_model_is_hollow_and_off_the_line():
    its = comparison(
        row(CHECKPOINT, trace((30, "activations", 1, 2)), time_ratio=1.3),
        row(MICRO, trace((10, "activations", 1, 2)), time_ratio=1.1, equivalent=False),
    )
    line, *points = plot_comparison(its).axes[1].lines
    assert [point.get_fillstyle() for point in points] == ["full", "full", "none"]
    assert sorted(map(tuple, line.get_xydata())) == [(1.0, 65.0), (1.3, 30.0)]


def test_labels_are_text_and_not_mathematics():
    assert_readable(plot_comparison(EVIL_ROWS))
    figure = plot_trace(dataclasses.replace(IN_BACKWARD, strategy=EVIL))
    assert png(figure)
    assert any(EVIL in text for text, _ in texts(figure))


def test_no_rows_are_an_empty_picture():
    assert png(plot_comparison(Comparison(())))


# -- in a notebook -----------------------------------------------------------------------------------------------------


def test_nothing_stays_open():
    plot_trace(IN_BACKWARD)
    plot_comparison(timed(3))
    assert plt.get_fignums() == []


def test_a_figure_tells_itself_in_a_line():
    assert repr(plot_trace(IN_BACKWARD)) == figure_summary(IN_BACKWARD)
    data, metadata = plot_comparison(timed(3))._repr_mimebundle_()
    assert data["image/png"].startswith(b"\x89PNG")
    assert data["text/plain"] == metadata["image/png"]["alt"] == figure_summary(timed(3))


def test_a_notebook_shows_a_figure_once():
    """Whatever the notebook knows of matplotlib by then."""
    build = "from memlab.trace import *\ntrace = Trace((Allocation(8, 'batch', Place(), 0, None, -1),), (), ())"
    notebook = nbformat.v4.new_notebook()
    for first in (build, "import matplotlib.pyplot as plt", "%matplotlib inline"):
        notebook.cells += [nbformat.v4.new_code_cell(source) for source in (first, "trace.plot()", "trace.plot();")]
    NotebookClient(notebook, kernel_name="python3").execute()
    outputs = [[sorted(output.data) for output in cell.outputs] for cell in notebook.cells]
    assert outputs == [[], [["image/png", "text/plain"]], []] * 3


def test_without_matplotlib_the_message_says_what_to_install():
    code = (
        "import sys; sys.modules['matplotlib'] = sys.modules['matplotlib.figure'] = None\n"
        "import memlab\nfrom memlab.trace import Trace\n"
        "try: Trace((), (), ()).plot()\nexcept memlab.MemlabError as error: print(error)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install matplotlib" in run.stdout
