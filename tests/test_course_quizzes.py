"""Quizzes: what is shown before an answer and after one, and what each lesson's three questions are made of."""

import sys
import types

import pytest
from lessons import every_lesson

from memlab import MemlabError
from memlab.course import Option, Question, quiz

QUESTIONS = (
    Question("How many?", (Option("one", "There is another."), Option("two", "Both count.", right=True))),
    Question("Which?", (Option("this", "So it is.", right=True), Option("that", "That one is free."))),
)
FEEDBACK = [option.feedback for question in QUESTIONS for option in question.options]


@pytest.fixture(autouse=True)
def lesson_99(monkeypatch):
    module = types.ModuleType("memlab.course.lessons.lesson_99")
    module.QUIZ = QUESTIONS
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.parametrize("nothing", ["no answer", "No answer ", "", " ", None])
def test_unanswered_it_shows_its_questions_and_no_more(nothing):
    shown = repr(quiz(99, nothing))
    assert all(option.text in shown for question in QUESTIONS for option in question.options)
    assert not any(feedback in shown for feedback in FEEDBACK)
    assert shown.endswith("not answered yet")
    assert repr(quiz(99)) == shown


@pytest.mark.parametrize("written", ["b b", "bb", "B, B", "1b 2b", ["b", "b"]], ids=str)
def test_each_answer_gets_its_own_feedback(written):
    answered = quiz(99, written)
    assert answered.right == 1
    assert repr(answered).splitlines() == [
        "1. How many?",
        "   a  one",
        "   b  two",
        "   -> b is right: Both count.",
        "",
        "2. Which?",
        "   a  this",
        "   b  that",
        "   -> b is not right: That one is free.",
        "",
        "1 of 2 right",
    ]


@pytest.mark.parametrize("written", ["a", "a b a", "a c", "1 2", "yes", "ä a", 7])
def test_what_is_no_letter_for_each_question_is_refused_with_an_example(written):
    with pytest.raises(MemlabError, match=r"write a letter for each of the 2 questions, such as 'b a c'$"):
        quiz(99, written)


def test_a_lesson_without_a_quiz_is_named():
    with pytest.raises(MemlabError, match="lesson 98"):
        quiz(98, "a b c")


def test_long_answers_are_wrapped():
    long = Question("Why? " * 30, (Option("because " * 30, "no " * 60), Option("so", "yes", right=True)))
    sys.modules["memlab.course.lessons.lesson_99"].QUIZ = (long,)
    assert max(map(len, repr(quiz(99, "a")).splitlines())) <= 100


# -- every lesson ------------------------------------------------------------------------------------------------------


@every_lesson
def test_it_has_three_questions_each_with_one_right_answer(lesson):
    assert len(lesson.questions) == 3
    assert len({question.text for question in lesson.questions}) == 3
    for question in lesson.questions:
        assert 3 <= len(question.options) <= 5
        assert [option.right for option in question.options].count(True) == 1


@every_lesson
def test_each_answer_has_feedback_of_its_own(lesson):
    for question in lesson.questions:
        feedback = [option.feedback for option in question.options]
        assert all(feedback)
        assert len(set(feedback)) == len(feedback)
        assert len({option.text for option in question.options}) == len(question.options)


@every_lesson
def test_the_right_letters_are_no_pattern(lesson):
    letters = [[option.right for option in question.options].index(True) for question in lesson.questions]
    assert len(set(letters)) > 1
    longest = [max(question.options, key=lambda option: len(option.text)).right for question in lesson.questions]
    assert not all(longest), "the longest answer is right each time"
