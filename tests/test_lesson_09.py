"""Lesson 9: its solutions are right, and each wrong answer is told what is wrong with it.

The answers below are as people write them: each section of the solutions, the cells of the notebook as they stand, the
mistakes that the lesson knows, and slips that it does not know.
"""

import statistics
from pathlib import Path

import nbformat
import numpy as np
import pytest
import solve
import torch

from memlab import MemlabError
from memlab.course import check, quiz
from memlab.course.exercises import Exercise
from memlab.course.lessons.lesson_09 import EXERCISES, QUIZ

LESSON = Path(__file__).parent.parent / "notebooks/09_accuracy_and_memory.ipynb"
SECTIONS = solve.sections(solve.solutions_of(LESSON).read_text("utf-8"))
NUMBERS = {exercise.number: exercise for exercise in EXERCISES}
every_exercise = pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.number)


def outcome_of(source):
    """What the check in a cell says."""
    said = []
    exec(source, {"statistics": statistics, "check": lambda *answer: said.append(check(*answer))})
    (outcome,) = said
    return outcome


@every_exercise
def test_the_solution_is_right(exercise):
    assert outcome_of(SECTIONS[exercise.number]).state == "right"
    assert SECTIONS[exercise.number].startswith(f"# {exercise.head}\n")


def test_the_quiz_has_its_solution():
    said = []
    exec(SECTIONS["quiz"], {"quiz": lambda *answers: said.append(quiz(*answers))})
    assert said[0].right == len(QUIZ) == 3


@every_exercise
def test_the_cell_as_it_stands_is_not_attempted(exercise):
    cells = nbformat.read(LESSON, as_version=4).cells
    (cell,) = (cell for cell in cells if cell.source.startswith(f"# {exercise.head}\n"))
    assert outcome_of(cell.source).text == "not attempted yet"


@every_exercise
def test_each_mistake_gets_its_own_hint(exercise):
    assert len({mistake.hint for mistake in exercise.mistakes}) == len(exercise.mistakes) >= 3
    for mistake in exercise.mistakes:
        assert exercise.judge(mistake.answer).text == f"not yet. {mistake.hint}"


@every_exercise
def test_what_is_read_from_a_wrong_value_suits_the_mistakes_too(exercise):
    """Were a mistake not known, there would still be something to say."""
    unknown = Exercise(**{**vars(exercise), "mistakes": ()})
    for mistake in exercise.mistakes:
        assert "something else on the cases" not in unknown.judge(mistake.answer).text


def says(number, answer, words):
    outcome = NUMBERS[number].judge(answer)
    assert outcome.state == "wrong"
    assert words in outcome.text


# -- 9.1 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ("i g b a e f", "1 of the lines is missing"),
        ("i g b d a f e", "comes before"),
        ("i g d b a e f", "before there is a model"),
        ("i b d g a e f", "from where has it its weights"),
        ("g i b d a e f", "fixed before any of them"),
        ("i g b d a h e f", "With other batches two things differ"),
        ("i g b d a e c f", "may one choose it?"),
        ("i g b d d a e f", "is there twice"),
        ("e f", "5 of the lines are missing"),
    ],
)
def test_slips_in_the_order(order, words):
    says("9.1", order, words)


def test_orders_are_read_as_they_are_written():
    assert check("9.1", ["i", "g", "b", "d", "a", "e", "f"]).state == "right"
    assert check("9.1", "I, G, B, D, A, E, F").state == "right"
    with pytest.raises(MemlabError, match="no line has the letter 'x'"):
        check("9.1", "i g x")


# -- 9.2 ---------------------------------------------------------------------------------------------------------------


def error(differences):
    return statistics.stdev(differences) / len(differences) ** 0.5


def paired(mean, error):
    def answer(one, other):
        differences = [b - a for a, b in zip(one, other, strict=True)]
        return mean(differences), error(differences)

    return answer


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (paired(sum, error), "is it the sum?"),
        (paired(lambda d: -statistics.mean(d), error), "has the other sign"),
        (paired(max, error), "The mean is off"),
        (paired(lambda d: abs(statistics.mean(d)), error), "without its sign"),
        (
            lambda one, other: (statistics.mean(other) - statistics.mean(one), error(other)),
            "that of the second alone",
        ),
        (paired(lambda d: sum(d) / (len(d) - 1), error), "The mean is off"),
        (paired(statistics.mean, lambda d: statistics.stdev(d) * len(d) ** 0.5), "the error is not"),
        (paired(statistics.mean, lambda d: max(d) - min(d)), "the error is not"),
        (lambda one, other: statistics.mean(other), "number"),
    ],
)
def test_slips_in_the_standard_error(answer, words):
    if words == "number":
        with pytest.raises(TypeError):  # as Python says it: one number is not two
            check("9.2", answer)
    else:
        says("9.2", answer, words)


def test_a_standard_error_by_another_road_is_right():
    def by_numpy(one, other):
        differences = np.subtract(other, one)
        return differences.mean(), differences.std(ddof=1) / np.sqrt(len(differences))

    def by_torch(one, other):
        differences = torch.tensor(other).double() - torch.tensor(one).double()
        return differences.mean(), differences.std() / len(differences) ** 0.5

    assert check("9.2", by_numpy).state == check("9.2", by_torch).state == "right"


# -- 9.3 ---------------------------------------------------------------------------------------------------------------


def stdev_of_differences(one, other):
    return statistics.stdev([b - a for a, b in zip(one, other, strict=True)])


