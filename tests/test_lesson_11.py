"""Lesson 11: each sentence has its two measurements, its solutions are right, and each wrong answer is told why."""

import re

import pytest
import torch
from lessons import LESSONS, shown
from torch import nn

import memlab
from memlab.course import check, quiz
from memlab.course.exercises import same
from memlab.course.lessons.lesson_11 import EXERCISES, QUIZ

(LESSON,) = (lesson for lesson in LESSONS if lesson.number == 11)
NUMBERS = {exercise.number: exercise for exercise in EXERCISES}
every_exercise = pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.number)

BOXES = re.findall(r"^> \*\*Often believed:\*\* (?:(\d+) · )?(.+)$", LESSON.text, re.MULTILINE)
CLAIMS = [int(number or 0) for number, _ in BOXES]
PRINTED = "\n".join(shown(cell) for cell in LESSON.code)
# What must be among the sentences, by a phrase of its box.
KINDS = {
    "what checkpointing stores": "segments of the gradient computation",
    "whether it loads or computes again": "loaded, so that nothing need be computed again",
    "in which order it runs": "gradients of each segment are computed as it goes",
    "whether it changes accuracy": "makes models better",
    "how much programming it needs": "not built into PyTorch",
    "what `checkpoint()` returns": "returns the outputs and the gradients",
    "parameters that do not fit: checkpointing": "parameters are too large for the memory",
    "parameters that do not fit: smaller batches": "use smaller batches",
    "parameters that do not fit: lower precision": "mixed precision halves",
    "what autograd stores": "gradients on the fly",
    "the price in time": "a third more time",
    "where to put checkpoints": "√n segments",
    "how to choose by size": "small, simple models",
}


# -- the sentences -----------------------------------------------------------------------------------------------------


def test_there_are_twenty_and_one_to_practise_on():
    assert list(range(21)) == CLAIMS


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_sentence_is_among_them(kind):
    assert sum(KINDS[kind] in text for _, text in BOXES) == 1


@pytest.mark.parametrize("number", range(21))
def test_a_sentence_fails_somewhere_and_holds_somewhere(number):
    for verdict in ("fails", "holds"):
        (line,) = re.findall(rf"^{verdict} {number:>2}  (.+)$", PRINTED, re.MULTILINE)
        assert re.search(r"\d|True|False", line.partition(": ")[2]), line


@pytest.mark.parametrize("number", range(21))
def test_a_sentence_is_written_anew(number):
    (anew,) = re.findall(rf"^\*\*{number} · .+?\*\*", LESSON.text, re.MULTILINE)
    assert len(anew.split()) > 8


def test_the_sheet_has_a_row_for_each():
    (sheet,) = (
        output.data["text/markdown"]
        for output in LESSON.outputs
        if "| verdict |" in output.get("data", {}).get("text/markdown", "")
    )
    assert re.findall(r"^\| (\d+) \|", sheet, re.MULTILINE) == [str(number) for number in range(21)]


def test_each_branch_of_the_guide_is_measured_and_drawn():
    (guide,) = (cell for cell in LESSON.code if "def guide(" in cell.source)
    (measured,) = (cell for cell in LESSON.code if "draw(tree)" in cell.source and cell is not guide)
    branches = [*re.findall(r'^        "([^"]+\?)": ', guide.source, re.MULTILINE), "none of these"]
    assert len(branches) == 8
    (figure,) = (output for output in measured.outputs if "image/png" in output.get("data", {}))
    asked = re.findall(r"([^:;]+\?|none of these) ([^;]+)(?:;|$)", figure.data["text/plain"].partition(": ")[2])
    assert [question.strip() for question, _ in asked] == branches
    printed = shown(measured)
    assert all(re.search(rf"{re.escape(way)} .*MiB to .*% left", printed) for _, way in asked)


def test_the_sheet_can_be_read_as_text():
    texts = [output.data["text/plain"] for output in LESSON.outputs if "data" in output]
    (sheet,) = (text for text in texts if text.startswith("0 · "))
    assert len(sheet.splitlines()) == 21
    assert not any("Markdown object" in text for text in texts)


# -- the exercises -----------------------------------------------------------------------------------------------------


def space():
    names = {"torch": torch, "nn": nn, "memlab": memlab}
    names["make_block"] = lambda: nn.Sequential(nn.Linear(128, 512), nn.Tanh(), nn.Linear(512, 128))
    return names


