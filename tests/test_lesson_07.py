"""Lesson 7: its solutions are right, and each wrong answer is told what is wrong with it.

The answers below are as people write them: each section of the solutions, the cells of the notebook as they stand, the
mistakes that the lesson knows, and slips that it does not know.
"""

import linecache
from pathlib import Path

import nbformat
import numpy as np
import pytest
import torch
from torch import nn

import memlab
from memlab.course import check, quiz
from memlab.course.lessons.lesson_07 import EXERCISES, QUIZ

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
SECTIONS = {
    name: source
    for name, _, source in (
        part.partition("\n")
        for part in (NOTEBOOKS / "solutions/07_gradients_on_the_fly.py").read_text("utf-8").split("# %% ")[1:]
    )
}
NUMBERS = {exercise.number: exercise for exercise in EXERCISES}
every_exercise = pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.number)
NAMES = {"7.1": "make_hook", "7.3": "step_in_backward", "7.4": "optimizer_peak", "7.5": "make_hooks"}


def outcome_of(source):
    """What the check in a cell says."""
    said = []
    linecache.cache["cell"] = (len(source), None, source.splitlines(keepends=True), "cell")  # as a notebook has it
    space = {"torch": torch, "np": np, "check": lambda *answer: said.append(check(*answer))}
    exec(compile(source, "cell", "exec"), space)
    (outcome,) = said
    return outcome


def changed(number, *replacements):
    """What the solution defines, with some of its text replaced."""
    source = SECTIONS[number]
    for old, new in replacements:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    space = {"torch": torch, "np": np, "check": lambda *answer: None}
    exec(source, space)
    return space[NAMES[number]]


def says(number, answer, words):
    outcome = check(number, answer)
    assert outcome.state == "wrong"
    assert words in outcome.text


# -- all exercises -----------------------------------------------------------------------------------------------------


@every_exercise
def test_its_solution_is_right(exercise):
    assert outcome_of(SECTIONS[exercise.number]).state == "right"


@every_exercise
def test_each_mistake_has_its_own_hint(exercise):
    assert len(exercise.mistakes) >= 3
    for mistake in exercise.mistakes:
        outcome = exercise.judge(mistake.answer)
        assert outcome.state == "wrong"
        assert outcome.text == f"not yet. {mistake.hint}"


def test_untouched_cells_are_not_attempted():
    cells = nbformat.read(NOTEBOOKS / "07_gradients_on_the_fly.ipynb", as_version=4).cells
    stubs = [cell.source for cell in cells if cell.source.startswith("# Exercise 7.")]
    assert len(stubs) == len(EXERCISES)
    for stub in stubs:
        assert outcome_of(stub).text == "not attempted yet"


def test_the_quiz_has_its_answers():
    line = next(line for line in SECTIONS["quiz"].splitlines() if line.startswith("answers"))
    assert quiz(7, line.split('"')[1]).right == len(QUIZ)


# -- 7.1 ---------------------------------------------------------------------------------------------------------------

UPDATE, LET_GO = "parameter.sub_(lr * parameter.grad)", "parameter.grad = None"


@pytest.mark.parametrize(
    ("update", "let_go", "words"),
    [
        ("parameter = parameter - lr * parameter.grad", LET_GO, "which operation changes the numbers"),
        ("parameter - lr * parameter.grad", LET_GO, "which operation changes the numbers"),
        ("parameter.add_(lr * parameter.grad)", LET_GO, "The loss climbs"),
        ("parameter.sub_(parameter.grad)", LET_GO, "what is `lr` for?"),
        ("parameter.sub_(2 * lr * parameter.grad)", LET_GO, "2 times what it should be"),
        ("parameter.sub_(lr / parameter.grad)", LET_GO, "which two tensors"),
        ("parameter.sub_(0.1 * parameter.grad)", LET_GO, "the hook's `lr`"),
        (UPDATE, "parameter.grad.zero_()", "zeros is as large as any other"),
        (UPDATE, "parameter.grad = torch.zeros_like(parameter)", "zeros is as large as any other"),
        (UPDATE, "pass", "the next backward pass adds to it"),
        (UPDATE, "del parameter", "the next backward pass adds to it"),
    ],
)
def test_slips_in_the_hook(update, let_go, words):
    says("7.1", changed("7.1", (UPDATE, update), (LET_GO, let_go)), words)


@pytest.mark.parametrize(
    "update",
    [
        "parameter -= lr * parameter.grad",
        "parameter.data -= lr * parameter.grad",
        "parameter.add_(parameter.grad, alpha=-lr)",
        "parameter.copy_(parameter - lr * parameter.grad)",
        "torch.optim.SGD([parameter], lr=lr).step()",
    ],
)
def test_other_updates_are_right(update):
    assert check("7.1", changed("7.1", (UPDATE, update))).state == "right"


def test_a_gradient_let_go_before_it_is_read_is_pythons_to_refuse():
    with pytest.raises(TypeError):
        check("7.1", changed("7.1", (UPDATE, LET_GO + "; " + UPDATE)))


