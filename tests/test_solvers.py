"""What learners answered who had the lessons' text and nothing else: each answer, and what it is told.

`solvers/answers_N.py` are the answers as they were given, laid out as the solutions are. The fifth's and the tenth's
are wrong on purpose, each by a slip that people make. A learner who misses is to be told what was missed.
"""

import ast
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
import solve
from lessons import LESSONS

READ = dict.fromkeys(range(1, 6), LESSONS[:4]) | dict.fromkeys(range(6, 11), LESSONS[4:])  # by solver: what they had
ANSWERS = [(solver, task.number) for solver, read in READ.items() for lesson in read for task in lesson.exercises]

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
    (9, "4.5"): "IndexError",
    (9, "7.3"): "forgotten when the hook returns",
    (9, "7.5"): "UnboundLocalError",
    (9, "9.3"): "Are they all 0 then?",
    (9, "11.2"): "other micro-batches have gone before",
    (10, "4.1"): "however many blocks it has",
    (10, "4.2"): "Which is the least room in which all blocks fit",
    (10, "4.3"): "A runs again once in yours",
    (10, "4.4"): "You round twice",
    (10, "4.5"): "which side of `w` are the result's columns?",
    (10, "5.1"): "A mean of means: right for equal parts",
    (10, "5.2"): "Clipped within the loop, a first part's gradient",
    (10, "5.3"): "all graphs are alive together in the end",
    (10, "5.4"): "what is 0 times a mean over no token",
    (10, "5.5"): "One micro-batch has two high moments",
    (10, "6.1"): "the copy that you multiply by still tied",
    (10, "6.2"): "Is that one tensor, as in a ReLU?",
    (10, "6.3"): "steps whatever the gradients are",
    (10, "6.4"): "You looked at the loss",
    (10, "6.5"): "Between two of them the spacing stays",
    (10, "7.1"): "a gradient of zeros is as large as any other",
    (10, "7.2"): "what is there to wait for?",
    (10, "7.3"): "All parameters share one velocity",
    (10, "7.4"): "what is alive at the 7?",
    (10, "7.5"): "got the name of a file that was there",
    (10, "9.1"): "from where has it its weights",
    (10, "9.2"): "the spread of single differences",
    (10, "9.3"): "Are they all 0 then?",
    (10, "9.4"): "one more than fits is more samples",
    (10, "9.5"): "Where not even the smallest fits",
    (10, "11.1"): "The sign is the other way round",
    (10, "11.2"): "other micro-batches have gone before",
    (10, "11.3"): "most of what stays is saved outside of the blocks",
    (10, "11.4"): "is told to update in backward",
    (10, "11.5"): "where nearly all bytes are the batch",
}


@cache
def answers_of(solver):
    file = Path(__file__).parent / f"solvers/answers_{solver}.py"
    return solve.sections(file.read_text("utf-8"))


def is_value(line):
    """Whether a line gives a name a value for which nothing is run, as in `ledger = []` or `adamw = partial(AdamW)`."""
    if not (isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name)):
        return False
    calls = [part.func for part in ast.walk(line.value) if isinstance(part, ast.Call)]
    return all(ast.unparse(call) == "partial" for call in calls)


def define(source, names):
    """Add what a cell defines without running anything: imports, functions, classes, values."""
    for line in ast.parse(source).body:
        if isinstance(line, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef) or is_value(line):
            with suppress(NameError):  # it needs what a run gives
                exec(ast.unparse(line), names)


def told(cell, names):
    """What a learner sees under a cell: the value of its last line, or Python's own error."""
    *lines, last = ast.parse(cell).body
    exec(ast.unparse(ast.Module(lines, [])), names)
    try:
        return eval(ast.unparse(last), names).text
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@cache
def outcomes_of(solver):
    """What a solver is told, by exercise: the cells of each lesson in their order, with the answers in place."""
    outcomes = {}
    for lesson in READ[solver]:
        names = {}
        for cell in lesson.code[1:]:  # the first installs
            match solve.asks(cell):
                case None:
                    define(cell.source, names)
                case number if number in answers_of(solver):
                    outcomes[number] = told(answers_of(solver)[number], names)
    return outcomes


@pytest.mark.parametrize("solver", READ)
def test_every_exercise_was_answered(solver):
    assert [(solver, number) for number in answers_of(solver)] == [answer for answer in ANSWERS if answer[0] == solver]


@pytest.mark.parametrize(("solver", "number"), ANSWERS)
def test_each_answer_is_told_what_it_needs(solver, number):
    outcome = outcomes_of(solver)[number]
    if words := TOLD.get((solver, number)):
        assert words in outcome
    else:
        assert outcome == "right"
