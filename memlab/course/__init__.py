"""What the lessons need and users do not: predictions, exercises that check themselves, quizzes."""

from .exercises import Exercise, Mistake, Outcome, check
from .predictions import Answer, Prediction, beside, predict
from .quizzes import Option, Question, quiz

__all__ = [
    "Answer",
    "Exercise",
    "Mistake",
    "Option",
    "Outcome",
    "Prediction",
    "Question",
    "beside",
    "check",
    "predict",
    "quiz",
]
