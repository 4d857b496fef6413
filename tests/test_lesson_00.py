"""Lesson 00's exercises: what is right, and what is said to each wrong answer that is usual."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("nbformat", reason="the lesson is read with nbformat")

import nbformat

import memlab
from memlab import zoo
from memlab.course import check, quiz
from memlab.course.lessons import lesson_00
from memlab.units import MiB

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
NUMBERS = [exercise.number for exercise in lesson_00.EXERCISES]
EXERCISES = dict(zip(NUMBERS, lesson_00.EXERCISES, strict=True))
MISTAKES = [(exercise.number, place) for exercise in lesson_00.EXERCISES for place in range(len(exercise.mistakes))]


def sections():
    """The solutions, by what stands behind `# %%`."""
    _, *parts = re.split(r"^# %% (\S+)$", (NOTEBOOKS / "solutions/00_start_here.py").read_text("utf-8"), flags=re.M)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def outcome(source):
    """What the last line of a cell shows."""
    *lines, last = source.strip().splitlines()
    names = {"check": check, "quiz": quiz}
    exec("\n".join(lines), names)
    return eval(last, names)


# -- right, and not attempted ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", NUMBERS)
def test_the_solution_is_right(number):
    assert outcome(sections()[number]).text == "right"


def test_the_quiz_is_solved():
    assert outcome(sections()["quiz"]).right == 3


@pytest.mark.parametrize("number", NUMBERS)
def test_the_lessons_cell_is_not_attempted(number):
    cells = nbformat.read(NOTEBOOKS / "00_start_here.ipynb", as_version=4).cells
    (cell,) = (cell for cell in cells if cell.source.startswith(f"# Exercise {number} "))
    assert outcome(cell.source).text == "not attempted yet"


@pytest.mark.parametrize("number", ["0.1", "0.2", "0.4"])
def test_a_function_that_returns_nothing_is_not_attempted(number):
    assert check(number, lambda *given: None).state == "not attempted"


@pytest.mark.parametrize("number", ["0.1", "0.2", "0.4"])
def test_the_learners_own_error_passes(number):
    def answer(*given):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        check(number, answer)


def test_checks_leave_the_learners_random_numbers_alone():
    lesson_00._steps.cache_clear()
    lesson_00._plain.cache_clear()
    before = torch.get_rng_state()
    check("0.1", lambda highest, alive: ("backward", "activations"))
    check("0.4", lambda trace: "checkpoint")
    assert torch.equal(torch.get_rng_state(), before)


# -- the truth ---------------------------------------------------------------------------------------------------------


def test_what_is_better_is_what_measure_says():
    both = {"checkpoint": memlab.Checkpoint(), "optimizer in backward": memlab.OptimizerInBackward()}
    for make, better in zip(lesson_00._TO_CHOOSE_FOR, lesson_00._truly_better(), strict=True):
        peaks = {
            name: memlab.measure(lesson_00._made(make), way, allocator=False).tensor_peak_bytes
            for name, way in both.items()
        }
        worse = max(peaks, key=peaks.get)
        assert peaks[better] < 0.98 * peaks[worse], "no close call"


def test_orders_that_train_save_the_same_bytes():
    """As the task says, the peak alone differs."""
    for make in lesson_00._TRAINED_ON:
        loops = [lesson_00._run_lines(order, lesson_00._made(make)) for order in ("cbad", "dcba", "cdba")]
        assert len({loop.saved for loop in loops}) == 1
        assert loops[0].peak == loops[1].peak < loops[2].peak


# -- hints -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "place"), MISTAKES)
def test_each_mistake_gets_its_own_hint(number, place):
    mistake = EXERCISES[number].mistakes[place]
    assert check(number, mistake.answer).text == f"not yet. {mistake.hint}"


def largest(sizes):
    return max(sizes, key=sizes.get)


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (lambda highest, alive: (max(highest), largest(alive)), "`phase` is always the last name"),
        (lambda highest, alive: (largest(highest), max(alive)), "`largest` is always the last name"),
        (lambda highest, alive: ("backward", largest(alive)), "`phase` is 'backward' for every step"),
        (lambda highest, alive: (largest(highest), "activations"), "`largest` is 'activations' for every step"),
        (lambda highest, alive: (largest(highest), max(alive.values())), "`largest` is a number of bytes"),
        (lambda highest, alive: (max(highest.values()), largest(alive)), "`phase` is a number of bytes"),
        (lambda highest, alive: (largest(alive), largest(alive)), "`phase` is a name from the other dictionary"),
        (lambda highest, alive: (largest(highest), largest(highest)), "`largest` is a name from the other dictionary"),
        (lambda highest, alive: (largest(highest), alive), "`largest` is of the type dict"),
        (lambda highest, alive: (largest(highest), min(alive, key=alive.get)), "the fewest bytes"),
        (lambda highest, alive: (sorted(highest, key=highest.get)[1], largest(alive)), "`phase` is right for 0 of 4"),
        (lambda highest, alive: largest(highest), "Leave the last line as it was"),
    ],
    ids=range(12),
)
def test_hints_on_reading_a_step(answer, hint):
    assert hint in check("0.1", answer).text


def of(condition, key=lambda row: row.tensor_peak_bytes):
    return lambda comparison: min(filter(condition, comparison.rows), key=key)


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (of(lambda row: row.equivalent and row.flops_ratio <= 1.1), "its label is asked"),
        (lambda comparison: min(row.tensor_peak_bytes for row in comparison.rows), "You return a number"),
        (lambda comparison: [row.label for row in comparison.rows if row.equivalent], "one label is asked"),
        (lambda comparison: "Checkpoint", "'Checkpoint' is not the label of a row"),
        (lambda comparison: "optimizer in backward", "a row with a lower peak passes both conditions too"),
        (lambda comparison: "pure bf16", "what does its `equivalent` say?"),
        (lambda comparison: comparison.rows[0].label, "a row with a lower peak passes both conditions too"),
        (lambda comparison: comparison.rows[-1].label, "how much arithmetic"),
        (lambda comparison: of(lambda row: row.equivalent is not False)(comparison).label, "how much arithmetic"),
    ],
    ids=range(9),
)
def test_hints_on_reading_a_comparison(answer, hint):
    assert hint in check("0.2", answer).text


@pytest.mark.parametrize(
    ("order", "hint"),
    [
        ("c b a", "each of the letters a, b, c, d once"),
        ("c b a d d", "each of the letters a, b, c, d once"),
        ("1 2 3 4", "each of the letters a, b, c, d once"),
        ("c a d b", "after the optimizer has changed the parameters"),
        ("c d a b", "no gradient is there for it"),
        ("a c b d", "gone before the optimizer has used them"),
        ("d c a b", "gone before the optimizer has used them"),
        ("a b c d", "which no line has made yet"),
        ("a c d b", "follow one gradient"),
    ],
)
def test_hints_on_the_order_of_a_step(order, hint):
    assert hint in check("0.3", order).text


@pytest.mark.parametrize("order", ["cbad", "d, c, b, a", "C B A D", ["c", "b", "a", "d"]])
def test_an_order_may_be_written_in_many_ways(order):
    assert check("0.3", order).state == "right"


def alive(trace, name):
    return trace.by_category("tensor_peak").get(name, 0)


def chosen(checkpoint):
    return "checkpoint" if checkpoint else "optimizer in backward"


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (lambda trace: memlab.Checkpoint(), "as text"),
        (lambda trace: "Checkpoint", "not 'Checkpoint'"),
        (lambda trace: alive(trace, "activations") > alive(trace, "gradients"), "not True"),
        (lambda trace: largest(trace.by_category("tensor_peak")), "not 'activations'"),
        (lambda trace: chosen(alive(trace, "activations") > alive(trace, "parameters")), "on which of the two does it"),
        (lambda trace: chosen(alive(trace, "activations") > trace.tensor_peak_bytes / 2), "neither of the two acts on"),
        (lambda trace: chosen(trace.tensor_peak.phase == "forward"), "can it lower a peak where no gradient is alive?"),
        (lambda trace: chosen(trace.saved_bytes > trace.tensor_peak_bytes / 2), "neither of the two acts on"),
    ],
    ids=range(8),
)
def test_hints_on_choosing(answer, hint):
    assert hint in check("0.4", answer).text


@pytest.mark.parametrize(("letters", "right"), [("a a a", 0), ("b b b", 2), ("c c c", 1)])
def test_the_quiz_counts_what_is_right(letters, right):
    assert quiz(0, letters).right == right


def test_the_guesses_at_the_explorer_are_answered_with_what_it_shows():
    checkpoint, adamw = memlab.Checkpoint(), partial(torch.optim.AdamW, foreach=True)

    def peak(technique, batch=8):
        step = zoo.gpt_step(batch=batch, depth=6, optimizer=adamw)
        return memlab.simulate(step, technique, device="cpu").tensor_peak_bytes

    def left(batch):
        return 100 * peak(checkpoint, batch) / peak(memlab.Baseline(), batch)

    text = "\n".join(cell.source for cell in nbformat.read(NOTEBOOKS / "00_start_here.ipynb", as_version=4).cells)
    assert f"from {left(8):.0f} % to {left(32):.0f} %" in text
    seconds = (
        ("micro-batches", memlab.MicroBatch(count=4)),
        ("bf16 autocast", memlab.MixedPrecision("bf16")),
        ("the optimizer in backward", memlab.OptimizerInBackward()),
        ("pure bf16", memlab.LowPrecision("bf16")),
    )
    for name, second in seconds:
        assert f"{peak(checkpoint + second) / MiB:.1f} MiB with {name}" in text
