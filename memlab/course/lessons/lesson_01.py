"""Lesson 01, where memory goes: the static part, the phases of a step, how activations grow, and where they overtake.

What answers are held against is counted in other ways than a learner is asked to count: tensors of real steps,
gradients seen by a hook, simulations, and a search.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ... import zoo
from ...errors import MemlabError
from ...simulate import simulate
from ...step import TrainingStep
from ..exercises import Exercise, Mistake
from ..quizzes import Option, Question

Saved: TypeAlias = Callable[[int], int]

_SEED = 0
_ROUNDS = 3


# -- 1.1: the static part ----------------------------------------------------------------------------------------------

_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.1),
    "SGD with momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": torch.optim.AdamW,
}
_SHAPES: tuple[list[tuple[int, ...]], ...] = ([(20, 30), (20,)], [(50, 8)], [(5, 3), (5,), (5,)])
_CASES = tuple(itertools.product(_SHAPES, _OPTIMIZERS))


def _static_by(answer: Any) -> list[Any]:
    return [answer([torch.zeros(shape) for shape in shapes], name) for shapes, name in _CASES]


@functools.cache
def _static_counted() -> list[int]:
    """The tensors that stand there after a real step, but for step counters."""
    return [_after_a_step(shapes, _OPTIMIZERS[name]) for shapes, name in _CASES]


def _after_a_step(shapes: list[tuple[int, ...]], make: Callable[[Any], torch.optim.Optimizer]) -> int:
    parameters = [torch.zeros(shape, requires_grad=True) for shape in shapes]
    optimizer = make(parameters)
    sum(parameter.square().sum() for parameter in parameters).backward()  # type: ignore[union-attr]
    optimizer.step()
    nbytes = 0
    for parameter in parameters:
        of_its_shape = [t for t in optimizer.state[parameter].values() if getattr(t, "shape", None) == parameter.shape]
        nbytes += sum(tensor.nbytes for tensor in (parameter, parameter.grad, *of_its_shape) if tensor is not None)
    return nbytes


def _static_as(*each: float) -> Callable[[list[Tensor], str], float]:
    """An answer to 1.1 from the bytes for each parameter, by optimizer."""
    by_name = dict(zip(_OPTIMIZERS, each, strict=True))
    return lambda parameters, name: by_name[name] * sum(parameter.numel() for parameter in parameters)


def _of_static(result: list[Any], truth: list[int]) -> str | None:
    wrong = dict.fromkeys(name for (_, name), found, right in zip(_CASES, result, truth, strict=True) if found != right)
    right_for = [name for name in _OPTIMIZERS if name not in wrong]
    if right_for:
        return (
            f"It is right for {' and '.join(right_for)}, and not for {' and '.join(wrong)}. What does each of them "
            "keep for a parameter from step to step?"
        )
    ratios = [found / right for found, right in zip(result, truth, strict=True)]
    if math.isclose(min(ratios), max(ratios)):
        return f"Each result is {ratios[0]:.3g} times the bytes that stand there: which factor is missing, or too much?"
    if max(ratios) < 1:
        return (
            "Your sums are too small. Which tensors of a step are as large as the parameters? Name them phase by phase."
        )
    return (
        "Take plain SGD first, which keeps nothing: your result should be what parameters and gradients take. Then ask "
        "what one more number for each parameter adds."
    )


STATIC = Exercise(
    number="1.1",
    kind="fill",
    task="Return the bytes of the static part: parameters, gradients and the optimizer's state, all in float32.",
    difficulty=1,
    minutes=5,
    objective="compute the static part of a training step from its parameters and its optimizer",
    run=_static_by,
    truth=_static_counted,
    mistakes=(
        Mistake(
            _static_as(2, 3, 4),
            "You count numbers. How many bytes does a number in float32 take?",
        ),
        Mistake(
            _static_as(4, 6, 8),
            "That would do in 16 bits. How many bytes does a number in float32 take?",
        ),
        Mistake(
            _static_as(4, 8, 12),
            "Something as large as the parameters is missing: go through the step once more. What is there before it, "
            "what does backward make, what does the optimizer keep?",
        ),
        Mistake(
            _static_as(0, 4, 8),
            "That is the optimizer's state alone: plain SGD would need no memory at all.",
        ),
        Mistake(
            _static_as(4, 4, 4),
            "Those are the parameters alone. What stands beside them when the optimizer steps?",
        ),
        Mistake(
            _static_as(8, 8, 8),
            "Parameters and gradients are there. What do two of the three optimizers keep besides?",
        ),
        Mistake(
            _static_as(4, 8, 16),
            "Gradients are in AdamW's sum and not in the other two: does backward make them for AdamW alone?",
        ),
        Mistake(
            _static_as(16, 16, 16),
            "Every optimizer gets the same from you. Do all three keep as much from step to step?",
        ),
        Mistake(
            _static_as(8, 16, 24),
            "A number that the optimizer keeps takes as much as a parameter: you count it twice.",
        ),
        Mistake(
            _static_as(8, 12, 12),
            "AdamW and SGD with momentum are the same to you. How many averages does AdamW keep for each parameter?",
        ),
    ),
    diagnose=_of_static,
)


# -- 1.2: what is alive in which phase ---------------------------------------------------------------------------------

_LINES = {
    "a": "loss.backward()",
    "b": "optimizer.zero_grad()",
    "c": "loss = loss_fn(model, batch)",
    "d": "optimizer.step()",
}
_LOOPS = ((6, 3), (10, 4))  # inputs and classes of the networks that they train
_NO_LOSS, _CHANGED = "no loss to go back from", "the weights are no longer those of the forward pass"


def _rounds(order: str) -> Any:
    """The gradients' bytes at the end of each forward pass, and the parameters after the last round."""
    letters = [letter for letter in order.lower() if letter.isalpha()]
    if sorted(letters) != sorted(_LINES):
        raise MemlabError(f"{order!r}: write each of the letters a, b, c and d once, such as 'a b c d'")
    results = []
    for names, alive in itertools.starmap(_loop, _LOOPS):
        for _ in range(_ROUNDS):
            for letter in letters:
                if letter == "a" and "loss" not in names:
                    return _NO_LOSS
                try:
                    exec(_LINES[letter], names)
                except RuntimeError:  # of PyTorch's: backward finds weights that were changed in place
                    return _CHANGED
        results.append((alive, _flat(names["model"])))
    return results


