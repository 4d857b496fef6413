"""Exercises: what `check` says to an answer, and what each lesson's exercises have ready for wrong ones.

That the solutions are right is held by the solved notebooks, in which each check says so (`test_solutions.py`).
"""

import re
import sys
import types

import numpy as np
import pytest
import torch
from lessons import every_exercise

from memlab import MemlabError
from memlab.course import Exercise, Mistake, check
from memlab.course.exercises import is_untouched, same

# -- a lesson made up for these tests ----------------------------------------------------------------------------------

CASES = (torch.arange(6.0).reshape(2, 3), torch.ones(4, dtype=torch.float64))


def total_bytes(tensors):
    return sum(tensor.nbytes for tensor in tensors)


def forgets_the_last(tensors):
    return total_bytes(tensors[:-1])


def explain(result, truth):
    return "Is a smaller unit meant?" if result * 8 == truth or result == 8 * truth else None


BYTES = Exercise(
    number="99.1",
    kind="write",
    task="Return the bytes of the tensors.",
    difficulty=2,
    minutes=3,
    objective="count bytes",
    run=lambda answer: answer(CASES),
    truth=lambda: 6 * 4 + 4 * 8,
    mistakes=(
        Mistake(lambda tensors: sum(tensor.numel() for tensor in tensors), "How many bytes has an element?"),
        Mistake(forgets_the_last, "Which tensor is not in your sum?"),
    ),
    diagnose=explain,
)
DRAW = Exercise(
    number="99.2",
    kind="fill",
    task="Return the mean of what you draw.",
    difficulty=1,
    minutes=1,
    objective="draw",
    run=lambda answer: [answer(torch.rand(4)) for _ in range(2)],
    truth=lambda: [torch.rand(4).mean().item() for _ in range(2)],
)


@pytest.fixture(autouse=True)
def lesson_99(monkeypatch):
    module = types.ModuleType("memlab.course.lessons.lesson_99")
    module.EXERCISES = (BYTES, DRAW)
    monkeypatch.setitem(sys.modules, module.__name__, module)


def said(answer):
    outcome = check("99.1", answer)
    assert repr(outcome) == f"99.1: {outcome.text}"
    return outcome.state, outcome.text


def test_a_right_answer_is_right_however_it_is_computed():
    assert said(total_bytes) == ("right", "right")
    assert said(lambda tensors: float(total_bytes(tensors))) == ("right", "right")
    assert said(lambda tensors: torch.tensor(total_bytes(tensors))) == ("right", "right")
    assert said(lambda tensors: np.int64(total_bytes(tensors))) == ("right", "right")


def test_the_hint_is_that_of_the_mistake_that_gives_the_same():
    assert said(lambda tensors: 6 + 4) == ("wrong", "not yet. How many bytes has an element?")
    assert said(lambda tensors: tensors[0].nbytes) == ("wrong", "not yet. Which tensor is not in your sum?")


def test_where_no_mistake_gives_the_same_the_hint_is_read_from_the_result():
    assert said(lambda tensors: 7) == ("wrong", "not yet. Is a smaller unit meant?")
    assert said(lambda tensors: 11) == ("wrong", "not yet. It gives something else on the cases of this check.")


@pytest.mark.parametrize(
    ("given", "words"),
    [("56", "text"), ([24, 32], "a list"), ({56}, "a set"), (CASES[0], "a tensor"), (True, "True or False")],
    ids=str,
)
def test_a_result_of_another_kind_is_told_so(given, words):
    assert said(lambda tensors: given) == ("wrong", f"not yet. It gives {words} where a number is asked for.")


def test_what_a_learner_raises_passes_as_it_is():
    error = KeyError("mine")

    def raises(tensors):
        raise error

    with pytest.raises(KeyError) as caught:
        check("99.1", raises)
    assert caught.value is error


def test_the_answer_is_never_in_what_is_said():
    for answer in (forgets_the_last, lambda tensors: 11, lambda tensors: "?", lambda tensors: 7):
        assert "56" not in said(answer)[1]


# -- not attempted -----------------------------------------------------------------------------------------------------


def gap(tensors): ...


def gap_in_a_line(tensors):
    total = ...
    return total


def gap_within(tensors):
    def one(tensor):
        return ...

    return sum(map(one, tensors))


class Gap:
    def method(self): ...


class StaticGap:
    @staticmethod
    def method(): ...


@pytest.mark.parametrize(
    "answer",
    [..., None, "", "...", ". . .", [..., ...], gap, gap_in_a_line, gap_within, Gap, StaticGap, lambda tensors: ...],
    ids=lambda answer: getattr(answer, "__name__", str(answer)),
)
def test_what_is_as_it_was_is_not_attempted(answer):
    assert check("99.1", answer).state == "not attempted"
    assert repr(check("99.1", answer)) == "99.1: not attempted yet"


def test_no_answer_at_all_is_not_attempted():
    assert repr(check("99.1")) == "99.1: not attempted yet"


