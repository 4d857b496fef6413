"""Lesson 3: its solutions are right, and each wrong answer is told what is wrong with it.

The answers below are as people write them: each section of the solutions, the cells of the notebook as they stand, the
mistakes that the lesson knows, and slips that it does not know.
"""

import copy
from pathlib import Path

import nbformat
import pytest
import torch
from torch import nn
from torch.func import functional_call

import memlab
from memlab.chain import Chain, schedule
from memlab.course import check, quiz
from memlab.course.exercises import Exercise
from memlab.course.lessons.lesson_03 import EXERCISES, QUIZ

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
SECTIONS = {
    name: source
    for name, _, source in (
        part.partition("\n")
        for part in (NOTEBOOKS / "solutions/03_checkpointing.py").read_text("utf-8").split("# %% ")[1:]
    )
}
NUMBERS = {exercise.number: exercise for exercise in EXERCISES}
every_exercise = pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.number)


def outcome_of(source):
    """What the check in a cell says."""
    said = []

    def told(number, answer):
        said.append(check(number, answer))

    exec(source, {"torch": torch, "check": told})
    (outcome,) = said
    return outcome


def defined(source, name):
    """What a cell defines."""
    space = {"torch": torch, "check": lambda *answer: None}
    exec(source, space)
    return space[name]


def changed(number, name, *replacements):
    """The solution with some of its text replaced."""
    source = SECTIONS[number]
    for old, new in replacements:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return defined(source, name)


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
    cells = nbformat.read(NOTEBOOKS / "03_checkpointing.ipynb", as_version=4).cells
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


def says(number, answer, *words):
    outcome = NUMBERS[number].judge(answer)
    assert outcome.state == "wrong"
    for word in words:
        assert word in outcome.text


# -- 3.1 ---------------------------------------------------------------------------------------------------------------

FIRST, SECOND = "a = torch.tanh(x @ w1.T)", "b = torch.tanh(a @ w2.T)"


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        ("a = torch.sigmoid(x @ w1.T)", SECOND, "it reads b alone"),
        ("a = torch.tanh(x)", SECOND, "it reads b alone"),
        (FIRST, "b = torch.tanh(a @ w3.T)", "it reads b alone"),
        (FIRST, "b = x + torch.tanh(a @ w2.T)", "it reads b alone"),
        (FIRST, "b = torch.tanh(a @ w2)", "it reads b alone"),
        ("a = x @ w1.T", "b = torch.tanh(torch.tanh(a) @ w2.T)", "so b is. Those that read a are off"),
        ("a = torch.tanh(x @ w1.T + x)", "b = torch.tanh(torch.tanh(x @ w1.T) @ w2.T)", "so b is"),
        (
            "a = torch.tanh(x @ w1.T); y = a @ w2.T; z = torch.tanh(y) @ w3.T; z = z @ w3.T",
            SECOND,
            "more arithmetic than",
        ),
        ("a = torch.tanh(saved['x'] @ w1.T)", "b = torch.tanh(torch.tanh(x @ w1.T) @ w2.T)", "first layer runs twice"),
    ],
)
def test_slips_in_what_was_deleted(a, b, words):
    says("3.1", changed("3.1", "backward", (FIRST, a), (SECOND, b)), words)


def test_other_lines_changed():
    answer = changed("3.1", "backward", ("return g_x, g_w1, g_w2, g_w3", "return g_w1, g_w2, g_w3"))
    says("3.1", answer, "were the lines below yours changed?")


def test_other_ways_to_bring_it_back_are_right():
    for a in ("a = (x @ w1.T).tanh()", "a = torch.tanh(nn.functional.linear(x, w1))", "a = torch.tanh(x.mm(w1.t()))"):
        source = SECTIONS["3.1"].replace(FIRST, a)
        space = {"torch": torch, "nn": nn, "check": lambda *answer: None}
        exec(source, space)
        assert check("3.1", space["backward"]).state == "right"


