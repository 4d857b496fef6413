"""Lesson 2, saved tensors: what the checks say to answers of learners, beyond the mistakes that they have ready."""

import pytest
import torch
import torch.nn.functional as F
from lessons import LESSONS
from torch.autograd.graph import saved_tensors_hooks

import memlab
from memlab import MemlabError
from memlab.course import check
from memlab.course.lessons import lesson_02

(LESSON,) = (lesson for lesson in LESSONS if lesson.number == 2)


def said(number, answer):
    return check(number, answer).text.removeprefix("not yet. ")


def the_cell(source):
    """What the cell says to its answer: the value of its last line."""
    *_, last = source.splitlines()
    names = {"torch": torch, "check": check, "unpack": lambda kept: kept[0]}
    exec(source.removesuffix(last), names)
    return eval(last, names)


@pytest.mark.parametrize("number", ["2.1", "2.2", "2.3", "2.4"])
def test_the_solution_is_right_and_the_stub_not_attempted(number):
    assert the_cell(LESSON.solutions[number]).text == "right"
    assert the_cell(LESSON.asking[number].source).text.startswith("not attempted yet")


@pytest.mark.parametrize("number", ["2.2", "2.3", "2.4"])
def test_what_a_learner_raises_passes(number):
    def raises(*_):
        raise KeyError("mine")

    class Raises:
        forward = backward = raises

    with pytest.raises(KeyError, match="mine"):
        check(number, Raises if number == "2.4" else raises)


# -- 2.1 ---------------------------------------------------------------------------------------------------------------


def test_the_lines_are_those_of_the_lesson():
    lines = "\n".join(f"{letter}  {line}" for letter, line in lesson_02.LINES.items())
    assert f"```\n{lines}\n```" in LESSON.text


@pytest.mark.parametrize(
    "order", ["e f d c g i a", "edfcgai", "e, d, c, g, a, i, f", ["e", "c", "g", "a", "i", "d", "f"]]
)
def test_each_order_that_works_is_right(order):
    assert said("2.1", order) == "right"


@pytest.mark.parametrize(
    ("order", "hint"),
    [
        ("e f c d i a g", "Line i needs `dz`, which no line before it makes."),
        ("c e f d g i a", "Line c needs `dy`, which no line before it makes."),
        ("e f d g c i a", "Line g needs `dh`, which no line before it makes."),
        ("e f c g a", "No line makes `db1` and `db2` yet."),
        ("e f d", "No line makes `dW1` and `db1` yet."),
        ("e f d c g i a h b", "A weight's gradient is made with what its layer was given: what was layer 2 given?"),
        ("e d f c g b i a", "The derivative of tanh(z) is 1 - tanh(z)**2: which saved tensor is tanh(z)?"),
        ("e d f c g i b a", "`dW1` is not PyTorch's: which line makes it, and from which saved tensors?"),
    ],
)
def test_another_order_is_told_where_it_fails(order, hint):
    assert said("2.1", order) == hint


def test_other_letters_are_refused():
    with pytest.raises(MemlabError, match="there is no line 'k': write letters from a to i"):
        check("2.1", "e k")


# -- 2.2 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [lambda t: t.untyped_storage()._cdata, lambda t: str(t.untyped_storage().data_ptr()), lambda t: t._base],
    ids=["_cdata", "text", "_base"],
)
def test_other_names_of_storages(name):
    outcome = check("2.2", lambda t: (name(t), t.untyped_storage().nbytes()))
    assert outcome.state == ("right" if name(torch.zeros(1)) is not None else "wrong")


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (lambda t: t.untyped_storage().nbytes(), "Return two things"),
        (lambda t: (t.untyped_storage().nbytes(), t.untyped_storage().data_ptr()), "No list holds as much"),
        (
            lambda t: (t.untyped_storage().data_ptr(), t.untyped_storage().nbytes() / 2**20),
            "The number is right in MiB",
        ),
        (lambda t: (t.untyped_storage().data_ptr(), t.untyped_storage().nbytes() * 8), "The number is right in bits"),
        (lambda t: (t.untyped_storage().data_ptr(), 4 * t.numel()), "Too large"),
        (lambda t: (t.dtype, t.untyped_storage().nbytes()), "Too small"),
        (lambda t: (0, t.untyped_storage().nbytes()), "Too small"),
        (lambda t: (id(t), t.numel()), "Too"),
    ],
    ids=range(8),
)
def test_what_is_no_storage_is_told_so(answer, hint):
    assert said("2.2", answer).startswith(hint)


