"""A guess written down before the run, and what the run says to it.

    peak = "no guess"  # @param {type: "string"}
    guess = predict("The peak with 4 micro-batches", peak, unit="MiB")
    ...
    guess.reveal(trace.tensor_peak_bytes, {plain / 4: "not all of it is divided: parameters are not."})

The learner writes into the first line: on Colab its comment makes it a field, elsewhere it is a line to edit. As it
stands it is "no guess", with which a notebook runs from top to bottom all the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..errors import MemlabError
from ..units import parse_bytes

NO_GUESS = "no guess"
_OF_BYTES = ("B", "KiB", "MiB", "GiB")

Value = float | str  # a number in the prediction's unit, or one of its options


@dataclass(frozen=True, repr=False)
class Prediction:
    """What was asked, and what was guessed: a number in `unit`, one of `options`, or None for no guess."""

    question: str
    guess: Value | None
    unit: str = ""
    options: tuple[str, ...] = ()

    def reveal(self, measured: Value, usual: Mapping[Value, str] | None = None) -> Answer:
        """The guess beside what was measured: a number (bytes, where the unit is one of bytes), or one of the options.

        `usual` has the reason why it is wrong for each wrong guess that is usual, both as if measured.
        """
        return Answer(
            self, self._value(measured), tuple((self._value(wrong), reason) for wrong, reason in (usual or {}).items())
        )

    def _value(self, measured: Value) -> Value:
        """What was measured, in the terms of the guess."""
        if not self.options:
            return float(measured) / (parse_bytes(f"1 {self.unit}") if self.unit in _OF_BYTES else 1)
        if measured not in self.options:
            raise MemlabError(f"{measured!r} is none of the options of {self.question!r}: {', '.join(self.options)}")
        return measured

    def shown(self, value: Value | None) -> str:
        """A guess or a measured value as text, with its unit."""
        if value is None or isinstance(value, str):
            return value or NO_GUESS
        number = f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"
        return f"{number} {self.unit}".rstrip()

    def __repr__(self) -> str:
        return f"{self.question}\n  your guess  {self.shown(self.guess)}"


@dataclass(frozen=True, repr=False)
class Answer:
    """A prediction and what was measured, in its terms; its text also says why `usual` wrong guesses are wrong."""

    prediction: Prediction
    measured: Value
    usual: tuple[tuple[Value, str], ...] = ()

    @property
    def error(self) -> float | None:
        """How far the guess is off, relative to what was measured: 0.5 is half too much. None where there is no guess,
        or no number to be off from."""
        guess, measured = self.prediction.guess, self.measured
        if isinstance(guess, str) or isinstance(measured, str) or guess is None or measured == 0:
            return None
        return (guess - measured) / abs(measured)

    @property
    def verdict(self) -> str:
        """`right`, `wrong`, or the error in per cent; `–` without a guess."""
        if self.prediction.guess is None:
            return "–"
        if self.error is None:
            return "right" if self.prediction.guess == self.measured else "wrong"
        return f"{100 * self.error:+.0f} %"

    def __repr__(self) -> str:
        shown = self.prediction.shown
        lines = [repr(self.prediction), f"  measured    {shown(self.measured)}", f"  error       {self.verdict}"]
        return "\n".join([*lines, *(f"  Why not {shown(wrong)}? {reason}" for wrong, reason in self.usual)])


def predict(question: str, guess: object = NO_GUESS, *, unit: str = "", options: Iterable[str] = ()) -> Prediction:
    """Write a guess down: a number in `unit`, or one of `options`.

    >>> from memlab.course import predict
    >>> predict("The peak", "40 MiB", unit="MiB").reveal(50 * 2**20, {100 * 2**20: "Nothing is there twice."})
    The peak
      your guess  40 MiB
      measured    50 MiB
      error       -20 %
      Why not 100 MiB? Nothing is there twice.

    Text counts as the number in it, with or without the unit; "no guess", empty text and None as no guess. Raises
    MemlabError for anything else, with what can be written instead.
    """
    text = "" if guess is None else str(guess).strip()
    choices = tuple(options)
    if text.lower() in ("", NO_GUESS):
        return Prediction(question, None, unit, choices)
    if choices:
        known = {option.lower(): option for option in choices}
        if text.lower() not in known:
            raise MemlabError(f"{text!r} is no answer to {question!r}: choose {_quoted(choices)} or {NO_GUESS!r}")
        return Prediction(question, known[text.lower()], unit, choices)
    try:
        number = float(text.removesuffix(unit))
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        example = f"40 {unit}".rstrip()
        raise MemlabError(f"{text!r} is no answer to {question!r}: write a number such as {example!r}, or {NO_GUESS!r}")
    return Prediction(question, number, unit)


def beside(*answers: Answer) -> str:
    """The answers as a table, a row each, so that a lesson's last predictions stand beside its first."""
    rows = [("", "your guess", "measured", "error")]
    for answer in answers:
        shown = answer.prediction.shown
        rows.append(
            (answer.prediction.question, shown(answer.prediction.guess), shown(answer.measured), answer.verdict)
        )
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _quoted(options: Iterable[str]) -> str:
    return ", ".join(repr(option) for option in options)
