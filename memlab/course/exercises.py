"""Exercises that check themselves: in the learner's cell, on cases that the learner has not seen.

    def saved_bytes(loss_fn, model, batch):
        ...

    check("2.3", saved_bytes)

says one of: right; not attempted yet; or a hint that is chosen from the wrong value.

Rule 1. The truth comes from elsewhere than from an answer: memlab's instruments, PyTorch's own gradients, a formula.
Rule 2. A mistake is a wrong answer of the same form, written down. It is run as the learner's answer is, and where both
        give the same, the learner gets the mistake's hint. So hints are tested by giving each mistake as an answer.
Rule 3. No text says what the right answer is. The solutions are in `notebooks/solutions/`.
Rule 4. The learner's own errors pass untouched.
Rule 5. Checking changes nothing: every answer meets the same random numbers, and the learner's stream goes on as if
        nothing had been drawn.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import math
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Literal, TypeAlias

import torch

from ..errors import MemlabError

Answer: TypeAlias = Any  # what the learner gives: a number, a set, text, a function, a class
Result: TypeAlias = Any  # what it gives on the cases: any nest of numbers, text, sets and tensors
State: TypeAlias = Literal["right", "wrong", "not attempted"]


@dataclass(frozen=True)
class Mistake:
    """A wrong answer that people give, and what to say to it: a question or a fact that leads on."""

    answer: Answer
    hint: str


@dataclass(frozen=True)
class Exercise:
    """A task.

    number:     "2.3": of lesson 2, the third
    kind:       "fill" a line, "order" the lines, "write" it
    task:       one sentence
    difficulty: 1 to 3 stars
    minutes:    how long it takes someone who has followed so far
    objective:  the lesson's objective that it tests, word for word
    run:        an answer to its result on cases that the learner has not seen
    truth:      the right result, from an independent source
    mistakes:   the usual wrong answers, the most specific first
    diagnose:   a hint from the learner's result and the truth, where no mistake gives the same (None: no idea)
    """

    number: str
    kind: Literal["fill", "order", "write"]
    task: str
    difficulty: int
    minutes: int
    objective: str
    run: Callable[[Answer], Result]
    truth: Callable[[], Result]
    mistakes: tuple[Mistake, ...] = ()
    diagnose: Callable[[Result, Result], str | None] = lambda result, truth: None

    @property
    def head(self) -> str:
        """The first line of the exercise's cell: `Exercise 2.3 · write · ** · 8 min`."""
        return f"Exercise {self.number} · {self.kind} · {'*' * self.difficulty} · {self.minutes} min"

    def judge(self, answer: Answer) -> Outcome:
        if is_untouched(answer):
            return Outcome(self.number, "not attempted", "not attempted yet")
        result = _alike(self.run, answer)
        if _is_nothing(result):
            return Outcome(self.number, "not attempted", "not attempted yet: your function returns nothing")
        truth = _alike(self.truth)
        if same(result, truth):
            return Outcome(self.number, "right", "right")
        return Outcome(self.number, "wrong", f"not yet. {self._hint(result, truth)}")

    def _hint(self, result: Result, truth: Result) -> str:
        """What to say to a wrong result: the hint of the mistake that gives the same, or what can be read from it."""
        for mistake in self.mistakes:
            if same(result, _alike(self.run, mistake.answer)):
                return mistake.hint
        kinds = _other_kind(result, truth)
        try:
            hint = self.diagnose(result, truth)
        except Exception:
            if not kinds:
                raise
            hint = None  # it reads results of the truth's kind
        return hint or kinds or "It gives something else on the cases of this check."


@dataclass(frozen=True, repr=False)
class Outcome:
    """What `check` says; as a cell's last value it shows as its text."""

    number: str
    state: State
    text: str

    def __repr__(self) -> str:
        return f"{self.number}: {self.text}"


def check(number: str, answer: Answer = ...) -> Outcome:
    """Check the answer to an exercise.

    Raises MemlabError for a number that no lesson has; what the answer itself raises passes untouched.
    """
    return exercise(number).judge(answer)


def exercise(number: str) -> Exercise:
    """The exercise of that number, such as "2.3"."""
    lesson = number.partition(".")[0]
    exercises: tuple[Exercise, ...] = lesson_module(lesson).EXERCISES if lesson.isdecimal() else ()
    for found in exercises:
        if found.number == number:
            return found
    known = ", ".join(found.number for found in exercises) or "numbers such as 2.3"
    raise MemlabError(f"there is no exercise {number!r}: there are {known}")


