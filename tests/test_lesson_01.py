"""Lesson 01: right solutions, a hint of its own for each mistake, a fitting one for other slips, numbers that hold."""

import functools
import importlib
import itertools
import re

import pytest
import torch
from lessons import LESSONS

from memlab import MemlabError, simulate, zoo
from memlab.course import check
from memlab.course.lessons import lesson_01
from memlab.units import MiB

LESSON = next(lesson for lesson in LESSONS if lesson.number == 1)
STATIC, ORDER, GROWTH, CROSSING = lesson_01.EXERCISES


def said(exercise, answer):
    outcome = exercise.judge(answer)
    assert outcome.state == "wrong"
    return outcome.text.removeprefix("not yet. ")


def run_cell(source):
    """The outcome of an exercise's cell."""
    outcomes = []
    exec(source, {"check": lambda *answer: outcomes.append(check(*answer))})
    return outcomes[-1]


# -- solutions, stubs, mistakes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [exercise.number for exercise in lesson_01.EXERCISES])
def test_the_solution_is_right(number):
    assert run_cell(LESSON.solutions[number]).state == "right"


@pytest.mark.parametrize("number", [exercise.number for exercise in lesson_01.EXERCISES])
def test_the_stub_is_not_attempted(number):
    assert repr(run_cell(LESSON.asking[number].source)) == f"{number}: not attempted yet"


@pytest.mark.parametrize(
    ("exercise", "place"),
    [(exercise, place) for exercise in lesson_01.EXERCISES for place in range(len(exercise.mistakes))],
    ids=lambda value: getattr(value, "number", value),
)
def test_each_mistake_gets_its_own_hint(exercise, place):
    assert said(exercise, exercise.mistakes[place].answer) == exercise.mistakes[place].hint


@pytest.mark.parametrize("exercise", [STATIC, GROWTH, CROSSING], ids=lambda exercise: exercise.number)
def test_what_a_learner_raises_passes(exercise):
    def raises(*arguments):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        exercise.judge(raises)


def test_importing_the_lesson_draws_no_random_number():
    """Or a notebook's numbers would depend on whether an exercise was tried."""
    before = torch.get_rng_state()
    importlib.reload(lesson_01)
    assert torch.equal(torch.get_rng_state(), before)


# -- 1.1 ---------------------------------------------------------------------------------------------------------------


def static(sgd, momentum, adamw):
    each = {"SGD": sgd, "SGD with momentum": momentum, "AdamW": adamw}
    return lambda parameters, optimizer: each[optimizer] * sum(p.numel() for p in parameters)


@pytest.mark.parametrize(
    ("each", "hint"),
    [
        ((8, 8, 16), "right for SGD and AdamW, and not for SGD with momentum"),
        ((8, 12, 20), "right for SGD and SGD with momentum, and not for AdamW"),
        ((8, 16, 16), "right for SGD and AdamW, and not for SGD with momentum"),
        ((4, 12, 16), "right for SGD with momentum and AdamW, and not for SGD"),
        ((16, 24, 32), "2 times the bytes"),
        ((64, 96, 128), "8 times the bytes"),
        ((4, 5, 6), "too small"),
        ((12, 16, 20), "Take plain SGD first"),
    ],
    ids=str,
)
def test_a_slip_in_the_static_part_gets_a_fitting_hint(each, hint):
    assert hint in said(STATIC, static(*each))


def test_megabytes_and_tensors_counted_instead_of_numbers():
    assert "9.54e-07 times the bytes" in said(STATIC, static(8 / MiB, 12 / MiB, 16 / MiB))

    def tensors(parameters, optimizer):
        return {"SGD": 8, "SGD with momentum": 12, "AdamW": 16}[optimizer] * len(parameters)

    assert "too small" in said(STATIC, tensors)


# -- 1.2 ---------------------------------------------------------------------------------------------------------------


def orders():
    return [" ".join(letters) for letters in itertools.permutations("abcd")]


def by_reasoning(order):
    """Whether an order is right, without running it: forward, backward and step in this order, and gradients dropped
    between step and forward."""
    round_after_round = (order + " " + order).split()
    a, b, c, d = (order.split().index(letter) for letter in "abcd")
    between = round_after_round[d : d + round_after_round[d:].index("c")]
    return c < a < d and "b" in between and not c < b < d


@pytest.mark.parametrize("order", orders())
def test_an_order_is_right_by_what_it_does(order):
    assert (ORDER.judge(order).state == "right") == by_reasoning(order)


def test_exactly_two_orders_are_right():
    assert [order for order in orders() if by_reasoning(order)] == ["b c a d", "c a d b"]


@pytest.mark.parametrize(
    ("order", "hint"),
    [
        ("c b d a", "parameters are as they were: what does the optimizer find in `.grad`? And 620 bytes of gradients"),
        ("d c b a", "It trains, but not as 3 rounds should: in which round is each gradient used? And 620 bytes"),
        ("b d c a", "The parameters stay as they were"),
        ("d c a b", "The parameters stay as they were"),
        ("a b c d", "your backward comes before there is a loss"),
        ("d a b c", "your backward comes before there is a loss"),
    ],
)
def test_a_wrong_order_gets_a_fitting_hint(order, hint):
    assert hint in said(ORDER, order)


