"""Predictions in the lessons: what a learner may write, and what the run says to it."""

import pytest

from memlab import MemlabError
from memlab.course import beside, predict
from memlab.units import MiB

COLOURS = ("red", "dark green")


@pytest.mark.parametrize("nothing", ["no guess", "No guess ", "", None])
@pytest.mark.parametrize("options", [(), COLOURS])
def test_no_guess_is_a_prediction_too(nothing, options):
    guess = predict("Which?", nothing, options=options)
    assert guess.guess is None
    assert "no guess" in repr(guess)
    answer = guess.reveal(options[0] if options else 3)
    assert answer.error is None
    assert answer.verdict == "–"


@pytest.mark.parametrize("written", [40, 40.0, "40", " 40 ", "40 MiB", "40MiB", "4e1"])
def test_a_number_may_be_written_in_many_ways(written):
    assert predict("How much?", written, unit="MiB").guess == 40


@pytest.mark.parametrize(("guess", "error", "verdict"), [(30, 0.5, "+50 %"), (15, -0.25, "-25 %"), (20, 0.0, "+0 %")])
def test_the_error_is_relative_to_what_was_measured(guess, error, verdict):
    answer = predict("How much?", guess, unit="MiB").reveal(20 * MiB)
    assert answer.measured == 20
    assert answer.error == error
    assert answer.verdict == verdict


def test_only_bytes_are_converted():
    assert predict("What share?", 30, unit="%").reveal(40).measured == 40
    assert predict("How many?", 30).reveal(40).measured == 40
    assert predict("How many?", 30).reveal(10_000).prediction.shown(10_000) == "10,000"


def test_of_nothing_a_guess_cannot_be_off_by_a_share():
    assert predict("How much?", 3, unit="%").reveal(0).verdict == "wrong"
    assert predict("How much?", 0, unit="%").reveal(0).verdict == "right"


@pytest.mark.parametrize(("guess", "verdict"), [("red", "right"), ("RED", "right"), ("dark green", "wrong")])
def test_a_choice_is_right_or_wrong(guess, verdict):
    assert predict("Which?", guess, options=COLOURS).reveal("red").verdict == verdict


def test_an_answer_shows_guess_measured_error_and_reasons():
    answer = predict("The peak", 12, unit="MiB").reveal(24 * MiB, {6 * MiB: "A quarter forgets the parameters."})
    assert repr(answer).splitlines() == [
        "The peak",
        "  your guess  12 MiB",
        "  measured    24 MiB",
        "  error       -50 %",
        "  Why not 6 MiB? A quarter forgets the parameters.",
    ]


@pytest.mark.parametrize("written", ["much", "nan", "inf", "12 GiB", True])
def test_what_is_no_number_is_refused_with_an_example(written):
    with pytest.raises(MemlabError, match=r"no answer to 'The peak': write a number such as '40 MiB', or 'no guess'"):
        predict("The peak", written, unit="MiB")


def test_what_is_no_option_is_refused_with_the_options():
    with pytest.raises(MemlabError, match=r"'blue' is no answer to .*: choose 'red', 'dark green' or 'no guess'"):
        predict("Which?", "blue", options=COLOURS)


@pytest.mark.parametrize("measured", ["blue", 3])
def test_a_lesson_that_reveals_no_option_is_told(measured):
    with pytest.raises(MemlabError, match="none of the options"):
        predict("Which?", options=COLOURS).reveal(measured)


def test_answers_stand_beside_each_other_in_columns():
    first = predict("Which?", "red", options=COLOURS).reveal("dark green")
    last = predict("The peak, in all", 20, unit="MiB").reveal(10 * MiB)
    head, *rows = beside(first, last).splitlines()
    assert [row[: head.index("your guess")].strip() for row in rows] == ["Which?", "The peak, in all"]
    assert [row[head.index("your guess") : head.index("measured")].strip() for row in rows] == ["red", "20 MiB"]
    assert [row[head.index("measured") : head.index("error")].strip() for row in rows] == ["dark green", "10 MiB"]
    assert [row[head.index("error") :] for row in rows] == ["wrong", "+100 %"]
