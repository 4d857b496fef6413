"""The picture and the words of a schedule say what the schedule says, and the explorer answers its controls."""

import itertools

import ipywidgets
import matplotlib.colors
import numpy as np
import pytest
import torch
from matplotlib.collections import FillBetweenPolyCollection
from matplotlib.patches import Rectangle
from test_views_plots import assert_readable, texts
from torch import nn

import memlab
from memlab import MemlabError, zoo
from memlab.chain import Block, Chain, best, pareto, schedule, weigh
from memlab.notebook.panel import Panel, View
from memlab.notebook.schedule import explore_checkpointing, parse_pattern
from memlab.passes import Pass, Passes
from memlab.units import MiB, format_bytes
from memlab.views.colours import COLOURS
from memlab.views.plots import Picture
from memlab.views.schedule import instant_sentences, placement_sentences, plot_schedule, schedule_summary


def by_hand(count):
    """Blocks that save 8 MiB, hand on 1 MiB and have parameters of 2 MiB, around which little happens."""
    a, saved, given = MiB, 8 * MiB, 2 * MiB
    kept = Passes(Pass(saved + 2 * a, saved + a, work=10), Pass(2 * a, given - saved - a, given, work=20))
    again = Pass(saved + a, saved, work=9)
    bare = Passes(Pass(3 * a, a, work=10), Pass(2 * a, given - saved - a, given, work=20), again)
    around = Passes(Pass(a, a), Pass(0, -a)), Passes(Pass(a, a), Pass(0, -a))
    loss = Passes(Pass(a, 0), Pass(a, 0)), Passes(Pass(a, 0), Pass(a, 0))
    blocks = tuple(Block(f"blocks.{n}", a, saved, 0, (kept, kept), (bare, bare)) for n in range(count))
    return Chain(blocks, 30 * MiB, a, 30 * count, around, loss, Pass(0, -given * count))


CHAIN = by_hand(4)
ALTERNATE = (True, False, True, False)


# -- words -------------------------------------------------------------------------------------------------------------


def test_an_instant_in_words():
    instants = schedule(CHAIN, ALTERNATE)
    number = next(n for n, now in enumerate(instants) if (now.phase, now.block) == ("recompute", 2))
    first, second = instant_sentences(CHAIN, ALTERNATE, number)
    # Resident 30, 8 saved by block 1, the inputs of blocks 0 to 2, the gradients of block 3; at work are the 9 that
    # running again needs, and the gradient that waits for it.
    assert first == f"{number + 1} of {len(instants)}: blocks.2 runs again, 53.0 MiB at its highest."
    assert second == (
        "Alive: parameters, state, batch (30.0 MiB), saved tensors of block 1 (8.00 MiB), "
        "inputs of blocks 0–2 (3.00 MiB), gradients of block 3 (2.00 MiB), at work (10.0 MiB)."
    )


def test_how_far_a_placement_is_from_the_best():
    lines = placement_sentences(CHAIN, ALTERNATE)
    assert lines[0] == "Your placement: 54.0 MiB, 2 blocks run again (+15 % arithmetic)."
    assert lines[1].startswith("That is ")
    # With 2 blocks run again, 53 MiB: then block 3's backward is the peak. With 3: 48.
    assert lines[3] == (
        "The best for this arithmetic is 53.0 MiB: checkpoints on blocks 0–1, 2 blocks run again (+15 % arithmetic)."
    )
    least = best(CHAIN)
    assert f"The lowest peak is {format_bytes(least.peak_bytes)}, " in lines[2]
    assert placement_sentences(CHAIN, least.regions)[-2] == "No placement of single blocks has a lower peak."


@pytest.mark.parametrize("flags", list(itertools.product([False, True], repeat=4)), ids=str)
def test_the_best_in_words_is_the_best_of_all(flags):
    own = weigh(CHAIN, flags)
    tried = [weigh(CHAIN, other) for other in itertools.product([False, True], repeat=4)]
    says = " ".join(placement_sentences(CHAIN, flags))
    less_work = min(one.work for one in tried if one.peak_bytes <= own.peak_bytes)
    less_peak = min(one.peak_bytes for one in tried if one.work <= own.work)
    assert ("The best for this memory" in says) == (less_work < own.work)
    assert ("No other placement has less memory" in says) == (
        any(flags) and less_work == own.work and less_peak == own.peak_bytes
    )
    assert ("No placement of single blocks has a lower peak" in says) == (
        own.peak_bytes == min(one.peak_bytes for one in tried)
    )