@pytest.mark.parametrize("order", ["a b c", "c a d b b", "1 2 3 4", "forward backward step zero"])
def test_what_is_no_order_is_refused_with_an_example(order):
    with pytest.raises(MemlabError, match="write each of the letters a, b, c and d once, such as 'a b c d'"):
        ORDER.judge(order)


def test_letters_may_be_written_in_any_way():
    assert ORDER.judge("C,A,D,B").state == ORDER.judge("cadb").state == "right"


# -- 1.3 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grow", "hint"),
    [
        (
            lambda b, d, w, c: (d * w**3, b * d * w * c),
            "Where width becomes 3 times as large, your parameters become 27",
        ),
        (lambda b, d, w, c: (d**2 * w**2, b * d * w * c), "Where depth becomes 3 times as large, your parameters"),
        (lambda b, d, w, c: (d * w**2, d * w * c), "Where batch becomes 3 times as large, your activations become 1 "),
        (lambda b, d, w, c: (d * w**2, b * d * c), "Where width becomes 3 times as large, your activations become 1 "),
        (lambda b, d, w, c: (d * w**2, b * d * w), "Where context becomes 3 times as large, your activations become 1"),
        (lambda b, d, w, c: (d * w**2, b * d**2 * w * c), "Where depth becomes 3 times as large, your activations"),
        (lambda b, d, w, c: (d + w**2, b * d * w * c), "your parameters become 2 times as many"),
    ],
)
def test_a_slip_in_growth_gets_a_fitting_hint(grow, hint):
    assert hint in said(GROWTH, grow)


def test_one_number_is_told_that_two_are_asked_for():
    assert said(GROWTH, lambda b, d, w, c: b * d * w * c) == "It gives a number where a list is asked for."


# -- 1.4 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", range(3))
def test_the_line_is_exact(place):
    _, _, saved = lesson_01._models()[place]
    make, _ = lesson_01._MODELS[place]
    assert all(simulate(make(batch), device="cpu").saved_bytes == saved(batch) for batch in (3, 8))


@pytest.mark.parametrize("place", range(3))
def test_the_right_batch_size_is_where_simulations_cross(place):
    make, kept = lesson_01._MODELS[place]
    batch = CROSSING.truth()[place]
    before, there = (simulate(make(n), device="cpu") for n in (batch - 1, batch))
    parameters = there.by_category("forward")["parameters"]
    assert before.saved_bytes <= (2 + kept) * parameters < there.saved_bytes


def looped(numbers, kept, saved):
    return next(batch for batch in itertools.count(1) if saved(batch) > 4 * numbers * (2 + kept))


def test_a_loop_is_as_right_as_a_division():
    assert CROSSING.judge(looped).state == "right"


def crossing(static, rounded=lambda batch: int(batch) + 1):
    def answer(numbers, kept, saved):
        each = saved(2) - saved(1)
        return rounded((static(numbers, kept) - saved(1) + each) / each)

    return answer


def full(numbers, kept):
    return 4 * numbers * (2 + kept)


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (crossing(full, rounded=float), "A batch holds whole samples"),
        (crossing(lambda numbers, kept: 4 * numbers * (2 + kept) / MiB), "one sample at least"),
        (crossing(lambda numbers, kept: 8 * numbers * (2 + kept)), "% of the static part"),
        (crossing(lambda numbers, kept: 4 * numbers * (3 + kept)), "% of the static part"),
        (crossing(lambda numbers, kept: 4 * numbers * kept), "one sample at least"),
        (lambda numbers, kept, saved: full(numbers, kept) // (saved(2) - saved(1)), "at any batch size"),
        (lambda numbers, kept, saved: 7, "% of the static part"),
    ],
    ids=range(7),
)
def test_a_slip_in_the_crossing_gets_a_fitting_hint(answer, hint):
    assert hint in said(CROSSING, answer)


# -- what the lesson says ----------------------------------------------------------------------------------------------


@functools.cache
def gpt(batch=10, **more):
    adamw = functools.partial(torch.optim.AdamW, foreach=True)
    return simulate(zoo.gpt_step(batch=batch, width=256, optimizer=adamw), device="cpu", **more)


def test_the_numbers_of_its_question_add_up():
    parameters, peak = gpt().by_category()["parameters"], gpt().tensor_peak_bytes
    asked = re.search(r"\*\*(\d+) MiB of parameters, (\d+) MiB to train them: where are the other (\d+)\?", LESSON.text)
    shown = [round(nbytes / MiB) for nbytes in (parameters, peak, peak - parameters)]
    assert [int(number) for number in asked.groups()] == shown
    assert shown[0] + shown[2] == shown[1]


def test_the_numbers_of_its_last_question_are_those_of_the_network():
    trace = simulate(zoo.resnet_step(batch=16, width=160), device="cpu")
    parameters, peak = trace.by_category()["parameters"] / MiB, trace.tensor_peak_bytes / MiB
    assert f"It has {parameters:.2f} MiB of parameters, and its peak of {peak:.1f} MiB" in LESSON.text
    assert trace.peak.phase == "backward"


def test_the_first_step_peaks_lower_by_the_optimizer_state():
    lower = gpt().tensor_peak_bytes - gpt(steady=False).tensor_peak_bytes
    assert lower == gpt().by_category()["optimizer state"]


def test_activations_overtake_at_about_three_widths_of_tokens():
    static = 4 * gpt().by_category()["parameters"]
    assert gpt(batch=6).saved_bytes < static < gpt(batch=7).saved_bytes
