"""Lesson 6: its solutions are right, and each wrong answer is told what is wrong with it.

The answers below are as people write them: each section of the solutions, the cells of the notebook as they stand, the
mistakes that the lesson knows, and slips that it does not know.
"""

import math
from pathlib import Path

import nbformat
import pytest
import solve
import torch
import torch.nn.functional as F

import memlab
from memlab.course import check, quiz
from memlab.course.exercises import Exercise
from memlab.course.lessons.lesson_06 import EXERCISES, QUIZ

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
SECTIONS = solve.sections((NOTEBOOKS / "solutions/06_mixed_precision.py").read_text("utf-8"))
NUMBERS = {exercise.number: exercise for exercise in EXERCISES}
SPACE = {"torch": torch, "F": F, "math": math}
every_exercise = pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.number)


def outcome_of(source):
    """What the check in a cell says."""
    said = []
    exec(source, {**SPACE, "check": lambda *answer: said.append(check(*answer))})
    (outcome,) = said
    return outcome


def changed(number, name, *replacements):
    """The solution with some of its text replaced."""
    source = SECTIONS[number]
    for old, new in replacements:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    space = {**SPACE, "check": lambda *answer: None}
    exec(source, space)
    return space[name]


def says(number, answer, words):
    outcome = NUMBERS[number].judge(answer)
    assert outcome.state == "wrong"
    assert words in outcome.text


@every_exercise
def test_the_solution_is_right(exercise):
    assert outcome_of(SECTIONS[exercise.number]).state == "right"
    assert SECTIONS[exercise.number].startswith(f"# {exercise.head}\n")


def test_the_quiz_has_its_solution():
    said = []
    exec(SECTIONS["quiz"], {"quiz": lambda *answers: said.append(quiz(*answers))})
    assert said[0].right == len(QUIZ) == 3


@every_exercise
def test_the_cell_as_it_stands_is_not_attempted(exercise):
    cells = nbformat.read(NOTEBOOKS / "06_mixed_precision.ipynb", as_version=4).cells
    (cell,) = (cell for cell in cells if cell.source.startswith(f"# {exercise.head}\n"))
    assert outcome_of(cell.source).text == "not attempted yet"


@every_exercise
def test_each_mistake_gets_its_own_hint(exercise):
    assert len(exercise.mistakes) >= 3
    assert len({mistake.hint for mistake in exercise.mistakes}) == len(exercise.mistakes)
    for mistake in exercise.mistakes:
        assert exercise.judge(mistake.answer).text == f"not yet. {mistake.hint}"


@every_exercise
def test_what_is_read_from_a_wrong_value_suits_the_mistakes_too(exercise):
    """Were a mistake not known, there would still be something to say."""
    unknown = Exercise(**{**vars(exercise), "mistakes": ()})
    for mistake in exercise.mistakes:
        assert "something else on the cases" not in unknown.judge(mistake.answer).text


# -- 6.1 ---------------------------------------------------------------------------------------------------------------

X, W, Y = "x_low = x.to(torch.bfloat16)", "W_low = W.to(torch.bfloat16)", "y = y.float()  # as the loss reads it"


@pytest.mark.parametrize(
    ("replacements", "words"),
    [
        ([(W, "W_low = W.data.bfloat16()")], "W gets no gradient"),
        ([(W, "W_low = torch.tensor(W.tolist(), dtype=torch.bfloat16)")], "W gets no gradient"),
        ([(Y, "")], "what the loss keeps of y"),
        ([(Y, "y = y.half()")], "Which of them is in a wrong type?"),
        ([(Y, "y = y.double()")], "Your loss is a torch.float64"),
        ([(Y, "y = F.linear(h.float(), W)")], "Which of them is in a wrong type?"),
        ([(Y, "y = y.float().detach()")], "No gradient comes to W"),
        ([(Y, "y = y.float() * 2")], "the loss is not"),
        ([(X, "x_low = x"), (W, "W_low = W")], "Nothing is cast"),
        ([(X, "x_low = x.half()"), (W, "W_low = W.half()")], "products in fp16"),
    ],
)
def test_slips_in_the_casts(replacements, words):
    says("6.1", changed("6.1", "forward", *replacements), words)