# -- 2.3 ---------------------------------------------------------------------------------------------------------------


def ledger(
    counted, note=torch.Tensor.detach, pack_returns=torch.Tensor.detach, run=lambda f, model, batch: f(model, batch)
):
    """An answer as learners write it: `counted` takes what was saved, with model and batch, to a number."""

    def answer(loss_fn, model, batch):
        seen = []

        def pack(t):
            seen.append(note(t))
            return pack_returns(t)

        with saved_tensors_hooks(pack, lambda t: t):
            run(loss_fn, model, batch)
        return counted(seen, model, batch)

    return answer


def address(t):
    return t.untyped_storage().data_ptr()


def right(seen, model, batch):
    there = {address(t) for t in (*model.parameters(), *model.buffers(), *batch)}
    return sum({address(t): t.untyped_storage().nbytes() for t in seen if address(t) not in there}.values())


def itself(t):
    return t


def without_owned_objects(seen, model, batch):
    owned = {id(t) for t in (*model.parameters(), *model.buffers(), *batch)}
    return sum({address(t): t.untyped_storage().nbytes() for t in seen if id(t) not in owned}.values())


def test_the_truth_is_what_hooks_see():
    assert check("2.3", ledger(right)).text == "right"
    assert check("2.3", ledger(lambda *args: float(right(*args)))).text == "right"
    assert check("2.3", ledger(lambda *args: torch.tensor(right(*args)))).text == "right"


def test_running_backward_too_is_no_mistake():
    assert check("2.3", ledger(right, run=lambda f, model, batch: f(model, batch).backward())).text == "right"


VIEWS = "You counted a storage once per view: compare `untyped_storage().data_ptr()`."
WEIGHTS = "The weights are in your sum: a linear layer saves a view of its weight."


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (ledger(lambda seen, *_: sum(t.nbytes for t in seen)), VIEWS + " That is not all yet."),
        (ledger(lambda seen, *_: sum(t.untyped_storage().nbytes() for t in seen)), VIEWS + " That is not all yet."),
        (ledger(lambda seen, *_: sum(t.numel() for t in seen)), VIEWS + " That is not all yet."),
        (
            ledger(lambda seen, *_: sum({address(t): t.untyped_storage().nbytes() for t in seen}.values())),
            WEIGHTS + " That is not all yet.",
        ),
        (ledger(without_owned_objects, note=itself), WEIGHTS),
        (ledger(lambda *args: right(*args) / 2**10), "The number is right in KiB: give bytes."),
        (ledger(lambda *args: right(*args) // 2**10), "Too small for the MLP"),
        (ledger(lambda *args: right(*args) / 2**20), "The number is right in MiB: give bytes."),
        (ledger(right, run=lambda f, model, batch: None), "Nothing was counted"),
        (ledger(right, run=lambda f, model, batch: model(batch[0])), "The loss keeps something too"),
        (ledger(right, run=lambda f, model, batch: model(batch[0]), note=itself), "The loss keeps something too"),
        (ledger(lambda *args: 3 * right(*args)), "Too large for the MLP"),
        (ledger(lambda *args: right(*args) - 4), "Too small for the MLP"),
    ],
    ids=range(13),
)
def test_what_learners_count_gets_its_hint(answer, hint):
    assert said("2.3", answer).startswith(hint)


def test_sums_that_go_on_from_call_to_call():
    sizes = []

    def answer(loss_fn, model, batch):
        sizes.append(ledger(right)(loss_fn, model, batch))
        return sum(sizes)

    assert said("2.3", answer) == "Right for the MLP, then too large: what is left over from the call before?"


def kept_alive(answer):
    text = said("2.3", answer)
    head, _, rest = text.partition("afterwards ")
    assert head == "Your hook kept the tensors alive: "
    assert rest.endswith(" more are allocated.")
    return memlab.units.parse_bytes(rest.removesuffix(" more are allocated."))


def test_a_hook_that_keeps_tensors_is_told_how_much():
    """A node holds what pack returns and pack itself, with what pack notes; a result holds its node. A list that
    outlives the answer keeps all that is saved."""
    held = []
    cycles = kept_alive(ledger(right, pack_returns=itself))
    assert kept_alive(ledger(right, note=itself)) == cycles
    listed = kept_alive(ledger(lambda seen, *rest: held.append(seen) or right(seen, *rest)))
    assert 0 < cycles <= listed


