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
TOLD = {
    (1, "1.4"): "`kept` counts numbers",
    (1, "3.5"): "own input is in your sum twice",
    (2, "3.5"): "You hold the inputs of all regions until the end",
    (4, "1.4"): "Some bytes may be saved at any batch size",
    (4, "3.5"): "In your sum there is the first one's alone",
    (5, "0.1"): "`max` of a dictionary compares the names",
    (5, "0.2"): "what does None say?",
    (5, "0.3"): "what of the step before is still alive during the forward pass?",
    (5, "0.4"): "You count the optimizer's state with the gradients",
    (5, "1.1"): "does backward make them for AdamW alone?",
    (5, "1.2"): "when your optimizer steps, the gradients are gone",
    (5, "1.3"): "Your parameters double where no size has changed",
    (5, "1.4"): "Some bytes may be saved at any batch size",
    (5, "2.1"): "which saved tensor is tanh(z)?",
    (5, "2.2"): "a tensor's `data_ptr()` is where the view begins",
    (5, "2.3"): "Your hook kept the tensors alive",
    (5, "2.4"): "float32 takes four bytes for each",
    (5, "3.1"): "the first layer runs twice",
    (5, "3.2"): "so the saved tensors of both are in memory at once",
    (5, "3.3"): "incorrect number of gradients (expected 2, got 1)",
    (5, "3.4"): "into which tensors did your run write them?",
    (5, "3.5"): "which inputs are gone when backward gets to an earlier region?",
}


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
