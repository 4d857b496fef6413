"""Lesson 05: right solutions, a hint of its own for each mistake, a fitting one for other slips, numbers that hold."""

import pytest
import torch
from lessons import LESSONS
from torch.nn.functional import cross_entropy

import memlab
from memlab import MemlabError, zoo
from memlab.course import check, quiz
from memlab.course.exercises import Exercise
from memlab.course.lessons.lesson_05 import EXERCISES, QUIZ

LESSON = next(lesson for lesson in LESSONS if lesson.number == 5)
NUMBERS = {exercise.number: exercise for exercise in EXERCISES}
every_exercise = pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.number)


def space():
    return {"torch": torch, "cross_entropy": cross_entropy, "check": check, "quiz": quiz}


def run_cell(source):
    """The outcome of a cell's last line."""
    body, _, last = source.strip().rpartition("\n")
    names = space()
    exec(body, names)
    return eval(last, names)


def changed(number, name, *replacements):
    """The solution with some of its text replaced."""
    source = LESSON.solutions[number].strip().rpartition("\n")[0]
    for old, new in replacements:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    names = space()
    exec(source, names)
    return names[name]


def says(number, answer, words):
    outcome = NUMBERS[number].judge(answer)
    assert outcome.state == "wrong"
    assert words in outcome.text


@every_exercise
def test_the_solution_is_right(exercise):
    assert run_cell(LESSON.solutions[exercise.number]).state == "right"


def test_the_quiz_has_its_solution():
    assert run_cell(LESSON.solutions["quiz"]).right == len(QUIZ) == 3


@every_exercise
def test_the_cell_as_it_stands_is_not_attempted(exercise):
    assert repr(run_cell(LESSON.asking[exercise.number].source)) == f"{exercise.number}: not attempted yet"


@every_exercise
def test_each_mistake_gets_its_own_hint(exercise):
    assert len({mistake.hint for mistake in exercise.mistakes}) == len(exercise.mistakes) >= 3
    for mistake in exercise.mistakes:
        assert exercise.judge(mistake.answer).text == f"not yet. {mistake.hint}"


@every_exercise
def test_what_is_read_from_a_wrong_value_suits_the_mistakes_too(exercise):
    """Were a mistake not known, there would still be something to say."""
    unknown = Exercise(**{**vars(exercise), "mistakes": ()})
    for mistake in exercise.mistakes:
        assert "something else on the cases" not in unknown.judge(mistake.answer).text


@pytest.mark.parametrize("number", ["5.1", "5.3", "5.4", "5.5"])
def test_an_error_of_the_learners_own_passes(number):
    def answer(*arguments):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        check(number, answer)


# -- 5.1 ---------------------------------------------------------------------------------------------------------------

WEIGHT = "weight = len(x) / samples"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("weight = 2 * len(x) / samples", "times 2, 2, 2"),
        ("weight = len(x) / samples / len(parts)", "What should the weights add up to?"),
        ("weight = len(x) / samples * len(parts)", "What should the weights add up to?"),
        ("weight = 0.25", "Every part weighs the same"),
        ("weight = len(parts)", "Every part weighs the same"),
        ("weight = 1 / samples * len(parts)", "Every part weighs the same"),
        ("weight = (len(x) - 1) / samples", "do not weigh as many samples"),
        ("weight = len(x) ** 2 / samples", "do not weigh as many samples"),
        ("weight = float('nan')", "no numbers"),
        ("weight = len(x[0]) / samples", "Every part weighs the same"),
        ("weight = len(x) // samples", "times 0, 0, 0"),
    ],
)
def test_slips_in_the_weight(line, words):
    says("5.1", changed("5.1", "add_up", (WEIGHT, line)), words)


@pytest.mark.parametrize("line", ["weight = y.numel() / samples", "weight = x.shape[0] * samples**-1"])
def test_other_weights_that_are_right(line):
    assert check("5.1", changed("5.1", "add_up", (WEIGHT, line))).state == "right"


# -- 5.2 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ("h e b d f a", "Python cannot read"),
        ("h d f a", "Python cannot read"),
        ("h d b e f a", "before any line has made it"),
        ("h d e e b f a", "Line e is there twice"),
        ("h d e b h f a", "Line h is there twice"),
        ("d e b h f a", "is there anything left in `.grad`?"),
        ("h d e b c f a", "is there anything left in `.grad`?"),
        ("d e b f h a", "is there anything left in `.grad`?"),
        ("d c e b f a h", "last part alone"),
        ("d e b i a h", "Clipped within the loop"),
        ("d e b a f h", "already stepped"),
        ("d j b f a h", "Mean of means"),
        ("h d e b g f a", "once a part or once a batch"),
        ("h d j b i g", "And look at the loss"),
        ("d j b f a", "And look at the loss"),
    ],
)
def test_slips_in_the_order(order, words):
    says("5.2", order, words)


@pytest.mark.parametrize("order", ["h d e b f a", "d e b f a h", "H, D, E, B, F, A", ["h", "d", "e", "b", "f", "a"]])
def test_both_places_to_clear_are_right(order):
    assert check("5.2", order).state == "right"


def test_a_letter_that_is_no_line():
    with pytest.raises(MemlabError, match="no line has the letter 'z': write letters from a to j"):
        check("5.2", "h d z")


# -- 5.3 ---------------------------------------------------------------------------------------------------------------

SUM, DIVIDED = "(loss_fn(model(x), y) * len(x)).backward()", "parameter.grad / samples for"