def test_what_is_wrong_and_keeps_tensors_is_told_what_is_wrong_first():
    def counted(seen, model, batch):
        return right(seen, model, batch) + sum({address(t): t.nbytes for t in batch}.values())

    assert said("2.3", ledger(counted, pack_returns=itself)) != "right"
    assert said("2.3", ledger(lambda seen, *_: len(seen), pack_returns=itself)).startswith("Too small")


# -- 2.4 ---------------------------------------------------------------------------------------------------------------


def leaky(keep, backward):
    class Answer:
        def forward(x):
            y = torch.where(x > 0, x, 0.1 * x)
            return y, keep(x, y)

    Answer.backward = backward
    return Answer


def sloped(dy, positive):
    return torch.where(positive, dy, 0.1 * dy)


@pytest.mark.parametrize(
    ("keep", "backward"),
    [
        (lambda x, y: y > 0, sloped),
        (lambda x, y: x <= 0, lambda dy, kept: sloped(dy, ~kept)),
        (lambda x, y: (x > 0,), lambda dy, kept: sloped(dy, kept[0])),
        (lambda x, y: {"mask": x > 0}, lambda dy, kept: sloped(dy, kept["mask"])),
        (lambda x, y: x.sign().to(torch.int8), lambda dy, kept: sloped(dy, kept > 0)),
        (lambda x, y: x > 0, lambda dy, kept: dy * (0.1 + 0.9 * kept)),
    ],
    ids=range(6),
)
def test_a_byte_an_element_is_enough(keep, backward):
    assert said("2.4", leaky(keep, backward)) == "right"


@pytest.mark.parametrize(
    ("keep", "backward", "hint"),
    [
        (
            lambda x, y: (x > 0).float(),
            lambda dy, k: sloped(dy, k > 0),
            "The gradient is right, and what is kept has two values",
        ),
        (
            lambda x, y: torch.where(x > 0, 1, 0.1),
            lambda dy, k: dy * k,
            "The gradient is right, and what is kept has two values",
        ),
        (lambda x, y: (x > 0, y), lambda dy, k: sloped(dy, k[0]), "The gradient is right, and 5 bytes an element"),
        (lambda x, y: x > 0, lambda dy, k: dy, "The gradient is not PyTorch's"),
        (lambda x, y: x > 0, lambda dy, k: sloped(dy, k).sum(), "The gradient must have the input's shape"),
        (lambda x, y: None, lambda dy, k: sloped(dy, dy > 0), "The gradient is not PyTorch's"),
        (lambda x, y: x > 0, lambda dy, k: torch.where(k, dy, -0.1 * dy), "The gradient is not PyTorch's"),
    ],
    ids=range(7),
)
def test_what_is_too_much_or_wrong_is_told_so(keep, backward, hint):
    assert said("2.4", leaky(keep, backward)).startswith(hint)


def test_a_changed_result_is_told_so():
    class Answer:
        def forward(x):
            return F.relu(x), x > 0

        def backward(dy, kept):
            return sloped(dy, kept)

    assert said("2.4", Answer).startswith("The result `y` has changed")


# -- the quiz ----------------------------------------------------------------------------------------------------------


def kept_slots(run):
    with memlab.record() as trace:
        run().backward()
    return {slot for tensor in trace.saved for slot in (tensor.slot, *tensor.shares_with)}, trace.saved_bytes


def test_cross_entropy_keeps_its_log_probabilities_alone():
    logits = torch.zeros(64, 1000, requires_grad=True)
    slots, nbytes = kept_slots(lambda: F.cross_entropy(logits, torch.zeros(64, dtype=torch.int64)))
    assert {"LogSoftmaxBackward0.result", "NllLossBackward0.self"} <= slots
    assert logits.nbytes <= nbytes < 1.01 * logits.nbytes


def test_behind_a_frozen_first_layer_gelu_keeps_nothing():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
    slots, _ = kept_slots(lambda: model(torch.ones(2, 4)).sum())
    frozen, _ = kept_slots(
        lambda: model.requires_grad_(True)[0].requires_grad_(False) and model(torch.ones(2, 4)).sum()
    )
    assert "GeluBackward0.self" in slots - frozen
    assert "AddmmBackward0.mat1" in frozen
