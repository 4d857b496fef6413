"""The exercises and the quiz of each lesson: `EXERCISES` and `QUIZ` in `lesson_NN.py`."""