def lesson_module(lesson: str) -> Any:
    """The module with a lesson's exercises and quiz."""
    name = f"{__package__}.lessons.lesson_{int(lesson):02}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise MemlabError(f"lesson {lesson} has no exercises") from None


def is_untouched(answer: Answer) -> bool:
    """Whether an answer still has the `...` in it that stands where the learner is to write."""
    if isinstance(answer, str):
        return not answer.strip(" .")
    if isinstance(answer, list | tuple):
        return any(part is ... for part in answer)
    if isinstance(answer, type):
        methods = (getattr(method, "__func__", method) for method in vars(answer).values())
        return any(is_untouched(method) for method in methods if isinstance(method, FunctionType))
    if isinstance(answer, FunctionType):
        return _has_a_gap(answer)
    return answer is None or answer is ...


def _has_a_gap(function: FunctionType) -> bool:
    """Whether a function has a `...` of its own; one in an index, as in `x[..., 0]`, is not a gap."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):  # made by `exec`, or a lambda within a longer expression
        return ... in function.__code__.co_consts
    indices = (node.slice for node in ast.walk(tree) if isinstance(node, ast.Subscript))
    indexed = {id(node) for index in indices for node in ast.walk(index)}
    return any(
        isinstance(node, ast.Constant) and node.value is ... and id(node) not in indexed for node in ast.walk(tree)
    )


def letters_of(order: Any, known: Iterable[str], what: str, example: str) -> list[str]:
    """The letters of an order, given as text or as a list. Raises MemlabError for one that names nothing in `known`."""
    letters, known = [letter for letter in "".join(order).lower() if letter.isalpha()], sorted(known)
    for letter in letters:
        if letter not in known:
            raise MemlabError(
                f"no {what} has the letter {letter!r}: write letters from a to {known[-1]}, such as {example!r}"
            )
    return letters


def same(one: Result, other: Result) -> bool:
    """Equal results: whole numbers, text and sets exactly, floating-point numbers and tensors up to rounding."""
    one, other = _plain(one, other), _plain(other, one)
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.allclose(_exact(one), _exact(other), rtol=1e-5, atol=1e-8)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, float) or isinstance(other, float):
        numbers = isinstance(one, int | float) and isinstance(other, int | float)
        return numbers and math.isclose(one, other, rel_tol=1e-6)
    return _kind(one) == _kind(other) and bool(one == other)


def _alike(function: Callable[..., Result], *arguments: Any) -> Result:
    """What a function gives when it meets the random numbers that every answer meets (Rule 5)."""
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        torch.manual_seed(0)
        return function(*arguments)


def _is_nothing(result: Result) -> bool:
    """Whether nothing came back, on any of the cases."""
    if isinstance(result, list | tuple):
        return bool(result) and all(map(_is_nothing, result))
    return result is None or result is ...


def _plain(value: Result, beside: Result) -> Result:
    """A tensor or array of one number as that number, unless it is compared with a tensor."""
    if not isinstance(beside, torch.Tensor) and getattr(value, "ndim", None) == 0:
        return value.item()
    return value


def _exact(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().double()


_KINDS: tuple[tuple[Any, str], ...] = (
    (bool, "True or False"),
    ((int, float), "a number"),
    (str, "text"),
    ((set, frozenset), "a set"),
    (dict, "a dict"),
    ((list, tuple), "a list"),
    (torch.Tensor, "a tensor"),
    (type(None), "nothing"),
)


def _kind(value: Result) -> str:
    """What a result is, in the words of a learner."""
    return next((words for types, words in _KINDS if isinstance(value, types)), type(value).__name__)


def _other_kind(result: Result, truth: Result) -> str | None:
    """What to say to a result that is of another kind than the truth, or has a part that is."""
    given, asked = _kind(_plain(result, truth)), _kind(truth)
    if given != asked:
        return f"It gives {given} where {asked} is asked for."
    if isinstance(truth, dict) and result.keys() == truth.keys():
        result, truth = [result[key] for key in truth], [*truth.values()]
    if isinstance(truth, list | tuple) and len(result) == len(truth):
        return next(filter(None, map(_other_kind, result, truth)), None)
    return None