def _loop(inputs: int, classes: int) -> tuple[dict[str, Any], list[int]]:
    """What the lines of a training loop name, and a list that each forward pass adds the gradients' bytes to."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(_SEED)
        model = zoo.MLP(inputs=inputs, width=8, depth=2, classes=classes)
        batch = torch.randn(5, inputs), torch.arange(5) % classes
    alive: list[int] = []

    def count(*_: Any) -> None:
        alive.append(sum(p.grad.nbytes for p in model.parameters() if p.grad is not None))

    model.register_forward_hook(count)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"model": model, "batch": batch, "optimizer": optimizer, "loss_fn": zoo.classification_loss}, alive


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@functools.cache
def _trained() -> Any:
    """Gradient descent written out, without an optimizer, and no gradient in any forward pass."""
    results = []
    for names, _ in itertools.starmap(_loop, _LOOPS):
        model, batch = names["model"], names["batch"]
        for _ in range(_ROUNDS):
            parameters = list(model.parameters())
            gradients = torch.autograd.grad(zoo.classification_loss(model, batch), parameters)
            with torch.no_grad():
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter -= 0.1 * gradient
        results.append(([0] * _ROUNDS, _flat(model)))
    return results


@functools.cache
def _untrained() -> Tensor:
    """The parameters that the first loop begins with."""
    names, _ = _loop(*_LOOPS[0])
    return _flat(names["model"])


def _of_order(result: Any, truth: Any) -> str | None:
    alive, parameters = result[0]
    still = f" And {alive[-1]} bytes of gradients are alive at the end of the last forward pass." if alive[-1] else ""
    if torch.equal(parameters, _untrained()):
        return (
            f"After {_ROUNDS} rounds the parameters are as they were: what does the optimizer find in `.grad`?{still}"
        )
    if not torch.allclose(parameters, truth[0][1]):
        return f"It trains, but not as {_ROUNDS} rounds should: in which round is each gradient used?{still}"
    return f"It trains.{still}"


ORDER = Exercise(
    number="1.2",
    kind="order",
    task="Order the lines of a training loop's body so that it trains and no gradient is alive in any forward pass.",
    difficulty=2,
    minutes=6,
    objective="say what is alive in each phase of a step, and read it from a trace",
    run=_rounds,
    truth=_trained,
    mistakes=(
        Mistake(
            "a c d b",
            "In the first round your backward comes before there is a loss: which line makes the graph that it goes "
            "through?",
        ),
        Mistake(
            "c b a d",
            "It trains. But from the second round on, the gradients of the round before are alive while the forward "
            "pass piles activations up. What needs them after the optimizer has stepped?",
        ),
        Mistake(
            "c a b d",
            "The parameters stay as they were: when your optimizer steps, the gradients are gone.",
        ),
        Mistake(
            "c d b a",
            "PyTorch refuses: your optimizer changes weights between forward and backward, and backward needs them as "
            "the forward pass saw them.",
        ),
        Mistake(
            "d b c a",
            "In the first round your optimizer finds no gradients, and those of the last round nobody uses: it is a "
            "step late.",
        ),
    ),
    diagnose=_of_order,
)


# -- 1.3: how parameters and activations grow --------------------------------------------------------------------------

_SIZES = ("batch", "depth", "width", "context")
_FACTORS = ((3, 1, 1, 1), (1, 3, 1, 1), (1, 1, 3, 1), (1, 1, 1, 3), (2, 2, 3, 2))


def _grown_by(answer: Any) -> list[Any]:
    return [answer(*factors) for factors in _FACTORS]


@functools.cache
def _grown() -> list[tuple[int, int]]:
    """From simulated blocks. What does not grow along (biases, the norms' means) is under a twentieth: rounded away."""
    parameters, activations = _of_blocks(1, 1, 1, 1)
    return [
        (round(more_parameters / parameters), round(more_activations / activations))
        for more_parameters, more_activations in (_of_blocks(*factors) for factors in _FACTORS)
    ]


def _of_blocks(batch: int, depth: int, width: int, context: int) -> tuple[int, int]:
    """Bytes of parameters and of activations of a few blocks whose sizes are multiplied so."""

    def blocks() -> nn.Module:
        return nn.Sequential(*(zoo.Block(64 * width, heads=2, dropout=0.0) for _ in range(depth)))

    tokens = torch.zeros(2 * batch, 8 * context, 64 * width)
    step = TrainingStep(blocks, tokens, lambda model, x: model(x * 1).sum())  # x * 1: else the first input is the batch
    trace = simulate(step, device="cpu")
    return trace.by_category("forward")["parameters"], trace.saved_bytes


def _of_growth(result: list[Any], truth: list[tuple[int, int]]) -> str | None:
    for factors, found, right in zip(_FACTORS, result, truth, strict=True):
        changed = " and ".join(
            f"{size} becomes {factor} times as large"
            for size, factor in zip(_SIZES, factors, strict=True)
            if factor > 1
        )
        for what, mine, real in zip(("parameters", "activations"), found, right, strict=True):
            if mine != real:
                return f"Where {changed}, your {what} become {mine} times as many bytes. What did the sweep show?"
    return None


GROWTH = Exercise(
    number="1.3",
    kind="fill",
    task="Say how many times as many bytes the blocks' parameters and activations become when sizes are multiplied.",
    difficulty=1,
    minutes=5,
    objective="predict how activations grow with batch, depth, width and context",
    run=_grown_by,
    truth=_grown,
    mistakes=(
        Mistake(
            lambda b, d, w, c: (d * w, b * d * w * c),
            "Your parameters grow as the width does. A linear layer from W numbers to W: how many weights has it?",
        ),
        Mistake(
            lambda b, d, w, c: (2 * d * w, b * d * w * c),
            "Your parameters double where no size has changed. At twice the width four times as many: and at three "
            "times the width?",
        ),
        Mistake(
            lambda b, d, w, c: (d * w**2, b * d * w**2 * c),
            "Your activations grow as the square of the width. How many numbers of a token does a layer keep: a vector "
            "or a matrix?",
        ),
        Mistake(
            lambda b, d, w, c: (d * w**2, b * d * w * c**2),
            "Your activations grow as the square of the context: that is attention which keeps its weights. What did "
            "the measurement say of this one?",
        ),
        Mistake(
            lambda b, d, w, c: (b * d * w**2, b * d * w * c),
            "Your parameters grow with the batch. Are there more of them when more samples come in?",
        ),
        Mistake(
            lambda b, d, w, c: (c * d * w**2, b * d * w * c),
            "Your parameters grow with the context. A block treats every token with the same weights.",
        ),
        Mistake(
            lambda b, d, w, c: (b * c * d * w**2, b * d * w * c),
            "Your parameters grow with the number of tokens. Are there more of them when more tokens come in?",
        ),
        Mistake(
            lambda b, d, w, c: (d * w**2, b * w * c),
            "Your activations do not grow with the depth: does a block drop what it keeps before the next one runs?",
        ),
        Mistake(
            lambda b, d, w, c: (w**2, b * d * w * c),
            "Your parameters do not grow with the depth: do the blocks share theirs?",
        ),
        Mistake(
            lambda b, d, w, c: (d * w**2, b + d + w + c),
            "You add factors of growth. Twice the batch of a net twice as deep: is that four times, or more than that?",
        ),
        Mistake(
            lambda b, d, w, c: (b * d * w * c, d * w**2),
            "You have the two the wrong way round: which of them depends on the batch?",
        ),
    ),
    diagnose=_of_growth,
)


# -- 1.4: where activations overtake -----------------------------------------------------------------------------------


class Centred(nn.Linear):
    """A linear layer whose weight is centred before use: backward needs what comes out, at any batch size."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight - self.weight.mean(dim=1, keepdim=True), self.bias)


def _mlp(batch: int) -> TrainingStep:
    data = torch.zeros(batch, 64), torch.zeros(batch, dtype=torch.int64)
    return TrainingStep(lambda: zoo.MLP(width=96, depth=2), data, zoo.classification_loss)


def _centred(batch: int) -> TrainingStep:
    def build() -> nn.Module:
        return nn.Sequential(Centred(48, 200), nn.ReLU(), Centred(200, 48))

    return TrainingStep(build, torch.zeros(batch, 48), lambda model, x: model(x).square().mean())


def _gpt(batch: int) -> TrainingStep:
    return zoo.gpt_step(batch=batch, context=8, width=32, depth=1, lazy=True)


_MODELS = ((_mlp, 2), (_centred, 0), (_gpt, 1))  # and the numbers that its optimizer keeps for each parameter


def _first_by(answer: Any) -> list[Any]:
    return [answer(numbers, kept, saved) for numbers, kept, saved in _models()]


@functools.cache
def _models() -> list[tuple[int, int, Saved]]:
    found = []
    for make, kept in _MODELS:
        one, two = simulate(make(1), device="cpu"), simulate(make(2), device="cpu")
        numbers = one.by_category("forward")["parameters"] // 4
        found.append((numbers, kept, _line(one.saved_bytes, two.saved_bytes)))
    return found


def _line(one: int, two: int) -> Saved:
    """Saved bytes by batch size, through those at 1 and at 2: exact, as simulations at others show (the tests)."""

    def saved(batch: int) -> int:
        return one + (batch - 1) * (two - one)

    return saved


@functools.cache
def _first() -> list[int]:
    """By trying one batch size after the other."""
    return [
        next(batch for batch in itertools.count(1) if saved(batch) > _full(numbers, kept))
        for numbers, kept, saved in _models()
    ]


def _crossing(static: Callable[[int, int], int], more: int = 1, proportional: bool = False) -> Any:
    """An answer to 1.4 from a static part, and where it ends: `more` than the last batch size that is not enough."""

    def first(numbers: int, kept: int, saved: Saved) -> int:
        each = saved(1) if proportional else saved(2) - saved(1)
        always = saved(1) - each
        return (static(numbers, kept) - always) // each + more

    return first


def _full(numbers: int, kept: int) -> int:
    return 4 * numbers * (2 + kept)


_ALWAYS = (
    "You fill the whole static part with what each sample adds. Some bytes may be saved at any batch size: what do "
    "saved(1) and saved(2) say together?"
)


def _of_first(result: list[Any], truth: list[int]) -> str | None:
    if not all(float(batch).is_integer() for batch in result):
        return "A batch holds whole samples: which whole number is the first that is enough?"
    if any(batch < 1 for batch in result):
        return "A batch holds one sample at least: is what you take off larger than what you take it from?"
    wrong = [
        (int(batch), numbers, kept, saved)
        for batch, right, (numbers, kept, saved) in zip(result, truth, _models(), strict=True)
        if batch != right
    ]
    batch, numbers, kept, saved = wrong[0]
    each = saved(2) - saved(1)
    if each != saved(1) and abs(batch - _full(numbers, kept) / each) <= 1:
        return _ALWAYS
    share = 100 * saved(batch) / _full(numbers, kept)
    return (
        f"For a model of {numbers:,} parameters, with {kept} numbers kept for each, you say {batch}: activations are "
        f"then {share:.0f} % of the static part."
    )


CROSSING = Exercise(
    number="1.4",
    kind="write",
    task="Return the smallest batch size at which the saved bytes are more than the static part.",
    difficulty=2,
    minutes=8,
    objective="find the batch size at which activations overtake the static part",
    run=_first_by,
    truth=_first,
    mistakes=(
        Mistake(
            _crossing(_full, proportional=True),
            "You take saved(1) for what each sample adds. Part of it may be there at any batch size: what do saved(1) "
            "and saved(2) say together?",
        ),
        Mistake(lambda numbers, kept, saved: _full(numbers, kept) // (saved(2) - saved(1)) + 1, _ALWAYS),
        Mistake(
            _crossing(_full, more=0),
            "At your batch size the activations are still below the static part.",
        ),
        Mistake(
            _crossing(_full, more=2),
            "It is enough, but one sample less is enough too.",
        ),
        Mistake(
            _crossing(lambda numbers, kept: numbers * (2 + kept)),
            "Your static part is in numbers, and `saved` is in bytes.",
        ),
        Mistake(
            _crossing(lambda numbers, kept: numbers * (8 + kept)),
            "Parameters and gradients are in bytes in your static part. `kept` counts numbers.",
        ),
        Mistake(
            _crossing(lambda numbers, kept: 4 * numbers * (1 + kept)),
            "Your static part lacks something as large as the parameters: what does backward make?",
        ),
        Mistake(
            _crossing(lambda numbers, kept: 4 * numbers),
            "You compare with the parameters alone. What else does the batch size leave as it is?",
        ),
        Mistake(
            _crossing(lambda numbers, kept: 8 * numbers),
            "You leave the optimizer's state out: `kept` says how many numbers it keeps for each parameter.",
        ),
        Mistake(
            _crossing(lambda numbers, kept: 16 * numbers),
            "You take every optimizer for AdamW: `kept` says how many numbers it keeps for each parameter.",
        ),
    ),
    diagnose=_of_first,
)

EXERCISES = (STATIC, ORDER, GROWTH, CROSSING)


# -- the quiz ----------------------------------------------------------------------------------------------------------

QUIZ = (
    Question(
        "A model has 1 GiB of parameters in float32 and is trained with AdamW. How much do parameters, gradients and "
        "optimizer state take when the optimizer steps?",
        (
            Option("1 GiB", "Those are the parameters alone: backward makes a gradient for each."),
            Option("2 GiB", "Parameters and gradients, as with plain SGD. AdamW keeps more from step to step."),
            Option("3 GiB", "One of the four is missing: the parameter, its gradient, and two numbers of AdamW's."),
            Option("4 GiB", "A parameter, its gradient and AdamW's two numbers: 16 bytes.", right=True),
        ),
    ),
    Question(
        "You double a GPT's context and halve its batch. What happens to the bytes that its blocks keep for backward?",
        (
            Option("half", "The batch alone would do that. The passages are longer now."),
            Option("the same", "As many tokens as before, and each block keeps so many numbers a token.", right=True),
            Option("twice", "The context alone would do that. There are fewer passages now."),
            Option("four times", "Attention that keeps its weights grows so; PyTorch's fused one does not keep them."),
        ),
    ),
    Question(
        "The first step of a training with AdamW has its peak in the backward pass, at 9 of the device's 10 GiB. Which "
        "sentence is true?",
        (
            Option("Every further step has the same peak.", "That holds for plain SGD, which keeps nothing."),
            Option(
                "Later steps may not fit: from the second on, the optimizer state is alive in backward too.",
                "It is born in the first optimizer step, after the first backward pass.",
                right=True,
            ),
            Option(
                "Later steps may not fit: activations add up from step to step.",
                "Backward takes them down in each step; nothing is saved when it ends.",
            ),
            Option(
                "Later steps need less: the first one also makes the parameters.",
                "They are there before it, and stay.",
            ),
        ),
    ),
)