def test_other_casts_are_right():
    for replacements in (
        [(X, "x_low = x.bfloat16()"), (W, "W_low = W.type(torch.bfloat16)")],
        [(Y, "y = y.to(torch.float32)")],
        [(Y, "y = y.type_as(target)")],
    ):
        assert check("6.1", changed("6.1", "forward", *replacements)).state == "right"


def test_unlike_types_are_pytorchs_to_refuse():
    with pytest.raises(RuntimeError, match="dtype"):
        check("6.1", changed("6.1", "forward", (X, "x_low = x")))


# -- 6.2 ---------------------------------------------------------------------------------------------------------------

TOTAL = "2 * (inputs + before_gelu + copies) + 4 * output"
COPIES = "sum(sizes[n] * sizes[n + 1] for n in range(1, len(sizes) - 1))"


@pytest.mark.parametrize(
    ("replacements", "words"),
    [
        ([(TOTAL, "4 * (inputs + before_gelu + copies) + 8 * output")], "Twice what is saved"),
        ([(TOTAL, "inputs + before_gelu + copies + 2 * output")], "Half of what is saved"),
        ([("samples * sum(sizes[:-1])", "samples * sum(sizes[1:-1])")], "the copy of x, the first layer's input"),
        ([(TOTAL, "2 * (inputs + before_gelu + copies + sum(sizes[1:])) + 4 * output")], "the biases"),
        ([("range(1, len(sizes) - 1)", "range(len(sizes) - 1)")], "Who asks for the gradient of x?"),
        ([(COPIES, "0")], "what do the layers multiply by"),
        ([("before_gelu = samples * sum(sizes[1:-1])", "before_gelu = samples * sum(sizes[1:])")], "a GELU behind it"),
        ([("range(1, len(sizes) - 1)", "range(2, len(sizes) - 1)")], "What does a second one add"),
        ([(TOTAL, "None or 'many'")], "something else than a number"),
    ],
)
def test_slips_in_the_bytes(replacements, words):
    says("6.2", changed("6.2", "saved_bytes", *replacements), words)


def test_a_number_of_bytes_may_be_written_as_a_float():
    assert check("6.2", changed("6.2", "saved_bytes", (TOTAL, f"1.0 * ({TOTAL})"))).state == "right"


def test_the_lessons_example():
    assert changed("6.2", "saved_bytes")([64, 10], 32) == 5376


# -- 6.3 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ("d a g i e f b", "there is no loss yet"),
        ("d g i e f b", "No backward pass is in it"),
        ("d g a h i e f b", "Two backward passes run through one graph"),
        ("d g a i e f f b", "is a line there twice"),
        ("d g a i i e f b", "is a line there twice"),
        ("d g a i e f c b", "steps whatever the gradients are"),
        ("d g h e c", "who was to skip that step?"),
        ("d g a e f b", "are they scaled or not?"),
        ("d g a i e f b i", "come too early"),
    ],
)
def test_slips_in_the_order(order, words):
    says("6.3", order, words)


def test_each_order_that_trains_as_without_scaling_is_right():
    for order in ("dgaiefb", "G D A I E F B", "g, a, i, e, f, b, d", list("gaiefdb")):
        assert check("6.3", order).state == "right"
    with pytest.raises(memlab.MemlabError, match="no line has the letter 'z': write letters from a to i"):
        check("6.3", "d z")


# -- 6.4 ---------------------------------------------------------------------------------------------------------------

CLEAR, BACK, DIVIDE = "optimizer.zero_grad()", "(loss_fn(model, batch) * scale).backward()", "gradient.div_(scale)"
ALL = "all(gradient.isfinite().all() for gradient in gradients)"


