"""What the lessons need and users do not: predictions."""

from .predictions import Answer, Prediction, beside, predict

__all__ = ["Answer", "Prediction", "beside", "predict"]