def error_of_differences(one, other):
    return stdev_of_differences(one, other) / len(one) ** 0.5


def by_errors(border, unit, worse="worse", where_0=None, none="no difference seen"):
    def verdict(one, other):
        mean, error = statistics.mean(other) - statistics.mean(one), unit(one, other)
        if where_0 and error == 0:
            return where_0
        return "better" if mean > border * error else worse if mean < -border * error else none

    return verdict


def verdict(far):
    return lambda one, other: "better" if far(one, other) > 0 else "worse" if far(one, other) < 0 else "equal"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (verdict(lambda one, other: sum(other) - sum(one)), "'equal': the three answers are in the task"),
        (lambda one, other: "better", "in each case"),
        (lambda one, other: "no difference seen", "in each case"),
        (lambda one, other: True, "the three answers are in the task"),
        (by_errors(1, stdev_of_differences), "the mean of n of them is surer than one"),  # two slips at once
        (by_errors(2, error_of_differences, worse="no difference seen"), "how many standard errors"),
        (by_errors(3, error_of_differences, where_0="no difference seen"), "Are they all 0 then?"),
        (by_errors(3, error_of_differences, none="worse"), "What is not better is worse"),
        (
            lambda one, other: (
                "better" if min(b - a for a, b in zip(one, other, strict=True)) > 0 else "no difference seen"
            ),
            "difference",
        ),
        (
            lambda one, other: (
                "worse" if min(other) > max(one) else "better" if max(other) < min(one) else "no difference seen"
            ),
            "difference",
        ),
    ],
)
def test_slips_in_the_verdict(answer, words):
    says("9.3", answer, words)


def test_a_verdict_by_another_road_is_right():
    def by_numpy(one, other):
        differences = np.subtract(other, one)
        low, high = differences.mean() + np.array([-3, 3]) * differences.std(ddof=1) / np.sqrt(len(differences))
        return "Better" if low > 0 else "Worse" if high < 0 else "No difference seen"

    assert check("9.3", by_numpy).state == "right"


# -- 9.4 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda s, b, m, k, r: (s * b // (m * k), s), "does each take as long?"),
        (lambda s, b, m, k, r: (s * b // (m * k), int(s * (1 - r))), "at equal samples are right"),
        (lambda s, b, m, k, r: (s // k, int(s / r)), "by the micro-batches alone"),
        (lambda s, b, m, k, r: (s * b // k, int(s / r)), "at equal time are right"),
        (lambda s, b, m, k, r: (s * b // m, int(s * r)), "You count micro-batches"),  # two slips at once
        (lambda s, b, m, k, r: (s * b // (m * k) + 7, s), "does each take as long?"),
        (lambda s, b, m, k, r: (s * b // (m * k), s / r / k), "counts the micro-batches again"),
        (lambda s, b, m, k, r: (s * b // m // k + 1, int(s / r)), "one more than fits"),
        (lambda s, b, m, k, r: (s + b, s - 3), "How much of each is one step of yours?"),
        (lambda s, b, m, k, r: (s * b // (m * k), int(s / r), 0), "Two numbers are asked for"),
    ],
)
def test_slips_in_the_steps(answer, words):
    says("9.4", answer, words)


def test_steps_by_another_road_are_right():
    assert check("9.4", lambda s, b, m, k, r: [s * b / (m * k) // 1, s / r // 1]).state == "right"


# -- 9.5 ---------------------------------------------------------------------------------------------------------------


def round_in_a_circle(peak, limit, most):
    fits, over = 0, most
    while fits < over:
        middle = (fits + over) // 2
        fits, over = (middle, over) if peak(middle) <= limit else (fits, middle)
    return fits


def stays_at_the_first(peak, limit, most):
    size = 1
    while peak(1) <= limit:
        size += 1
    return size


def with_a_dict(peak, limit, most):
    return max([n for n in range(1, most + 1) if peak(n) <= limit], default=0)


def nothing_where_none_fits(peak, limit, most):
    fits, over = 0, most + 1
    while over - fits > 1:
        middle = (fits + over) // 2
        fits, over = (middle, over) if peak(middle) <= limit else (fits, middle)
    return fits or None


def asks_beyond(peak, limit, most):
    fits, over = 0, 1024
    while over - fits > 1:
        middle = (fits + over) // 2
        fits, over = (middle, over) if peak(middle) <= limit else (fits, middle)
    return min(fits, most)


def by_straight_line(peak, limit, most):
    first, second = peak(1), peak(2)
    return max(0, min(most, 1 + (limit - first) // max(second - first, 1)))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (with_a_dict, "too many calls"),
        (round_in_a_circle, "measures for ever"),
        (stays_at_the_first, "measures for ever"),
        (nothing_where_none_fits, "gives nothing"),
        (asks_beyond, "outside 1 to `most`"),
        (by_straight_line, "stays the same for seven sizes"),
        (lambda peak, limit, most: most, "somewhere in the middle"),
        (lambda peak, limit, most: max(nothing_where_none_fits(peak, limit, most) or 0, 0) - 1, "one too small"),
        (lambda peak, limit, most: peak(1), "somewhere in the middle"),
    ],
)
def test_slips_in_the_search(answer, words):
    says("9.5", answer, words)


def test_a_search_by_another_road_is_right():
    import bisect

    def by_bisect(peak, limit, most):
        return bisect.bisect_right(range(1, most + 1), limit, key=peak)

    assert check("9.5", by_bisect).state == "right"