@pytest.mark.parametrize(
    ("replacements", "words"),
    [
        ([(CLEAR, "pass")], "adds to them"),
        ([(DIVIDE, "gradient / scale")], "still scaled"),
        ([(DIVIDE, "gradient.div_(scale).div_(scale)")], "moves the weights to a wrong place"),
        ([(DIVIDE, "gradient.div_(scale * len(batch[0]))")], "moves the weights to a wrong place"),
        ([(ALL, "any(gradient.isfinite().all() for gradient in gradients)")], "How many have to be?"),
        ([(ALL, "gradients[0].isfinite().all()")], "as well as for NaN?"),
        ([(ALL, "gradients[1].isfinite().all()")], "How many have to be?"),
        ([(ALL, "not any(gradient.isnan().any() for gradient in gradients)")], "as well as for NaN?"),
        ([("    return scale / 2", "    return None")], "What comes back is to be the scale"),
        ([("    return scale / 2", "    return scale / 4")], "The scale is not"),
        ([("    return scale / 2", "    return 2 * scale")], "The scale is not"),
        ([("        return scale\n", "        return loss_fn(model, batch).item()\n")], "The scale is not"),
    ],
)
def test_slips_in_the_step(replacements, words):
    says("6.4", changed("6.4", "scaled_step", *replacements), words)


def test_other_steps_are_right():
    for replacements in (
        [(CLEAR, "model.zero_grad()")],
        [(DIVIDE, "gradient.mul_(1 / scale)")],
        [(BACK, "loss_fn(model, batch).backward(gradient=torch.tensor(scale))")],
        [("    return scale / 2", "    return torch.tensor(scale / 2)")],
    ):
        assert check("6.4", changed("6.4", "scaled_step", *replacements)).state == "right"


# -- 6.5 ---------------------------------------------------------------------------------------------------------------

FLOOR, LIMIT = "math.floor(math.log2(w))", "update < spacing / 2"


@pytest.mark.parametrize(
    ("replacements", "words"),
    [
        ([(LIMIT, "update < spacing")], "How far is it to the middle?"),
        ([("(digits - 1)", "digits")], "2**-7 or by 2**-8"),
        ([(FLOOR, "math.log2(w)")], "that at 1"),
        ([(FLOOR, "round(math.log2(w))")], "jumps at 1.41"),
        ([(FLOOR, "0")], "where is w in your limit?"),
        ([(FLOOR, "int(math.log2(w))")], "w = 0.75"),
        ([(LIMIT, "update > spacing / 2")], "You say the opposite"),
        ([(LIMIT, "update < 1e-4")], "PyTorch's addition says otherwise"),
        ([(LIMIT, "w + update == w")], "53 digits"),
        ([(LIMIT, "update - spacing")], "return True where the update vanishes"),
        ([("(digits - 1)", "(digits - 2)")], "twice too large"),
        ([("(digits - 1)", "(digits - 3)")], "PyTorch's addition says otherwise"),
    ],
)
def test_slips_in_the_update(replacements, words):
    says("6.5", changed("6.5", "vanishes", *replacements), words)


def test_other_limits_are_right():
    for answer in (
        lambda w, update, digits: 2 * update < 2.0 ** (math.frexp(w)[1] - digits),
        lambda w, update, digits: torch.tensor(update < 2.0 ** (math.frexp(w)[1] - digits - 1)),
        lambda w, update, digits: round((w + update) / 2.0 ** (math.frexp(w)[1] - digits)) * 2.0 ** (
            math.frexp(w)[1] - digits
        ) == w,
    ):  # fmt: skip
        assert check("6.5", answer).state == "right"


def test_the_lessons_examples():
    vanishes = changed("6.5", "vanishes")
    assert vanishes(1.0, 0.0038, 8)
    assert not vanishes(1.0, 0.004, 8)