# -- 3.2 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ("b d f c a g h", "nothing but its input"),
        ("b d f a g e h", "nothing but its input"),
        ("b d f c a e h", "1 of the passes that happen is missing"),
        ("d f c a g e h", "1 of the passes that happen is missing"),
        ("b d f c a g e h h", "“A runs backward” is there twice"),
        ("b f d c a g e h", "in which order do they run forward?"),
        ("b d c f a g e h", "Nothing runs backward or again before the loss"),
        ("a g h b d f c e", "Nothing runs backward or again before the loss"),
        ("b d f c a e g h", "as late as can be"),
        ("b d f c e g a h", "Which block stands next to it?"),
        ("b d f a c g e h", "C runs backward before it has run again"),
        ("b d f i c a g e h", "B is not checkpointed"),
    ],
)
def test_slips_in_the_order(order, words):
    says("3.2", order, words)


def test_the_order_may_be_written_in_several_ways():
    for order in ("bdfcageh", "B D F C A G E H", "b, d, f, c, a, g, e, h", list("bdfcageh")):
        assert check("3.2", order).state == "right"
    with pytest.raises(memlab.MemlabError, match="no pass has the letter 'z': write letters from a to i"):
        check("3.2", "b d z")


# -- 3.3 ---------------------------------------------------------------------------------------------------------------

RUN = "y.backward(g)"


@pytest.mark.parametrize(
    ("replacements", "words"),
    [
        ([("return block(x)", "ctx.y = block(x); return ctx.y.clone()")], "more are alive than needed"),
        ([("save_for_backward(x)", "save_for_backward(x, x.repeat(2, 1))")], "more are alive than needed"),
        ([(RUN, "y.backward(g, retain_graph=True); y.backward(g)")], "twice what they should be"),
        ([(RUN, "y.backward(g.abs())")], "what goes into your second backward pass?"),
        ([(RUN, "y.backward(g / len(g))")], "what goes into your second backward pass?"),
        ([("return x.grad, None", "return x.grad * g, None")], "what do you return for x?"),
        ([("return x.grad, None", "return torch.zeros_like(x), None")], "what do you return for x?"),
        ([(RUN, "x.grad = torch.autograd.grad(y, x, g)[0]")], "the block's weights get none"),
        ([("return x.grad, None", "return None, None")], "nothing before it gets a gradient"),
        ([("ctx.block(x)", "ctx.block(x).sum()"), (RUN, "y.backward()")], "goes in nowhere"),
    ],
)
def test_slips_in_the_function(replacements, words):
    says("3.3", changed("3.3", "Checkpointed", *replacements), words)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    "replacements",
    [
        [("with torch.enable_grad():", "if True:")],
        [(".detach().requires_grad_()", "")],
        [(RUN, "y.backward()")],
        [("return x.grad, None", "return x.grad")],
        [("ctx.block = block", "pass")],
    ],
    ids=["no enable_grad", "not detached", "nothing given to backward", "one gradient for two", "no block"],
)
def test_what_autograd_says_itself_passes(replacements):
    answer = changed("3.3", "Checkpointed", *replacements)
    with pytest.raises((RuntimeError, AttributeError)):
        check("3.3", answer)


def test_other_functions_are_right():
    for replacements in (
        [("ctx.save_for_backward(x)", "ctx.x = x"), ("ctx.saved_tensors[0]", "ctx.x")],
        [(RUN, "torch.autograd.backward(y, g)")],
        [("ctx.block(x)", "ctx.block.forward(x)")],
        [("with torch.enable_grad():", "with torch.set_grad_enabled(True):")],
    ):
        assert check("3.3", changed("3.3", "Checkpointed", *replacements)).state == "right"


# -- 3.4 ---------------------------------------------------------------------------------------------------------------


def restored_to_the_first_run(block, x, rng_state):
    torch.set_rng_state(rng_state)
    out = functional_call(block, {name: buffer.clone() for name, buffer in block.named_buffers()}, (x,))
    torch.set_rng_state(rng_state)
    return out