@pytest.mark.parametrize(
    ("replacements", "words"),
    [
        ([(DIVIDED, "parameter.grad / 10 for")], "Each gradient is the right one times a number"),
        ([("samples = 0", "samples = 1")], "Each gradient is the right one times a number"),
        ([(DIVIDED, "parameter.grad / samples / len(loader) for")], "Each gradient is the right one times a number"),
        ([("    model.zero_grad()\n", ""), (SUM, SUM.replace(" * len(x)", " * len(x) * 1"))], "what does backward add"),
        ([(DIVIDED, "parameter.grad / len(loader) for"), (" * len(x)", " * 2")], "Take a loader with a single batch"),
        ([(" * len(x)", " * loader.batch_size")], "right for a loader with a single batch"),
        (
            [(SUM, SUM.replace("backward()", "backward(); torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)"))],
            "",
        ),
        (
            [("return [", "return torch.cat(["), (".parameters()]", ".parameters() if parameter.ndim == 1])")],
            "one tensor",
        ),
        ([(DIVIDED, "parameter.grad.flatten() / samples for")], "another shape"),
        ([("in model.parameters()]", "in list(model.parameters())[:2]]")], "another length"),
        ([("return [", "return [p.grad.tolist() for p in model.parameters()] or [")], "is no tensor"),
    ],
)
def test_slips_in_the_whole_data_set(replacements, words):
    says("5.3", changed("5.3", "gradient_of_all", *replacements), words)


def by_weights(model, loss_fn, loader):
    total = sum(len(x) for x, _ in loader)
    gradients = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for x, y in loader:
        found = torch.autograd.grad(loss_fn(model(x), y), list(model.parameters()))
        gradients = [one + other * len(x) / total for one, other in zip(gradients, found, strict=True)]
    return tuple(gradients)


def by_the_data_set(model, loss_fn, loader):
    model.zero_grad()
    for x, y in loader:
        (loss_fn(model(x), y) * len(x) / len(loader.dataset)).backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("answer", [by_weights, by_the_data_set])
def test_other_ways_through_the_data_set_are_right(answer):
    assert check("5.3", answer).state == "right"


# -- 5.4 ---------------------------------------------------------------------------------------------------------------

COUNT = "sum((targets != -100).sum() for _, targets in parts)"


@pytest.mark.parametrize(
    ("replacements", "words"),
    [
        ([("    return total", "    return None")], "Asked for is the mean loss, too"),
        ([("    return total", "    return loss.item()")], "is not the mean over all tokens"),
        ([("    return total", "    return total * tokens")], "is not the mean over all tokens"),
        ([("        loss.backward()\n", "")], "which line calls backward?"),
        ([(COUNT, COUNT.replace("sum(", "max(", 1))], "Each gradient is the right one times a number"),
        ([(COUNT, COUNT + " + 1")], "Each gradient is the right one times a number"),
        ([(COUNT, COUNT.replace("!=", "=="))], "can that be 0?"),
        ([(COUNT, "len(parts)")], "Each gradient is the right one times a number"),
        ([("loss.backward()", "model.zero_grad(); loss.backward()")], "do not weigh as many tokens"),
    ],
)
def test_slips_in_the_tokens(replacements, words):
    says("5.4", changed("5.4", "accumulate_tokens", *replacements), words)


def with_shares(model, parts):
    counts = [(targets != -100).sum().item() for _, targets in parts]
    total = torch.tensor(0.0, dtype=torch.float64)
    for (inputs, targets), count in zip(parts, counts, strict=True):
        if count:
            loss = cross_entropy(model(inputs).transpose(1, 2), targets) * count / sum(counts)
            loss.backward()
            total += loss.detach()
    return total


def test_shares_that_leave_empty_parts_out_are_right():
    assert check("5.4", with_shares).state == "right"


# -- 5.5 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("replacements", "words"),
    [
        ([("largest / samples", "largest")], "Which did you try"),
        ([("return k", "return k + 1")], "and a smaller number fits"),
        ([("return k", "return k - 1")], "whose peak does not fit"),
        ([("return None", "return samples + 1")], "more micro-batches than there are samples"),
        ([("return None", "return samples")], "does it fit?"),
        ([("static + gradients + act", "static + act")], "waits in `.grad`"),
        ([("static + gradients + act", "static + 2 * gradients + act")], "and a smaller number fits"),
        ([("return k", "return str(k)")], "something else than a number"),
        ([("static + max(gradients, activations)", "static")], "the higher of its two moments"),
    ],
)
def test_slips_in_what_fits(replacements, words):
    says("5.5", changed("5.5", "fewest", *replacements), words)


def test_a_float_for_a_whole_number_is_right():
    fewest = changed("5.5", "fewest")
    assert check("5.5", lambda *case: None if (k := fewest(*case)) is None else float(k)).state == "right"


def test_what_fits_by_the_exercise_fits_when_it_is_measured():
    step = zoo.gpt_step(batch=8, depth=2)
    plain = memlab.measure(step)
    parts = plain.by_category("tensor_peak")
    static = parts["parameters"] + parts["optimizer state"] + parts["batch"]
    peaks = {k: memlab.measure(step, memlab.MicroBatch(count=k)).tensor_peak_bytes for k in (2, 4)}
    fewest = changed("5.5", "fewest")
    for k, peak in peaks.items():
        rest = plain.tensor_peak_bytes - static
        assert fewest(static, parts["parameters"], rest, 8, int(1.01 * peak)) == k


def test_what_the_text_says_of_the_explorer():
    def peak(batch, count):
        return memlab.simulate(
            zoo.gpt_step(batch=batch), memlab.MicroBatch(count=count), device="cpu"
        ).tensor_peak_bytes

    assert peak(32, 8) <= 48 * 2**20 < peak(32, 4)
    assert 0.6 < peak(4, 4) / peak(4, 1) < 0.7