def test_a_stub_that_was_run_from_text_is_not_attempted():
    made = {}
    exec("def answer(tensors):\n    total = ...\n    return total", made)
    assert is_untouched(made["answer"])


@pytest.mark.parametrize("nothing", [None, [None, None], ...], ids=str)
def test_a_function_that_returns_nothing_is_told_so(nothing):
    assert repr(check("99.1", lambda tensors: nothing)) == "99.1: not attempted yet: your function returns nothing"


def test_dots_in_an_index_are_no_gap():
    def answer(tensors: tuple[torch.Tensor, ...]) -> int:
        first = 0
        return sum(tensor[..., first:].nbytes for tensor in tensors)

    assert not is_untouched(answer)
    assert said(answer) == ("right", "right")


# -- checking changes nothing ------------------------------------------------------------------------------------------


def test_each_answer_meets_the_same_random_numbers():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert check("99.2", lambda drawn: drawn.mean().item()).state == "right"
    assert check("99.2", lambda drawn: drawn.sum().item() / 4).state == "right"
    assert torch.equal(torch.get_rng_state(), before)


def test_the_random_stream_goes_on_after_an_error():
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError):
        check("99.2", lambda drawn: 1 / 0)
    assert torch.equal(torch.get_rng_state(), before)


# -- which exercises there are -----------------------------------------------------------------------------------------


def test_a_number_that_there_is_not_is_refused_with_those_that_there_are():
    with pytest.raises(MemlabError, match=r"there is no exercise '99\.7': there are 99\.1, 99\.2"):
        check("99.7", 1)
    with pytest.raises(MemlabError, match=r"there is no exercise 'seven': there are numbers such as 2\.3"):
        check("seven", 1)
    with pytest.raises(MemlabError, match="lesson 98 has no exercises"):
        check("98.1", 1)


def test_a_lesson_that_cannot_be_imported_says_what_is_missing(monkeypatch, tmp_path):
    (tmp_path / "lesson_97.py").write_text("import no_such_module")
    monkeypatch.setattr("memlab.course.lessons.__path__", [str(tmp_path)])
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        check("97.1", 1)


# -- what is the same --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (3, 3.0),
        (0.1 + 0.2, 0.3),
        pytest.param({"a", "b"}, frozenset("ab"), id="sets"),
        ([1, (2, 3)], (1, [2, 3])),
        ({"a": torch.ones(2)}, {"a": torch.ones(2, dtype=torch.float64)}),
        (torch.ones(2, requires_grad=True), torch.ones(2) + 1e-7),
        (torch.tensor(3), 3),
        (np.float64(0.5), 0.5),
        (np.bool_(True), True),
    ],
    ids=str,
)
def test_results_are_the_same_up_to_rounding_and_container(one, other):
    assert same(one, other)
    assert same(other, one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (40 * 2**20, 40 * 2**20 + 4),
        (1, True),
        (1, "1"),
        pytest.param({1, 2}, [1, 2], id="a set and a list"),
        ([1, 2], [1, 2, 3]),
        ({"a": 1}, {"b": 1}),
        (torch.ones(2), torch.ones(2, 1)),
        (torch.ones(2), torch.tensor([1.0, 1.001])),
        (torch.ones(1), 1),
        (None, 0),
        ("conv", "convolution"),
    ],
    ids=str,
)
def test_results_that_differ_are_not_the_same(one, other):
    assert not same(one, other)
    assert not same(other, one)


# -- every exercise of every lesson ------------------------------------------------------------------------------------


@every_exercise
def test_it_is_stated_in_full(lesson, exercise):
    assert re.fullmatch(rf"{lesson.number}\.[1-9]", exercise.number)
    assert exercise.kind in ("fill", "order", "write")
    assert 1 <= exercise.difficulty <= 3
    assert 1 <= exercise.minutes <= 15
    assert exercise.task.endswith((".", "?"))


@every_exercise
def test_its_truth_is_the_same_each_time(lesson, exercise):
    before = torch.get_rng_state()
    assert same(exercise.truth(), exercise.truth())
    torch.set_rng_state(before)


@every_exercise
def test_each_mistake_gets_its_own_hint(lesson, exercise):
    hints = [mistake.hint for mistake in exercise.mistakes]
    assert len(set(hints)) >= 3
    assert [exercise.judge(mistake.answer).text for mistake in exercise.mistakes] == [f"not yet. {h}" for h in hints]


@every_exercise
def test_no_hint_is_the_solution(lesson, exercise):
    """No hint has a line of the solution that the task does not have already."""
    cell = lesson.asking[exercise.number]
    given = exercise.task + cell.source + lesson.cells[lesson.cells.index(cell) - 1].source
    lines = {line.strip() for line in lesson.solutions[exercise.number].splitlines()}
    found = [line for line in lines if len(line) > 8 and line not in given and not line.startswith("#")]
    for mistake in exercise.mistakes:
        assert not [line for line in found if line in mistake.hint]