def momentum_zero(block, x, rng_state):
    norms = [module for module in block if isinstance(module, nn.BatchNorm1d)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(rng_state)
        out = block(x)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    return out


def norms_in_eval(block, x, rng_state):
    norms = [module for module in block if isinstance(module, nn.BatchNorm1d)]
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(rng_state)
        for norm in norms:
            norm.eval()
        out = block(x)
        for norm in norms:
            norm.train()
    return out


def left_in_eval(block, x, rng_state):
    return block.eval()(x)


def cut_off(block, x, rng_state):
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(rng_state)
        return functional_call(block, {name: its.clone() for name, its in block.named_buffers()}, (x,)).detach()


def weights_copied_too(block, x, rng_state):
    copies = {name: its.detach().clone() for name, its in block.state_dict().items()}
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(rng_state)
        return functional_call(block, copies, (x,))


def x_detached(block, x, rng_state):
    return defined(SECTIONS["3.4"], "run_again")(block, x.detach(), rng_state)


def forked_and_not_set(block, x, rng_state):
    with torch.random.fork_rng(devices=[]):
        return block(x)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (restored_to_the_first_run, "where the first run left it|moved the program's random stream"),
        (momentum_zero, "how many batches have they counted?"),
        (norms_in_eval, "gives something else than in its first run"),
        (left_in_eval, "left in another mode"),
        (cut_off, "nothing was recorded"),
        (weights_copied_too, "backward takes the gradients to the weights of the copy|own weights do not get"),
        (x_detached, "is there a graph?"),
        (forked_and_not_set, "gives something else than in its first run"),
    ],
)
def test_slips_in_the_second_run(answer, words):
    text = NUMBERS["3.4"].judge(answer).text
    assert any(word in text for word in words.split("|")), text


def test_buffers_put_back_too_late_are_autograds_to_refuse():
    def too_late(block, x, rng_state):
        before = copy.deepcopy(dict(block.named_buffers()))
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(rng_state)
            out = block(x)
        with torch.no_grad():
            for name, buffer in block.named_buffers():
                buffer.copy_(before[name])
        return out

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        check("3.4", too_late)


def test_another_way_to_put_the_stream_back_is_right():
    def by_hand(block, x, rng_state):
        now = torch.get_rng_state()
        torch.set_rng_state(rng_state)
        out = functional_call(block, {name: buffer.clone() for name, buffer in block.named_buffers()}, x)
        torch.set_rng_state(now)
        return out

    assert check("3.4", by_hand).state == "right"


# -- 3.5 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda inputs, saved, regions: sum(inputs), "five blocks in a single region"),
        (lambda inputs, saved, regions: max(saved) + inputs[0], "five blocks in a single region"),
        (lambda inputs, saved, regions: (sum(inputs) + sum(saved)) / len(regions), "each its own region"),
        (lambda inputs, saved, regions: min(sum(saved[b] + inputs[b] for b in r) for r in regions), "its own region"),
        (lambda inputs, saved, regions: [inputs[r[0]] for r in regions], "something else than a number"),
        (lambda inputs, saved, regions: "many", "something else than a number"),
        (
            lambda inputs, saved, regions: (
                sum(inputs[r[0]] for r in regions[:-1]) + max(sum(inputs[b] + saved[b] for b in r) for r in regions)
            ),
            "yours is too high",
        ),
    ],
)
def test_slips_in_what_is_held(answer, words):
    says("3.5", answer, words)


@pytest.mark.parametrize("regions", [[[0], [1], [2], [3], [4]], [[0, 1, 2, 3, 4]], [[0, 1], [2], [3, 4]]], ids=str)
def test_what_is_held_is_what_a_measured_chain_holds(regions):
    def block(hidden):
        return nn.Sequential(nn.Linear(8, hidden, bias=False), nn.Tanh(), nn.Linear(hidden, 8, bias=False))

    blocks = nn.Sequential(*map(block, (64, 16, 64, 32, 16)))
    model = nn.Sequential(nn.Linear(8, 8), blocks, nn.Linear(8, 2))
    chain = Chain.of(memlab.TrainingStep(model, (torch.randn(32, 8), torch.randn(32, 2)), nn.MSELoss()))

    def held(now):
        """Without the state of the random generator, which each region keeps with its input."""
        random = sum(chain.blocks[its[0]].random_bytes for its in regions if ("saved", its[0]) in now.held)
        return now.total("input") + now.total("saved") - random

    most_held = defined(SECTIONS["3.5"], "most_held")
    inputs, saved = [chain.input_bytes] * 5, [block.saved_bytes for block in chain.blocks]
    assert most_held(inputs, saved, regions) == max(map(held, schedule(chain, tuple(map(tuple, regions)))))