# -- 7.2 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ("g c b f e a d", "Two gradients are there together"),
        ("g c b f a e d", "what is there to wait for?"),
        ("g c b a d e f", "Two gradients are there together"),
        ("g c f b e a h d", "Then can all be there together?"),
        ("g f c e b d a", "before its gradient is born"),
        ("g b e c f a d", "which layer does it come to first?"),
        ("c g f b e a d", "Something happens before the loss"),
        ("g c f b e a", "1 of the things that happen is missing"),
        ("c f b e a d", "1 of the things that happen is missing"),
        ("g c f b e a d d", "is there twice"),
    ],
)
def test_slips_in_the_order(order, words):
    says("7.2", order, words)


def test_the_order_may_be_written_in_several_ways():
    for order in ("gcfbead", "G C F B E A D", "g, c, f, b, e, a, d", list("gcfbead")):
        assert check("7.2", order).state == "right"
    with pytest.raises(memlab.MemlabError, match="no event has the letter 'z': write letters from a to h"):
        check("7.2", "g z")


# -- 7.3 ---------------------------------------------------------------------------------------------------------------

TURN = "velocity.mul_(momentum).add_(parameter.grad)"
MOVE = "parameter.sub_(lr * velocity)"
GIVEN_BACK = "parameter.grad = None"
REMOVED = "handle.remove()"
LOOK = "velocity = velocities[parameter]"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (TURN, "velocity = momentum * velocity + parameter.grad", "without momentum"),
        (LOOK, "velocity = torch.zeros_like(parameter)", "without momentum"),
        (LOOK, "velocity = velocities[next(iter(velocities))]", "share one velocity"),
        (TURN, "velocity.mul_(momentum).add_(momentum * parameter.grad)", "0.9 times what it should be"),
        (TURN, "velocity.mul_(1 - momentum).add_(parameter.grad)", "remember from the step before"),
        (TURN, "velocity.add_(parameter.grad).mul_(momentum)", "0.9 times what it should be"),
        (TURN, "velocity.mul_(momentum).add_((1 - momentum) * parameter.grad)", "1 - momentum"),
        (TURN, "velocity.mul_(momentum).sub_(parameter.grad)", "The loss climbs"),
        (MOVE, "parameter.add_(lr * velocity)", "The loss climbs"),
        (MOVE, "parameter.sub_(velocity)", "what is `lr` for?"),
        (MOVE, "parameter = parameter - lr * velocity", "no parameter moves"),
        (GIVEN_BACK, "parameter.grad.zero_()", "the gradients stay"),
        (GIVEN_BACK, "pass", "backward adds to it"),
        (REMOVED, "pass", "takes no hook away"),
        (REMOVED, "handles[-1].remove()", "takes one hook away, the last"),
        (REMOVED, "handles[0].remove()", "which hooks are left?"),
        ("return remove", "return handles", "What you return is no function"),
    ],
)
def test_slips_in_momentum(old, new, words):
    says("7.3", changed("7.3", (old, new)), words)


def test_gradients_that_are_kept_elsewhere_are_seen():
    keeps = (
        "    def hook(parameter):",
        "    kept = []\n\n    def hook(parameter):\n        kept.append(parameter.grad)",
    )
    says("7.3", changed("7.3", keeps), "more than the velocities stay")


def test_a_hook_for_a_frozen_parameter_is_pytorchs_to_refuse():
    with pytest.raises(RuntimeError, match="doesn't require gradient"):
        check("7.3", changed("7.3", (" if its.requires_grad", "")))


def test_other_ways_of_momentum_are_right():
    def as_torch_does(model, lr, momentum):
        handles = []
        for parameter in filter(lambda its: its.requires_grad, model.parameters()):
            optimizer = torch.optim.SGD([parameter], lr=lr, momentum=momentum)

            def hook(parameter, optimizer=optimizer):
                optimizer.step()
                optimizer.zero_grad()

            handles.append(parameter.register_post_accumulate_grad_hook(hook))
        return lambda: [handle.remove() for handle in handles]

    def rate_in_the_velocity(model, lr, momentum):
        handles = []
        for parameter in model.parameters():
            if not parameter.requires_grad:
                continue
            velocity = torch.zeros_like(parameter)

            def hook(parameter, velocity=velocity):
                velocity.mul_(momentum).sub_(lr * parameter.grad)
                parameter += velocity
                parameter.grad = None

            handles.append(parameter.register_post_accumulate_grad_hook(hook))
        return lambda: [handle.remove() for handle in handles]

    assert check("7.3", as_torch_does).state == "right"
    assert check("7.3", rate_in_the_velocity).state == "right"


# -- 7.4 ---------------------------------------------------------------------------------------------------------------