def outcome_of(source):
    said = []
    exec(source, space() | {"check": lambda number, answer: said.append(check(number, answer))})
    (outcome,) = said
    return outcome


def says(number, answer, words):
    outcome = check(number, answer)
    assert outcome.state == "wrong"
    assert words in outcome.text


@every_exercise
def test_its_solution_is_right(exercise):
    assert outcome_of(LESSON.solutions[exercise.number]).text == "right"


@every_exercise
def test_its_cell_as_it_stands_is_not_attempted(exercise):
    assert outcome_of(LESSON.asking[exercise.number].source).state == "not attempted"


@every_exercise
def test_each_mistake_gets_its_own_hint_and_no_other_gets_it(exercise):
    hints = [mistake.hint for mistake in exercise.mistakes]
    assert [exercise.judge(mistake.answer).text for mistake in exercise.mistakes] == [f"not yet. {h}" for h in hints]


@pytest.mark.parametrize("number", ["11.1", "11.2", "11.3", "11.5"])
def test_what_a_learner_raises_passes_as_it_is(number):
    def answer(*given):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        check(number, answer)


def in_place(training, inference):
    """The cell of 11.1 with these two differences in it."""

    def answer(highest, make_net, x):
        def train(net):
            net(x).sum().backward()

        def infer(net):
            with torch.no_grad():
                net(x)

        return training(highest, make_net, train, infer), inference(highest, make_net, train, infer)

    return answer


def saved_in(run):
    return lambda highest, make_net, *runs: highest(runs[run], make_net(False)) - highest(runs[run], make_net(True))


@pytest.mark.parametrize(
    ("training", "inference", "words"),
    [
        (lambda *a: saved_in(0)(*a) / 4, lambda *a: saved_in(1)(*a) / 4, "yours are elements"),
        (lambda *a: saved_in(0)(*a) / 2**20, lambda *a: saved_in(1)(*a) / 2**20, "yours are MiB"),
        (saved_in(0), lambda *a: -saved_in(1)(*a), "The saving in training is right"),
        (saved_in(0), lambda h, net, t, i: h(i, net(True)), "The saving in training is right"),
        (lambda h, net, t, i: h(t, net(False)), saved_in(1), "The saving under `no_grad` is right"),
        (lambda h, net, t, i: h(t, net(False)) - h(i, net(True)), lambda *a: 7, "a difference of two calls"),
    ],
    ids=["elements", "MiB", "one sign", "no difference", "no difference in training", "mixed"],
)
def test_slips_in_place(training, inference, words):
    says("11.1", in_place(training, inference), words)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda p, a, k: 4 * (3 * p + (k > 1) * p + a / k), "bytes already"),
        (lambda p, a, k: 3 * p + 2 * (k > 1) * p + a / k, "which of the parts does k divide"),
        (lambda p, a, k: 5 * p + a / k, "Begin with the plain step"),
        (lambda p, a, k: 3 * p + (k > 2) * p + a / k, "which of the parts"),
        (lambda p, a, k: (3 + (k > 1)) * p + a / 2, "Begin with the plain step"),
        (lambda p, a, k: 3 * p + a / k / k, "left behind"),
    ],
    ids=["elements", "gradients twice", "temporaries", "from the third on", "always halved", "divided twice"],
)
def test_slips_in_the_bound(answer, words):
    says("11.2", answer, words)


def test_forms_of_the_bound_that_are_right():
    assert check("11.2", lambda p, a, k: (4 if k > 1 else 3) * p + a * (1 / k)).state == "right"
    assert check("11.2", lambda p, a, k: torch.tensor(float((3 + (k != 1)) * p + a / k)).item()).state == "right"


@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_bound_is_what_is_alive_when_measured(k):
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Tanh(), nn.Linear(32, 16, bias=False), nn.Tanh())
    step = memlab.TrainingStep(model, torch.ones(8, 16), lambda model, x: model(x).square().mean(), torch.optim.AdamW)
    plain = memlab.measure(step)
    trace = memlab.measure(step, memlab.MicroBatch(count=k))
    names = space() | {"check": lambda *answer: None}
    exec(LESSON.solutions["11.2"], names)
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    last = max(its.tick for its in trace.operators if its.place.phase == "forward")
    kinds = {"parameters", "gradients", "optimizer state", "activations"}
    alive = sum(its.nbytes for its in trace.alive(last) if its.category in kinds)
    counts = 2 * 4  # how often each of the two parameters was updated
    assert abs(alive - counts - names["alive"](parameters, plain.saved_bytes, k)) <= 16  # the loss and its like