# -- picture -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 4, 12, 24, 48])
@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_the_figure_can_be_read(count, where):
    chain = by_hand(count)
    flags = tuple(number % 2 == 0 for number in range(count))
    last = len(schedule(chain, flags)) - 1
    figure = plot_schedule(chain, flags, {"first": 0, "middle": last // 2, "last": last}[where])
    assert_readable(figure)


@pytest.mark.parametrize("placement", [(), ((0, 1), (2,)), (True,) * 4], ids=str)
def test_areas_add_up_to_the_memory_in_use(placement):
    figure = plot_schedule(CHAIN, placement, 3)
    instants = schedule(CHAIN, placement)
    stacked = [area for area in figure.axes[1].collections if isinstance(area, FillBetweenPolyCollection)]
    vertices = np.concatenate([area.get_paths()[0].vertices for area in stacked])
    for number, now in enumerate(instants):
        (inside,) = np.nonzero((vertices[:, 0] >= number) & (vertices[:, 0] <= number + 1))
        reached = set(np.round(vertices[inside, 1] * MiB))
        assert now.nbytes in reached
        assert now.resident in reached


def test_boxes_are_filled_with_what_blocks_hold():
    instants = schedule(CHAIN, ALTERNATE)
    number = next(n for n, now in enumerate(instants) if now.phase == "backward")
    boxes = plot_schedule(CHAIN, ALTERNATE, number).axes[0].patches
    saved = matplotlib.colors.to_rgba(COLOURS["activations"])
    full = [box for box in boxes if box.get_facecolor() == saved and not box.get_hatch() and box.get_height() == 1]
    assert [int(box.get_x()) for box in full] == [1, 3]
    inputs = [box for box in boxes if box.get_facecolor() == saved and box.get_hatch() and box.get_width() < 0.2]
    assert len(inputs) == 4


def test_lines_and_labels_tell_peaks():
    figure = plot_schedule(CHAIN, ALTERNATE, 0)
    says = " ".join(text for text, _ in texts(figure))
    for words, nbytes in [
        ("peak ", weigh(CHAIN, ALTERNATE).peak_bytes),
        ("without checkpoints ", weigh(CHAIN).peak_bytes),
        ("best of single blocks ", best(CHAIN).peak_bytes),
    ]:
        assert words + format_bytes(nbytes) in says
    assert figure.summary == schedule_summary(CHAIN, ALTERNATE)
    assert figure.summary.startswith("2 of 4 blocks checkpointed: peak 54.0 MiB, as blocks.2 runs backward; ")
    assert "\n" not in figure.summary


def test_the_frame_is_at_the_instant():
    memory = plot_schedule(CHAIN, (), 5).axes[1]
    (frame,) = [patch for patch in memory.patches if isinstance(patch, Rectangle) and not patch.get_fill()]
    assert (frame.get_x(), frame.get_width()) == (5, 1)


def test_an_instant_that_is_not_there():
    with pytest.raises(MemlabError, match="instant 99: this schedule has 0 to 12"):
        plot_schedule(CHAIN, (), 99)


# -- the explorer ------------------------------------------------------------------------------------------------------


def test_toggles_change_what_it_says():
    panel = explore_checkpointing(CHAIN)
    assert panel.text.startswith(f"Your placement: {format_bytes(weigh(CHAIN).peak_bytes)}, nothing runs again.")
    before = panel.image.value
    panel.toggles[0].value = panel.toggles[2].value = True
    assert panel.placement == ALTERNATE
    assert panel.text.startswith("Your placement: 54.0 MiB, 2 blocks run again")
    assert panel.image.value != before
    assert panel.instant.max == len(schedule(CHAIN, ALTERNATE)) - 1
    panel.toggles[0].value = panel.toggles[2].value = False
    assert panel.image.value == before


def test_it_begins_at_the_peak_and_goes_through_the_step():
    panel = explore_checkpointing(CHAIN)
    instants = schedule(CHAIN)
    assert instants[panel.instant.value].nbytes == weigh(CHAIN).peak_bytes
    for number, now in enumerate(instants):
        panel.instant.value = number
        assert f"{number + 1} of {len(instants)}: " in panel.text
        assert f"{format_bytes(now.nbytes)} at its highest" in panel.text


@pytest.mark.parametrize(
    ("label", "expected"),
    [("none", (False,) * 4), ("all", (True,) * 4), ("every other", ALTERNATE)],
)
def test_buttons(label, expected):
    panel = explore_checkpointing(CHAIN)
    panel.buttons[label].click()
    assert panel.placement == expected


def test_the_best_is_one_click_away():
    panel = explore_checkpointing(CHAIN)
    panel.buttons["best"].click()
    assert weigh(CHAIN, panel.placement) == best(CHAIN)
    panel.toggles[1].value = not panel.toggles[1].value
    memory = weigh(CHAIN, panel.placement).peak_bytes
    panel.buttons["best for this memory"].click()
    assert weigh(CHAIN, panel.placement) == next(its for its in pareto(CHAIN) if its.peak_bytes <= memory)
    panel.buttons["go to the peak"].click()
    assert schedule(CHAIN, panel.placement)[panel.instant.value].nbytes == weigh(CHAIN, panel.placement).peak_bytes


def test_a_long_chain_has_a_pattern():
    panel = explore_checkpointing(by_hand(24))
    assert not panel.toggles
    panel.pattern.value = "every 3"
    assert "8 blocks run again" in panel.text
    panel.buttons["every other"].click()
    assert panel.pattern.value == "0 2 4 6 8 10 12 14 16 18 20 22"
    panel.pattern.value = "0 99"
    assert panel.text == (
        '\'0 99\' names no blocks among 0 to 23: write "none", "all", "every 3", or numbers and spans such as "0 3 6-9"'
    )
    panel.pattern.value = "0 3"
    assert "2 blocks run again" in panel.text


@pytest.mark.parametrize(
    ("text", "blocks"),
    [("", []), ("none", []), ("all", [0, 1, 2, 3, 4]), ("every 2", [0, 2, 4]), ("1, 3-4", [1, 3, 4]), ("every 9", [0])],
)
def test_patterns(text, blocks):
    assert [number for number, flag in enumerate(parse_pattern(text, 5)) if flag] == blocks


@pytest.mark.parametrize("text", ["every 0", "5", "-1", "2-", "every", "some", "0-99999999999"])
def test_patterns_that_say_nothing(text):
    with pytest.raises(MemlabError, match="names no blocks among 0 to 4"):
        parse_pattern(text, 5)


def test_a_step_of_the_users_own_is_measured():
    step = zoo.mlp_step(batch=64, depth=3, width=16)
    panel = explore_checkpointing(step)
    panel.buttons["all"].click()
    measured = memlab.measure(step, memlab.Checkpoint(), allocator=False).tensor_peak_bytes
    assert panel.text.startswith(f"Your placement: {format_bytes(measured)}, 3 blocks run again")


def test_what_is_no_step_is_refused():
    with pytest.raises(MemlabError, match=r"explore_checkpointing\(\) takes a TrainingStep or a Chain, not Linear"):
        explore_checkpointing(zoo.nn.Linear(2, 2))


# -- the panel that explorers stand in ---------------------------------------------------------------------------------


class Doubling(Panel):
    def __init__(self):
        self.drawn = []
        self.size, self.other = ipywidgets.IntSlider(4, 0, 9), ipywidgets.IntSlider(0, 0, 9)
        self.reset = self.button("reset", self.to_zero)
        super().__init__(ipywidgets.HBox([self.size, ipywidgets.Label("doubled")]), self.other, self.reset)

    def to_zero(self):
        self.size.value = self.other.value = 0

    def view(self):
        size = self.size.value
        if size == 7:
            raise MemlabError("7 is <too> much")
        if size == 8:
            raise ZeroDivisionError("8")
        return View(f"twice {size}\nis {2 * size}", size, lambda: self.draw(size))

    def draw(self, size):
        self.drawn.append(size)
        return Picture(figsize=(1 + size / 10, 1))


def test_a_picture_is_drawn_once():
    panel = Doubling()
    for size in (5, 4, 5):
        panel.size.value = size
    panel.other.value = 3
    assert panel.drawn == [4, 5]
    assert panel.text == repr(panel) == "twice 5\nis 10"


def test_several_changes_are_one():
    panel = Doubling()
    with panel.hold():
        panel.size.value = 1
        panel.size.value = 2
    assert panel.drawn == [4, 2]
    panel.reset.click()
    assert panel.drawn == [4, 2, 0]


def test_no_error_is_lost():
    panel = Doubling()
    panel.size.value = 7
    assert panel.text == "7 is <too> much"
    assert "7 is &lt;too&gt; much" in panel.words.value
    with pytest.raises(ZeroDivisionError):
        panel.size.value = 8
    assert panel.text == "This went wrong inside the explorer: ZeroDivisionError: 8"
    panel.size.value = 4
    assert panel.text == "twice 4\nis 8"


def test_a_page_without_a_kernel_has_picture_and_text():
    panel = Doubling()
    panel.size.value = 7  # what was wrong is in the text, what was last right in the picture
    shown, about = panel._repr_mimebundle_()
    assert shown["application/vnd.jupyter.widget-view+json"]["model_id"] == panel.box.model_id
    assert shown["image/png"].startswith(b"\x89PNG")
    assert shown["text/plain"] == panel.text == about["image/png"]["alt"]


def test_a_model_that_is_to_be_built_never_is():
    step = memlab.TrainingStep(
        lambda: nn.Sequential(*[nn.Sequential(nn.Linear(2**15, 2**15), nn.Tanh()) for _ in range(4)]),
        lambda: torch.randn(2**15, 2**15),
        lambda model, x: model(x).sum(),
        torch.optim.SGD,
    )
    panel = memlab.explore_checkpointing(step)
    assert not step.is_built
    assert len(panel.toggles) == 4
    assert "GiB" in panel.text


def test_blocks_that_are_not_there():
    panel = memlab.explore_checkpointing(blocks=4)
    with pytest.raises(memlab.MemlabError, match="there is no block 9: this chain has 0 to 3"):
        panel.place([0, 9])
    with pytest.raises(memlab.MemlabError, match="blocks is 1: a chain has two blocks or more"):
        memlab.explore_checkpointing(blocks=1)