FACTOR, IN_TURN, COPY = "(2 + state)", "2 * size + before", "temporaries = sum(sizes)"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (FACTOR, "(1 + state)", "one of the two is missing"),
        (FACTOR, "state", "Begin with plain SGD"),
        (FACTOR, "(3 + state)", "Begin with plain SGD"),
        ('"momentum": 1', '"momentum": 2', "Begin with SGD with momentum"),
        ('"momentum": 1', '"momentum": 0', "Begin with SG"),
        (".get(kind, 2)", ".get(kind, 1)", "AdamW keeps two numbers"),
        (".get(kind, 2)", ".get(kind, 3)", "Begin with fused AdamW"),
        (COPY, "temporaries = 2 * sum(sizes)", "Begin with AdamW with foreach"),
        (COPY, "temporaries = max(sizes)", "Begin with AdamW with foreach"),
        (IN_TURN, "3 * size", "Right for parameters of one size"),
        ("[0, *sizes]", "[sizes[-1], *sizes]", "which parameter is before the first?"),
        ('if kind == "foreach"', 'if kind == "fused"', "the other way round"),
        (IN_TURN, "2 * size", "two temporaries of the parameter's size"),
        (IN_TURN, "size + before", "All are right but the loop. There yours is too low"),
        (IN_TURN, "2 * size + 2 * before", "All are right but the loop. There yours is too high"),
        ("max(2", "sum(2", "You add up"),
        ("return (2 + state) * sum(sizes) + temporaries", "return temporaries", "temporaries alone"),
        ("return (2 + state) * sum(sizes) + temporaries", "return str(temporaries)", "something else than a number"),
    ],
)
def test_slips_in_the_optimizers_peak(old, new, words):
    says("7.4", changed("7.4", (old, new)), words)


def test_a_float_is_a_number_of_bytes_too():
    right = changed("7.4")
    assert check("7.4", lambda sizes, kind: float(right(sizes, kind))).state == "right"


def test_the_lessons_example_of_the_peak():
    assert changed("7.4")([4, 8], "loop") == 68


# -- 7.5 ---------------------------------------------------------------------------------------------------------------

SKIPPED = "tensor.nbytes < smallest or tensor.untyped_storage().data_ptr() in own"
NAME = 'folder / f"{len(paths)}.npy"'
RETURNED = "return paths[-1]"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (SKIPPED, "tensor.nbytes < smallest", "The weights go out too"),
        (SKIPPED, "tensor.nbytes < smallest or tensor.is_leaf and tensor.requires_grad", "Weights go out all the same"),
        (SKIPPED, SKIPPED.replace("<", "<="), "exactly `smallest` bytes"),
        (SKIPPED, SKIPPED.replace("nbytes", "numel()"), "number of elements"),
        (SKIPPED, SKIPPED.replace("<", ">="), "in which direction"),
        (SKIPPED, "False", "Everything goes out"),
        (SKIPPED, "True", "stayed. No parameter"),
        (SKIPPED, SKIPPED.split(" or ")[1], "What is `smallest` for?"),
        (SKIPPED, SKIPPED.replace(" or ", " and "), "went out"),
        (SKIPPED, SKIPPED.replace(" in own", " not in own"), "stayed. No parameter"),
        (NAME, 'folder / "tensor.npy"', "one file, each over the one before"),
        (NAME, 'folder / f"{tensor.untyped_storage().data_ptr()}.npy"', "An address is not"),
        (RETURNED, "kept.append(tensor.detach()); return paths[-1]", "something holds them still"),
        ("np.load(packed)", "2 * np.load(packed)", "The gradients are not those"),
        ("np.load(packed)", "np.zeros_like(np.load(packed))", "The gradients are not those"),
        (RETURNED, "np.save(folder / f'{len(paths)}b', tensor.detach()); return paths[-1]", "became 2 files"),
    ],
)
def test_slips_in_offloading(old, new, words):
    says("7.5", changed("7.5", (old, new), ("    paths = []", "    paths, kept = [], []")), words)


def test_other_ways_to_offload_are_right():
    def by_torch(model, folder, smallest):
        def pack(tensor):
            owned = any(torch._C._is_alias_of(tensor, its) for its in model.parameters())
            if owned or tensor.numel() * tensor.element_size() < smallest:
                return None, tensor.detach()
            path = folder / str(len(list(folder.iterdir())))
            torch.save(tensor.detach().clone(), path)
            return path, None

        def unpack(packed):
            path, tensor = packed
            return tensor if path is None else torch.load(path)

        return pack, unpack

    assert check("7.5", by_torch).state == "right"


# -- what the lesson says ----------------------------------------------------------------------------------------------


def test_the_hook_of_a_shared_weight_is_called_once_with_the_whole_gradient():
    weight, x = nn.Parameter(torch.randn(3, 3, dtype=torch.float64)), torch.randn(2, 3, dtype=torch.float64)
    (whole,) = torch.autograd.grad(torch.tanh(torch.tanh(x @ weight) @ weight).sum(), weight)
    seen = []
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    torch.tanh(torch.tanh(x @ weight) @ weight).sum().backward()
    (once,) = seen
    assert torch.allclose(once, whole)