def a_step(blocks, samples, optimizer=torch.optim.AdamW, width=64):
    batch = torch.ones(samples, width), torch.ones(samples, width)
    return lambda: memlab.TrainingStep(nn.Sequential(*blocks), batch, nn.MSELoss(), optimizer)


def wide():
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (a_step([wide() for _ in range(6)], 2048), "the peak falls too"),
        (a_step([wide() for _ in range(6)], 2048, torch.optim.SGD), "the peak falls too"),
        (a_step([nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(6)], 8), "fall by half or less"),
        (a_step([wide() for _ in range(6)], 1), "very few samples"),
    ],
    ids=["many samples", "SGD, many samples", "flat blocks", "one sample"],
)
def test_steps_that_are_no_counterexample(answer, words):
    says("11.3", answer, words)


def test_other_counterexamples_are_right():
    assert check("11.3", a_step([wide() for _ in range(6)], 48)).state == "right"


def test_what_is_no_step_or_has_no_blocks_is_told_so():
    with pytest.raises(memlab.MemlabError, match="no repeated blocks found"):
        check("11.3", a_step([nn.Linear(64, 64) for _ in range(6)], 64))
    with pytest.raises(memlab.MemlabError, match=r"it returns a Sequential: return memlab\.TrainingStep"):
        check("11.3", lambda: nn.Sequential())


@pytest.mark.parametrize("order", ["d g b e c", "gdbec", ["d", "g", "b", "e", "a", "c"], "D, G, B, E, C"], ids=str)
def test_orders_that_are_right(order):
    assert check("11.4", order).state == "right"


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ("a d g b e c", "Saved bytes"),
        ("e d g b c", "a checkpointed step that fits"),
        ("b d g e c", "its peak in the optimizer step"),
        ("f d g b e c", "a step that fits"),
        ("d g b f e c", "Which line should have been asked before?"),
        ("d g b", "which line is true always"),
    ],
    ids=str,
)
def test_slips_in_the_order(order, words):
    says("11.4", order, words)


def test_a_letter_that_there_is_not():
    with pytest.raises(memlab.MemlabError, match="no line has the letter 'x'"):
        check("11.4", "d g x")


def by_rule(**replaced):
    """The solution with the share of a technique computed in another way."""

    def can_move(alive):
        whole = sum(alive.values())
        activations, gradients = alive.get("activations", 0), alive.get("gradients", 0)
        shares = {
            "checkpoint": activations / whole,
            "micro-batches": activations / whole,
            "optimizer in backward": gradients / whole,
            "pure bf16": 1 - alive.get("batch", 0) / whole,
        }
        shares |= {name.replace("_", " "): share(alive, whole) for name, share in replaced.items()}
        return {name for name, share in shares.items() if share >= 0.1}

    return can_move


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (by_rule(checkpoint=lambda alive, whole: alive["parameters"] / whole), "“checkpoint” is in a set"),
        (by_rule(checkpoint=lambda alive, whole: 0), "“checkpoint” is missing"),
        (by_rule(optimizer_in_backward=lambda alive, whole: 0), "“optimizer in backward” is missing"),
        (by_rule(optimizer_in_backward=lambda alive, whole: 1), "“optimizer in backward” is in a set"),
        (lambda alive: {"checkpointing"}, "none of the four names"),
        (lambda alive: "checkpoint", "a set"),
        (lambda alive: set(), "is missing"),
    ],
    ids=["parameters", "never", "no gradients", "always", "another name", "text", "none"],
)
def test_slips_in_what_can_move(answer, words):
    says("11.5", answer, words)


def test_a_list_of_names_is_right_too():
    assert check("11.5", lambda alive: sorted(by_rule()(alive))).state == "right"


def test_checking_leaves_the_argument_of_the_next_answer_alone():
    assert check("11.5", lambda alive: alive.clear() or {"checkpoint"}).state == "wrong"
    assert same(NUMBERS["11.5"].run(by_rule()), NUMBERS["11.5"].truth())


def test_the_quiz_is_solved_by_its_solution_and_its_letters_differ():
    letters = re.search(r'answers = "([a-z ]+)"', LESSON.solutions["quiz"])[1]
    assert quiz(11, letters).right == len(QUIZ) == 3
    assert len(set(letters.split())) == 3
