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
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
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
        result = self.run(answer)
        if result is None or result is ...:
            return Outcome(self.number, "not attempted", "not attempted yet: your function returns nothing")
        truth = self.truth()
        if same(result, truth):
            return Outcome(self.number, "right", "right")
        for mistake in self.mistakes:
            if same(result, self.run(mistake.answer)):
                return Outcome(self.number, "wrong", f"not yet. {mistake.hint}")
        hint = self.diagnose(result, truth)
        return Outcome(
            self.number, "wrong", f"not yet. {hint or 'It gives something else on the cases of this check.'}"
        )


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
    try:
        return importlib.import_module(f"{__package__}.lessons.lesson_{int(lesson):02}")
    except ModuleNotFoundError:
        raise MemlabError(f"lesson {lesson} has no exercises") from None


def is_untouched(answer: Answer) -> bool:
    """Whether an answer still has the `...` in it that stands where the learner is to write."""
    if isinstance(answer, str):
        return not answer.strip(" .")
    if isinstance(answer, type):
        return any(is_untouched(method) for method in vars(answer).values() if isinstance(method, FunctionType))
    if isinstance(answer, FunctionType):
        return ... in answer.__code__.co_consts
    return answer is None or answer is ...


def same(one: Result, other: Result) -> bool:
    """Equal results: whole numbers, text and sets exactly, floating-point numbers and tensors up to rounding."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.allclose(one.double(), other.double(), rtol=1e-5, atol=1e-8)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, float) or isinstance(other, float):
        numbers = isinstance(one, int | float) and isinstance(other, int | float)
        return numbers and math.isclose(one, other, rel_tol=1e-6)
    return bool(type(one) is type(other) and one == other)
