"""Three questions at the end of a lesson, with a word on each answer that one may give.

    answers = "no answer"  # @param {type: "string"}
    quiz(2, answers)

Written as letters, one for each question: "b a c". Unanswered, the questions are shown and nothing else.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from ..errors import MemlabError
from .exercises import lesson_module

NO_ANSWER = "no answer"
_WIDE = 100


@dataclass(frozen=True)
class Option:
    """One answer to choose, whether it is right, and what is said when it is chosen."""

    text: str
    feedback: str
    right: bool = False


@dataclass(frozen=True)
class Question:
    text: str
    options: tuple[Option, ...]


@dataclass(frozen=True, repr=False)
class Quiz:
    """The questions, and the letters that were chosen (none where nothing was answered)."""

    questions: tuple[Question, ...]
    chosen: tuple[int, ...] = ()

    @property
    def right(self) -> int:
        """How many answers are right."""
        return sum(
            question.options[chosen].right for question, chosen in zip(self.questions, self.chosen, strict=False)
        )

    def __repr__(self) -> str:
        lines = []
        for number, question in enumerate(self.questions):
            lines += _wrapped(f"{number + 1}. ", question.text)
            for place, option in enumerate(question.options):
                lines += _wrapped(f"   {_letter(place)}  ", option.text)
            if self.chosen:
                option = question.options[self.chosen[number]]
                verdict = "right" if option.right else "not right"
                lines += _wrapped("   -> ", f"{_letter(self.chosen[number])} is {verdict}: {option.feedback}")
            lines.append("")
        lines.append(f"{self.right} of {len(self.questions)} right" if self.chosen else "not answered yet")
        return "\n".join(lines)


def quiz(lesson: int, answers: object = NO_ANSWER) -> Quiz:
    """The lesson's questions, and what there is to say to the answers.

    `answers` are letters, one for each question, such as "b a c". Raises MemlabError for others.
    """
    questions: tuple[Question, ...] = lesson_module(str(lesson)).QUIZ
    text = "" if answers is None else str(answers).strip().lower()  # a list of letters will do, too
    if text in ("", NO_ANSWER):
        return Quiz(questions)
    letters = [letter for letter in text if letter.isalpha()]
    chosen = tuple(ord(letter) - ord("a") for letter in letters)
    if len(chosen) != len(questions) or any(
        place >= len(question.options) for place, question in zip(chosen, questions, strict=False)
    ):
        raise MemlabError(f"{answers!r}: write a letter for each of the {len(questions)} questions, such as 'b a c'")
    return Quiz(questions, chosen)


def _letter(place: int) -> str:
    return chr(ord("a") + place)


def _wrapped(head: str, text: str) -> list[str]:
    return textwrap.wrap(text, _WIDE, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False)
