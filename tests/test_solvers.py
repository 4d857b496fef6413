"""What learners answered who had the lessons' text and nothing else: each answer, and what it is told.

`solvers/answers_N.py` are the answers as they were given, laid out as the solutions are. The fifth's are wrong on
purpose, each by a slip that people make. A learner who misses is to be told what was missed.
"""

import ast
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
import solve
from lessons import LESSONS

READ = LESSONS[:4]  # the lessons that they had
EXERCISES = [exercise.number for lesson in READ for exercise in lesson.exercises]
SOLVERS = [1, 2, 3, 4, 5]

# Of each wrong answer, by solver and exercise, words of what is said to it. All other answers are right.
TOLD = {}


@cache
def answers_of(solver):
    file = Path(__file__).parent / f"solvers/answers_{solver}.py"
    return solve.sections(file.read_text("utf-8"))


def is_value(line):
    """Whether a line gives a name a value that is written out, as in `ledger = []`."""
    if not (isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name)):
        return False
    try:
        ast.literal_eval(line.value)
    except ValueError:
        return False
    return True


def define(source, names):
    """Add what a cell defines without running anything: imports, functions, classes, values that are written out."""
    for line in ast.parse(source).body:
        if isinstance(line, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef) or is_value(line):
            with suppress(NameError):  # it needs what a run gives
                exec(ast.unparse(line), names)


def told(cell, names):
    """What a learner sees under a cell: the value of its last line, or PyTorch's own error."""
    *lines, last = ast.parse(cell).body
    exec(ast.unparse(ast.Module(lines, [])), names)
    try:
        return eval(ast.unparse(last), names).text
    except RuntimeError as error:
        return str(error)


@cache
def outcomes_of(solver):
    """What a solver is told, by exercise: the cells of each lesson in their order, with the answers in place."""
    outcomes = {}
    for lesson in READ:
        names = {}
        for cell in lesson.code[1:]:  # the first installs
            match solve.asks(cell):
                case None:
                    define(cell.source, names)
                case number if number in EXERCISES:
                    outcomes[number] = told(answers_of(solver)[number], names)
    return outcomes


@pytest.mark.parametrize("solver", SOLVERS)
def test_every_exercise_was_answered(solver):
    assert [*answers_of(solver)] == EXERCISES


@pytest.mark.parametrize("number", EXERCISES)
@pytest.mark.parametrize("solver", SOLVERS)
def test_each_answer_is_told_what_it_needs(solver, number):
    outcome = outcomes_of(solver)[number]
    if words := TOLD.get((solver, number)):
        assert words in outcome
    else:
        assert outcome == "right"
