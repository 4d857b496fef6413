"""Lesson 5, micro-batching: five exercises and the quiz.

What is checked are gradients and weights, against one backward pass over the whole by PyTorch's autograd, and counts of
micro-batches, against a search that is gone through the other way round.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset

from ...record import record
from ..exercises import Answer, Exercise, Mistake, Result, letters_of, same
from ..quizzes import Option, Question
from .numbers import drawn

_ACCUMULATE = "accumulate the gradient of a whole batch or data set, with the right weights"
_IN_ORDER = "put the lines of an accumulation loop in order"
_EQUALITY = "say what breaks the equality, and mend it where weights can"
_FLOOR = "predict the peak with k micro-batches, and the floor under it"

_Parts = Sequence[tuple[Tensor, Tensor]]
_Weights = Callable[[_Parts], Sequence[float]]


def _net(width: int = 16) -> nn.Sequential:
    """Inputs of 3 numbers to 4 classes; always the same."""
    model = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 4)).double()
    return _filled(model)


def _filled(model: nn.Sequential) -> nn.Sequential:
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.copy_(drawn(seed, *parameter.shape) / 2)
    return model


def _samples(count: int, seed: int = 7) -> tuple[Tensor, Tensor]:
    return drawn(seed, count, 3), torch.arange(count) * 7 % 4


def _gradient(model: nn.Module) -> Tensor | str:
    """What is in `.grad`, in a row, or in words why it is no gradient."""
    found = [parameter.grad for parameter in model.parameters()]
    if any(gradient is None for gradient in found):
        return "no gradient"
    flat = torch.cat([gradient.flatten() for gradient in found if gradient is not None])
    return "NaN" if flat.isnan().any() else flat.clone()


def _by_autograd(model: nn.Module, loss: Tensor) -> Tensor:
    return torch.cat([its.flatten() for its in torch.autograd.grad(loss, [*model.parameters()])])


def _factor(one: Any, other: Tensor) -> float | None:
    """The number that `one` is times `other`, if it is."""
    if not isinstance(one, Tensor) or one.shape != other.shape:
        return None
    factor = float(one @ other / (other @ other))
    return factor if torch.allclose(one, factor * other, rtol=1e-6, atol=1e-10) else None


def _most_activations(trace: Any) -> int:
    return max((point.nbytes for point in trace.timeline("activations")), default=0)


def _weighted(model: nn.Module, parts: Iterable[tuple[Any, float]], loss_fn: Callable[..., Tensor]) -> float:
    """The loop itself, and the loss: what a wrong answer does wrong is in its weights."""
    total = 0.0
    for (x, y), weight in parts:
        loss = loss_fn(model(x), y) * weight
        loss.backward()
        total += loss.item()
    return total


# ----------------------------------------------------------------------------------------------------- 5.1 the weight

_SIZES = ((5, 3, 2), (4, 4, 1, 7), (9, 2))


def _split(sizes: Sequence[int]) -> _Parts:
    x, y = _samples(sum(sizes))
    return list(zip(x.split(list(sizes)), y.split(list(sizes)), strict=True))


def _added_up(answer: Answer) -> Result:
    results = []
    for sizes in _SIZES:
        model = _net()
        answer(model, cross_entropy, _split(sizes), sum(sizes))
        results.append(_gradient(model))
    return results


def _at_once() -> Result:
    results = []
    for sizes in _SIZES:
        model, (x, y) = _net(), _samples(sum(sizes))
        results.append(_by_autograd(model, cross_entropy(model(x), y)))
    return results


def _with_weights(weights: _Weights) -> Answer:
    """The exercise's function with that in its line."""

    def add_up(model: nn.Module, loss_fn: Callable[..., Tensor], parts: _Parts, samples: int) -> None:
        _weighted(model, zip(parts, weights(parts), strict=True), loss_fn)

    return add_up


def _count(parts: _Parts) -> int:
    return sum(len(y) for _, y in parts)


def _sum_of_means(sizes: Sequence[int]) -> Tensor:
    model = _net()
    _weighted(model, [(part, 1.0) for part in _split(sizes)], cross_entropy)
    gradient = _gradient(model)
    assert isinstance(gradient, Tensor)
    return gradient


def _what_is_weighted(result: Result, truth: Result) -> str | None:
    if "no gradient" in result:
        return "Some parameter has no gradient afterwards: were the lines around yours changed?"
    if "NaN" in result:
        return "Your gradients are no numbers: what is your weight for a part of one sample?"
    factors = [_factor(one, other) for one, other in zip(result, truth, strict=True)]
    if None not in factors:
        listed = ", ".join(f"{factor:.3g}" for factor in factors)
        return (
            f"The parts weigh right against one another, but all are too large or too small: times {listed}, for "
            f"{', '.join(map(str, map(sum, _SIZES)))} samples. What should the weights add up to?"
        )
    if all(_factor(one, _sum_of_means(sizes)) is not None for one, sizes in zip(result, _SIZES, strict=True)):
        return "Every part weighs the same with you. Which of these parts has more samples to speak for?"
    return (
        "Your parts do not weigh as many samples as they have. Take parts of 3 and 1: which shares of the whole mean "
        "are theirs?"
    )


_WEIGHT = Exercise(
    number="5.1",
    kind="fill",
    task="Weight the loss of each part so that the gradients add up to that of the whole.",
    difficulty=1,
    minutes=3,
    objective=_ACCUMULATE,
    run=_added_up,
    truth=_at_once,
    mistakes=(
        Mistake(
            _with_weights(lambda parts: [1.0] * len(parts)),
            "That adds the parts' means. Four equal parts would give four times the gradient: what is missing?",
        ),
        Mistake(
            _with_weights(lambda parts: [1 / len(parts)] * len(parts)),
            "A mean of means: right for equal parts. Here a part of one sample would count as much as one of seven.",
        ),
        Mistake(
            _with_weights(lambda parts: [float(len(y)) for _, y in parts]),
            "That makes sums of the means, the right way round. By what was the mean over the whole divided?",
        ),
        Mistake(
            _with_weights(lambda parts: [1 / _count(parts)] * len(parts)),
            "You divide by all samples, but what you divide is a part's mean already: how does one get its sum back?",
        ),
        Mistake(
            _with_weights(lambda parts: [_count(parts) / len(y) for _, y in parts]),
            "Upside down: with you the smallest part weighs most.",
        ),
        Mistake(
            _with_weights(lambda parts: [1 / len(y) for _, y in parts]),
            "loss_fn has divided by the part's own samples already. With you it is done twice.",
        ),
        Mistake(
            _with_weights(lambda parts: [len(y) / len(parts) for _, y in parts]),
            "You divide by the number of parts. By the number of what does the mean over the whole divide?",
        ),
        Mistake(
            _with_weights(lambda parts: [x.numel() / _count(parts) for x, _ in parts]),
            "You count the numbers in x. A sample has several of them, and is one term of the loss.",
        ),
    ),
    diagnose=_what_is_weighted,
)


# ---------------------------------------------------------------------------------------------------- 5.2 the loop

_LINES = {
    "a": "optimizer.step()",
    "b": "    loss.backward()",
    "c": "    optimizer.zero_grad()",
    "d": "for part_x, part_y in zip(x.split(8), y.split(8)):",
    "e": "    loss = loss_fn(model(part_x), part_y) * len(part_x) / len(x)",
    "f": "clip_grad_norm_(model.parameters(), 0.1)",
    "g": "    optimizer.step()",
    "h": "optimizer.zero_grad()",
    "i": "    clip_grad_norm_(model.parameters(), 0.1)",
    "j": "    loss = loss_fn(model(part_x), part_y) / len(x.split(8))",
}
_BATCHES = (20, 20, 12)


def _run_lines(order: Answer) -> Result:
    """The weights after three batches, by the loop that the letters make; in words, where it does not run."""
    letters = letters_of(order, _LINES, "line", "d b")
    if twice := [letter for letter in letters if letters.count(letter) > 1]:
        return f"twice {twice[0]}"
    body = "\n".join("    " + _LINES[letter] for letter in letters)
    try:
        program = compile(f"for x, y in loader:\n{body}", "<lines>", "exec")
    except SyntaxError:
        return "no loop"
    model = _net()
    names = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.5),
        "loss_fn": cross_entropy,
        "clip_grad_norm_": clip_grad_norm_,
        "loader": [_samples(count, seed) for seed, count in enumerate(_BATCHES)],
    }
    try:
        exec(program, names)
    except NameError:
        return "no loss"
    except RuntimeError:
        return "twice backward"
    return _weights(model)


def _weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def _whole_batches() -> Result:
    """Batch by batch, without parts, and each step written out."""
    model = _net()
    for seed, count in enumerate(_BATCHES):
        x, y = _samples(count, seed)
        gradients = torch.autograd.grad(cross_entropy(model(x), y), [*model.parameters()])
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_(0.5 * gradient * min(1.0, float(0.1 / (norm + 1e-6))))
    return _weights(model)


def _what_the_lines_do(result: Result, truth: Result) -> str | None:
    if not isinstance(result, str):
        return (
            "The loop runs, and takes other steps than the whole batch would. Say of each line whether it happens once "
            "a part or once a batch, and what is in `.grad` when the optimizer steps."
        )
    return {
        "no loop": "Python cannot read that: an indented line stands in the loop of line d, directly below it.",
        "no loss": "A line there reads `loss` before any line has made it.",
        "twice backward": "Backward goes twice through one graph: which line makes a new loss for each part?",
    }.get(result, f"Line {result[-1]} is there twice: each line is used once at most.")


_SLIPS = {
    "d c e b f a": (
        "Within the loop, what the parts before have left in `.grad` is thrown away: the step goes by the last part "
        "alone."
    ),
    "h d e b f": (
        "The weights are what they were. When the optimizer steps, if it does, is there anything left in `.grad`?"
    ),
    "d e b f a": "In the second batch, what does backward add to?",
    "h d e b i a": (
        "Clipped within the loop, a first part's gradient is made shorter before the others are added. Which norm "
        "would the whole batch's step have clipped?"
    ),
    "h d e b a": "That is an unclipped step: what does clipping change when the optimizer has already stepped?",
    "h d j b f a": (
        "Mean of means: x.split(8) makes parts of 8, 8 and 4 of a batch of 20. Which of the two losses minds that?"
    ),
    "h d e b i g": "That is a step for each part. How many does the whole batch take?",
    "h d e b g": "That is a step for each part, and none of them is clipped. How many steps does the whole batch take?",
    "d c e b i g": "That is the training with a smaller batch: each part has its own gradient and its own step.",
    "h d e b i g a": "That is a step for each part and one more at the end. How many does the whole batch take?",
}

_ORDER = Exercise(
    number="5.2",
    kind="order",
    task="Order the lines of a loop that takes the whole batch's clipped step in micro-batches.",
    difficulty=2,
    minutes=5,
    objective=_IN_ORDER,
    run=_run_lines,
    truth=_whole_batches,
    mistakes=(
        *(Mistake(order, hint) for order, hint in _SLIPS.items()),
        *(  # the same with the other loss: a slip more
            Mistake(order.replace("e", "j"), f"{_SLIPS[order]} And look at the loss: is it a mean of means?")
            for order in ("d e b f a", "h d e b a", "h d e b i a", "h d e b i g", "h d e b g", "h d e b i g a")
        ),
    ),
    diagnose=_what_the_lines_do,
)


# ------------------------------------------------------------------------------------------- 5.3 a whole data set

_LOADERS = ((10, 4, False), (9, 4, True), (8, 8, False))  # samples, batch size, gradients of before

_OfAll = Callable[[nn.Module, Callable[..., Tensor], Any], Any]


def _watched(run: Callable[[], Any], model: nn.Module, largest: int, per_sample: int) -> tuple[Any, bool]:
    """What comes back, and whether never more was kept for backward than one part of that many samples keeps."""
    with record(model) as trace:
        result = run()
    return result, _most_activations(trace) <= 1.5 * largest * per_sample


def _kept_per_sample(model: nn.Module, x: Tensor, y: Tensor) -> int:
    with record(model) as trace:
        cross_entropy(model(x).flatten(0, -2), y.flatten(), reduction="sum").backward()
    return math.ceil(_most_activations(trace) / len(y))


@functools.cache
def _kept_by_net() -> int:
    return _kept_per_sample(_net(256), *_samples(4))


def _of_all(answer: Answer) -> Result:
    results = []
    for count, size, stale in _LOADERS:
        model, (x, y) = _net(256), _samples(count)
        kept = _kept_by_net()
        loader = DataLoader(TensorDataset(x, y), size)
        if stale:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
        found, alone = _watched(lambda: answer(model, cross_entropy, loader), model, size, kept)  # noqa: B023
        if found is None:
            return None
        if isinstance(found, Tensor | dict | str | int | float):
            return found
        results.append({"gradients": [*found], "one at a time": alone})
    return results


def _of_all_at_once() -> Result:
    results = []
    for count, *_ in _LOADERS:
        model, (x, y) = _net(256), _samples(count)
        loss = cross_entropy(model(x), y, reduction="sum") / count
        results.append({"gradients": [*torch.autograd.grad(loss, [*model.parameters()])], "one at a time": True})
    return results


def _gradients(model: nn.Module) -> list[Any]:
    return [parameter.grad for parameter in model.parameters()]


def _through(weights: _Weights, clear: bool = True) -> _OfAll:
    def gradient_of_all(model: nn.Module, loss_fn: Callable[..., Tensor], loader: Any) -> Any:
        if clear:
            model.zero_grad()
        parts = list(loader)
        _weighted(model, zip(parts, weights(parts), strict=True), loss_fn)
        return _gradients(model)

    return gradient_of_all


def _right_weights(parts: _Parts) -> list[float]:
    return [len(y) / _count(parts) for _, y in parts]


def _last_batch(model: nn.Module, loss_fn: Callable[..., Tensor], loader: Any) -> Any:
    for (x, y), weight in zip(loader, _right_weights(list(loader)), strict=True):
        model.zero_grad()
        (loss_fn(model(x), y) * weight).backward()
    return _gradients(model)


def _last_mean(model: nn.Module, loss_fn: Callable[..., Tensor], loader: Any) -> Any:
    for x, y in loader:
        model.zero_grad()
        loss_fn(model(x), y).backward()
    return _gradients(model)


def _all_graphs(model: nn.Module, loss_fn: Callable[..., Tensor], loader: Any) -> Any:
    model.zero_grad()
    torch.stack([loss_fn(model(x), y) * len(y) / len(loader.dataset) for x, y in loader]).sum().backward()
    return _gradients(model)


def _all_graphs_of_means(model: nn.Module, loss_fn: Callable[..., Tensor], loader: Any) -> Any:
    model.zero_grad()
    torch.stack([loss_fn(model(x), y) for x, y in loader]).mean().backward()
    return _gradients(model)


def _row(gradients: Any) -> Tensor | None:
    if not all(isinstance(its, Tensor) for its in gradients):
        return None
    return torch.cat([its.detach().flatten() for its in gradients])


def _what_is_not_of_all(result: Result, truth: Result) -> str | None:
    if isinstance(result, Tensor):
        return "It returns one tensor. Asked for is a list, with a tensor for each parameter."
    if not isinstance(result, list):
        return None
    rows = [_row(its["gradients"]) for its in result]
    wanted = [torch.cat([its.flatten() for its in right["gradients"]]) for right in truth]
    if any(row is None for row in rows):
        return "Something in your list is no tensor: is each `.grad` still there when you return it?"
    if any(len(its["gradients"]) != len(truth[0]["gradients"]) for its in result):
        return "Your list has another length than `list(model.parameters())`."
    found = [row for row in rows if row is not None]
    shapes = [[tensor.shape for tensor in its["gradients"]] for its in (*result, *truth)]
    if shapes[: len(result)] != shapes[len(result) :]:
        return "A tensor in your list has another shape than its parameter: in which order are they?"
    if any(row.isnan().any() for row in found):
        return "Your gradients are no numbers: what do you divide by?"
    right = [same(row, other) for row, other in zip(found, wanted, strict=True)]
    if all(right):
        return "The gradients are right. But more is kept for backward than one batch needs: when do its graphs go?"
    # The second loader's model comes with gradients, all ones.
    factors = [_factor(row, other) for row, other in zip(found, wanted, strict=True)]
    without = [_factor(row - place, other) for place, row, other in zip((0, 1, 0), found, wanted, strict=True)]
    if None not in factors:
        return (
            f"Each gradient is the right one times a number: {', '.join(f'{factor:.3g}' for factor in factors)}, for "
            f"{', '.join(str(count) for count, *_ in _LOADERS)} samples. What do you divide by, and how often?"
        )
    if None not in without or (right[0] and right[2]):
        return "One of the models has gradients before your function begins: what does backward add to?"
    if right[2] and not right[0]:
        return (
            "It is right for a loader with a single batch. Where the last batch is smaller, how much does a sample in "
            "it count with you, and how much one of the others?"
        )
    return "Take a loader with a single batch first: is it that batch's gradient? Then one of 4, 4 and 2 samples."


_OF_ALL = Exercise(
    number="5.3",
    kind="write",
    task="Return the gradient of the mean loss over a whole data set, batch by batch.",
    difficulty=2,
    minutes=7,
    objective=_ACCUMULATE,
    run=_of_all,
    truth=_of_all_at_once,
    mistakes=(
        Mistake(
            _through(lambda parts: [1 / len(parts)] * len(parts)),
            "A mean of means. With 10 samples in batches of 4, how much does a sample of the last batch count with "
            "you, and how much one of the first?",
        ),
        Mistake(
            _through(lambda parts: [1.0] * len(parts)),
            "You add the batches' means and divide by nothing: twice the data would make the gradient twice as long.",
        ),
        Mistake(
            _through(lambda parts: [float(len(y)) for _, y in parts]),
            "That is the gradient of the sum over all samples. What makes a mean of it?",
        ),
        Mistake(
            _last_batch,
            "You clear the gradients for each batch: what is left of the first ones at the end?",
        ),
        Mistake(
            _last_mean,
            "What you return is the gradient of the last batch. Who throws away that of the others?",
        ),
        Mistake(
            _through(_right_weights, clear=False),
            "One of the models has gradients before your function begins. Backward adds to them: who clears them?",
        ),
        Mistake(
            _through(lambda parts: [1 / len(parts)] * len(parts), clear=False),
            "Two things: one of the models has gradients before your function begins; and you take a mean of means, "
            "though the last batch is smaller.",
        ),
        Mistake(
            _all_graphs,
            "The gradients are right. But all graphs are alive together in the end: what would it take to let "
            "a batch's graph go before the next forward pass?",
        ),
        Mistake(
            _all_graphs_of_means,
            "Two things: all graphs wait for one backward pass; and it is a mean of means, though the last batch is "
            "smaller.",
        ),
        Mistake(
            _through(lambda parts: [len(y) / (len(parts) * len(parts[0][1])) for _, y in parts]),
            "You divide by the number of batches times their size. How many samples has a loader whose last batch is "
            "not full?",
        ),
        Mistake(
            _through(lambda parts: [1 / _count(parts)] * len(parts)),
            "loss_fn has divided by a batch's samples, and you divide by all samples once more.",
        ),
        Mistake(
            _through(lambda parts: [len(y) / len(parts[0][1]) / len(parts) for _, y in parts[:-1]] + [0.0]),
            "The last batch is missing: it is not full, and its samples count all the same.",
        ),
    ),
    diagnose=_what_is_not_of_all,
)


# ----------------------------------------------------------------------------------------------- 5.4 tokens that count

_LENGTHS = (((6, 2), (5,), (1, 4, 3)), ((6, 6), (6,)), ((3, 6), (0, 0), (5,)))
_TOKENS = 6

_Tokens = Callable[[nn.Module, _Parts], float]


def _reader() -> nn.Sequential:
    return _filled(nn.Sequential(nn.Embedding(7, 64), nn.Tanh(), nn.Linear(64, 5)).double())


def _passages(lengths: Sequence[Sequence[int]]) -> _Parts:
    parts = []
    for number, each in enumerate(lengths):
        places = torch.arange(len(each) * _TOKENS).view(-1, _TOKENS)
        inputs, targets = (places * 5 + number) % 7, (places * 3 + number) % 5
        beyond = torch.arange(_TOKENS) >= torch.tensor(each)[:, None]
        parts.append((inputs, targets.masked_fill(beyond, -100)))
    return parts


@functools.cache
def _kept_by_reader() -> int:
    (passages,) = _passages([(_TOKENS, _TOKENS)])
    return _kept_per_sample(_reader(), *passages)


def _of_tokens(answer: Answer) -> Result:
    results = []
    for lengths in _LENGTHS:
        model, parts = _reader(), _passages(lengths)
        kept = _kept_by_reader()
        returned, alone = _watched(lambda: answer(model, parts), model, max(map(len, lengths)), kept)  # noqa: B023
        results.append({"gradient": _gradient(model), "loss": _number(returned), "one at a time": alone})
    return results


def _number(returned: Any) -> float | str:
    """The loss that comes back, or in words why it is none."""
    if isinstance(returned, Tensor) and returned.numel() == 1:
        returned = returned.item()
    if not isinstance(returned, int | float):
        return "nothing" if returned is None else "no number"
    return "NaN" if math.isnan(returned) else float(returned)


def _of_tokens_at_once() -> Result:
    results = []
    for lengths in _LENGTHS:
        model, parts = _reader(), _passages(lengths)
        inputs, targets = (torch.cat(its) for its in zip(*parts, strict=True))
        counts = targets != -100
        loss = -model(inputs).log_softmax(-1)[counts].gather(1, targets[counts][:, None]).mean()
        results.append({"gradient": _by_autograd(model, loss), "loss": loss.item(), "one at a time": True})
    return results


def _terms(targets: Tensor) -> int:
    return int((targets != -100).sum())


def _token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def _token_sum(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def _tokens_by(loss_fn: Callable[..., Tensor], weights: _Weights) -> _Tokens:
    return lambda model, parts: _weighted(model, zip(parts, weights(parts), strict=True), loss_fn)


def _all_terms(parts: _Parts) -> int:
    return sum(_terms(targets) for _, targets in parts)


def _without_empty(weights: _Weights) -> _Tokens:
    def accumulate_tokens(model: nn.Module, parts: _Parts) -> float:
        kept = [part for part in parts if _terms(part[1])]
        return _weighted(model, zip(kept, weights(kept), strict=True), _token_loss)

    return accumulate_tokens


def _all_token_graphs(model: nn.Module, parts: _Parts) -> float:
    loss = torch.stack([_token_sum(model(inputs), targets) for inputs, targets in parts]).sum() / _all_terms(parts)
    loss.backward()
    return loss.item()


def _mean_of_losses(model: nn.Module, parts: _Parts) -> float:
    """Right gradients; the loss that it tells is a mean of the parts' means."""
    _weighted(model, [(part, 1 / _all_terms(parts)) for part in parts], _token_sum)
    with torch.no_grad():
        means = [_token_sum(model(inputs), targets) / max(1, _terms(targets)) for inputs, targets in parts]
    return float(sum(means)) / len(parts)


def _what_tokens_count(result: Result, truth: Result) -> str | None:
    found = [its["gradient"] for its in result]
    wanted = [right["gradient"] for right in truth]
    if "no gradient" in found:
        return "Some parameter has no gradient when your function ends: which line calls backward?"
    losses = [its["loss"] for its in result]
    right = [same(one, other) for one, other in zip(found, wanted, strict=True)]
    if all(right):
        if not all(its["one at a time"] for its in result):
            return "The gradients are right. But the graphs of several parts are alive together: when is backward?"
        if "nothing" in losses or "no number" in losses:
            return "The gradients are right. Asked for is the mean loss, too, as a number."
        if losses[2] == "NaN":
            return "The gradients are right. The loss is NaN where a part has no token that counts: what is its mean?"
        return "The gradients are right, and the loss that you return is not the mean over all tokens that count."
    if losses[2] == "NaN" and right[2]:
        return "What do you weigh by? And the loss is NaN where a part has no token that counts: what is its mean?"
    if "NaN" in found:
        return "Some gradient is no number: by what do you divide, and can that be 0?"
    factors = [_factor(one, other) for one, other in zip(found, wanted, strict=True)]
    if None not in factors:
        return (
            f"Each gradient is the right one times a number: {', '.join(f'{factor:.3g}' for factor in factors)}, where "
            f"{', '.join(str(sum(map(sum, lengths))) for lengths in _LENGTHS)} tokens count. What do you divide by?"
        )
    if right[1]:
        return "It is right where no token is left out. Of which tokens is your weight a count?"
    return "The parts do not weigh as many tokens as count in them: print your weights for one with 8, 5 and 8 of them."


_TOKENS_THAT_COUNT = Exercise(
    number="5.4",
    kind="write",
    task="Leave in `.grad` the gradient of the mean loss over all tokens that count, part by part.",
    difficulty=2,
    minutes=7,
    objective=_EQUALITY,
    run=_of_tokens,
    truth=_of_tokens_at_once,
    mistakes=(
        Mistake(
            _tokens_by(_token_loss, lambda parts: [1 / len(parts)] * len(parts)),
            "Two things: a mean of means, though the parts have unequal numbers of tokens that count; and the loss of "
            "a part without any is NaN.",
        ),
        Mistake(
            _tokens_by(_token_loss, lambda parts: [len(t) / sum(len(u) for _, u in parts) for _, t in parts]),
            "You weigh by samples. What is it that cross_entropy takes the mean over here? And what is that mean for a "
            "part without any?",
        ),
        Mistake(
            _tokens_by(_token_loss, lambda parts: [_terms(t) / _all_terms(parts) for _, t in parts]),
            "The gradients are right. But one weight is 0, and the loss that you return is then NaN: what is 0 times "
            "a mean over no token?",
        ),
        Mistake(
            _tokens_by(_token_loss, lambda parts: [1.0] * len(parts)),
            "The parts' means are added and divided by nothing, and one of them is a mean over no token.",
        ),
        Mistake(
            _tokens_by(_token_sum, lambda parts: [1 / sum(t.numel() for _, t in parts)] * len(parts)),
            "You divide by all tokens. How many of them count?",
        ),
        Mistake(
            _tokens_by(_token_sum, lambda parts: [1.0] * len(parts)),
            "That is the gradient of the sum over all tokens that count. What makes a mean of it?",
        ),
        Mistake(
            _tokens_by(_token_sum, lambda parts: [1 / max(1, _terms(t)) for _, t in parts]),
            "Each part is divided by its own number of tokens. By which number is the mean over all of them divided?",
        ),
        Mistake(
            _tokens_by(_token_sum, lambda parts: [1 / max(1, _terms(t)) / len(parts) for _, t in parts]),
            "A mean of means: a token in a part where few count is worth more than one where many do.",
        ),
        Mistake(
            _without_empty(lambda parts: [1 / len(parts)] * len(parts)),
            "The part without tokens that count is dealt with. What is left is a mean of means: whose tokens are worth "
            "most?",
        ),
        Mistake(
            _without_empty(lambda parts: [len(t) / sum(len(u) for _, u in parts) for _, t in parts]),
            "The part without tokens that count is dealt with. The others you weigh by samples: of what is the loss a "
            "mean?",
        ),
        Mistake(
            _tokens_by(_token_sum, lambda parts: [1 / sum(len(t) for _, t in parts)] * len(parts)),
            "You divide by the number of samples. Of what is the loss a mean?",
        ),
        Mistake(
            _tokens_by(_token_sum, lambda parts: [_terms(t) / _all_terms(parts) for _, t in parts]),
            "Your part's loss is a sum already, and you multiply it by its number of tokens once more.",
        ),
        Mistake(
            _mean_of_losses,
            "The gradients are right. The loss that you return is a mean of the parts' means.",
        ),
        Mistake(
            _all_token_graphs,
            "The gradients are right. But the graphs of all parts are alive together: what has to be known before the "
            "first backward pass, so that each can go at once?",
        ),
    ),
    diagnose=_what_tokens_count,
)


# --------------------------------------------------------------------------------------------- 5.5 fewest micro-batches

# static part, gradients, activations, samples, budget
_BUDGETS = (
    (100, 30, 240, 8, 220),  # 3 samples at a time: three parts
    (100, 30, 240, 8, 180),  # one at a time, though 240 / 5 would fit
    (100, 30, 200, 10, 300),  # one is enough, by its activations
    (60, 80, 10, 4, 145),  # one is enough, and two do not fit
    (60, 80, 10, 4, 130),  # the gradients alone are too many
    (100, 30, 160, 16, 140),  # one sample at a time
    (100, 30, 160, 16, 139),  # no more would do
    (100, 30, 70, 7, 160),  # 7 samples, 3 at a time
    (100, 30, 200, 10, 230),  # two, to the byte
    (100, 40, 300, 20, 250),  # 7 at a time: three
    (100, 10, 10, 5, 500),  # all of it at once
)

_Fewest = Callable[[int, int, int, int, int], Any]


def _fewest_by(answer: Answer) -> Result:
    return [answer(*case) for case in _BUDGETS]


def _fewest_by_samples() -> Result:
    """The other way round: how many samples fit at a time, and so how many micro-batches that makes."""
    results: list[int | None] = []
    for static, gradients, activations, samples, budget in _BUDGETS:
        if static + max(gradients, activations) <= budget:
            results.append(1)
            continue
        at_a_time = (budget - static - gradients) * samples // activations
        results.append(max(2, -(-samples // at_a_time)) if at_a_time >= 1 else None)
    return results


def _first(counts: Callable[[int], Iterable[int]], peak: Callable[[int, int, int, int, int], float]) -> _Fewest:
    """An answer that tries counts and knows a peak, of static part, gradients, activations, samples and count."""

    def fewest(static: int, gradients: int, activations: int, samples: int, budget: int) -> int | None:
        return next((k for k in counts(samples) if peak(static, gradients, activations, samples, k) <= budget), None)

    return fewest


def _each(samples: int) -> Iterable[int]:
    return range(1, samples + 1)


def _doubled(samples: int) -> Iterable[int]:
    return [2**power for power in range(samples.bit_length())]


def _peak(static: int, gradients: int, activations: int, samples: int, k: int) -> float:
    largest = activations * -(-samples // k) / samples
    return static + (max(gradients, largest) if k == 1 else gradients + largest)


def _zero_for_none(*case: int) -> int:
    return _first(_each, _peak)(*case) or 0


def _strictly(static: int, gradients: int, activations: int, samples: int, budget: int) -> Any:
    return _first(_each, _peak)(static, gradients, activations, samples, budget - 1)


def _samples_at_a_time(static: int, gradients: int, activations: int, samples: int, budget: int) -> Any:
    k = _first(_each, _peak)(static, gradients, activations, samples, budget)
    return None if k is None else -(-samples // k)


def _what_fits(result: Result, truth: Result) -> str | None:
    for case, found, right in zip(_BUDGETS, result, truth, strict=True):
        static, gradients, activations, samples, budget = case
        named = f"fewest(static={static}, gradients={gradients}, activations={activations}, samples={samples}, "
        named += f"budget={budget})"
        if found is not None and (not isinstance(found, int | float) or isinstance(found, bool)):
            return f"{named} gives something else than a number or None."
        if same(found, right):
            continue
        if found is None:
            return f"{named} gives None, and some number fits. Which did you try? What is the peak of single samples?"
        if found > samples:
            return f"{named} gives {found}, more micro-batches than there are samples."
        if found < 1 or found != int(found):
            return f"{named} gives {found}: how many micro-batches can there be?"
        if right is None:
            return f"{named} gives {found}. Add up what is alive with one sample at a time: does it fit?"
        if found < right:
            if found == 1:
                return f"{named} gives 1. Does the higher of its two moments fit?"
            return (
                f"{named} gives {found}, whose peak does not fit. What waits in `.grad`, from two parts on, and how "
                "many samples has the largest part?"
            )
        return f"{named} gives {found}, and a smaller number fits. Is its peak lower than you reckon?"
    return None


_FEWEST = Exercise(
    number="5.5",
    kind="write",
    task="Return the smallest number of micro-batches whose peak is within the budget, or None.",
    difficulty=2,
    minutes=7,
    objective=_FLOOR,
    run=_fewest_by,
    truth=_fewest_by_samples,
    mistakes=(
        Mistake(
            _first(_each, lambda static, gradients, activations, samples, k: (static + gradients + activations) / k),
            "With you all of the memory is divided by k. Which of the three is as large for one sample as for all?",
        ),
        Mistake(
            _first(_each, lambda static, gradients, activations, samples, k: (static + activations) / k),
            "With you the static part is divided by k as well, and the gradients are nowhere.",
        ),
        Mistake(
            _first(_each, lambda static, gradients, activations, samples, k: static + (gradients + activations) / k),
            "You divide the gradients by k. There is one for each parameter: does a smaller part have fewer of them?",
        ),
        Mistake(
            _first(_each, lambda s, g, a, samples, k: s + a * -(-samples // k) / samples),
            "No gradients are in your peaks. From the second micro-batch on, what waits in `.grad`?",
        ),
        Mistake(
            _first(_each, lambda static, gradients, activations, samples, k: static + activations / k),
            "No gradients are in your peaks. From the second micro-batch on, what waits in `.grad`? (And parts are "
            "whole samples: the largest may have more than samples / k.)",
        ),
        Mistake(
            _first(_each, lambda s, g, a, samples, k: s + g + a * -(-samples // k) / samples),
            "With a single micro-batch, are all gradients and all activations alive at one time?",
        ),
        Mistake(
            _first(_each, lambda s, g, a, samples, k: s + (max(g, a) if k == 1 else g + a / k)),
            "Nearly: parts are whole samples. How many has the largest of three parts of 8 samples?",
        ),
        Mistake(
            _first(_each, lambda static, gradients, activations, samples, k: static + gradients + activations / k),
            "Two things: a part is whole samples, so the largest may have more than samples / k; and with a single "
            "micro-batch, gradients and activations are not all alive at one time.",
        ),
        Mistake(
            _first(_each, lambda s, g, a, samples, k: s + (a if k == 1 else g + a * -(-samples // k) / samples)),
            "One micro-batch has two high moments. What is alive at the end of its backward pass?",
        ),
        Mistake(
            _first(_each, lambda s, g, a, samples, k: s + (a if k == 1 else g + a / k)),
            "Two things: what is alive at the end of a single micro-batch's backward pass? And how many samples has "
            "the largest of three parts of 8?",
        ),
        Mistake(
            _first(_each, lambda s, g, a, samples, k: s + (max(g, a) if k == 1 else g + a * (samples // k) / samples)),
            "Rounded down, that is the smallest part. Which part makes the peak?",
        ),
        Mistake(
            _first(_doubled, _peak),
            "You try 1, 2, 4, 8 and so on. Must the number of parts be a power of two?",
        ),
        Mistake(
            _first(lambda samples: range(2, samples + 1), _peak),
            "You begin at two. May one micro-batch be enough, and can it be that two are not?",
        ),
        Mistake(
            _first(lambda samples: range(1, samples), _peak),
            "You stop one short: what is the largest number of parts that some samples can make?",
        ),
        Mistake(
            _strictly,
            "A peak of exactly the budget is within it.",
        ),
        Mistake(
            _samples_at_a_time,
            "That is how many samples go through at a time. Asked for is how many times.",
        ),
        Mistake(
            _zero_for_none,
            "Where nothing fits you give a number. What is asked for there?",
        ),
    ),
    diagnose=_what_fits,
)

EXERCISES = (_WEIGHT, _ORDER, _OF_ALL, _TOKENS_THAT_COUNT, _FEWEST)

QUIZ = (
    Question(
        "A batch of 64 does not fit. You set `batch_size=16` in the DataLoader, and nothing else. What is another now?",
        (
            Option("the peak, and nothing else", "How many times does the optimizer step in one pass over the data?"),
            Option(
                "the peak and the training",
                "Four times as many steps, each by the gradient of 16 samples: other weights at the end.",
                right=True,
            ),
            Option(
                "the peak, and gradients are a quarter as long, since they are not added up any more",
                "Each is a mean over its own 16 samples, so it is not shorter for their being few.",
            ),
        ),
    ),
    Question(
        "With four micro-batches a step peaks at 9 GiB: 5 of static part, 2 of gradients, 2 of activations. What is "
        "its peak with eight?",
        (
            Option(
                "4.5 GiB", "All of it would have to be halved. Which of the three does a smaller part make smaller?"
            ),
            Option("7 GiB", "That is the floor. A part of the batch needs some activations all the same."),
            Option("8 GiB", "The activations become 1 GiB. The other seven stay.", right=True),
            Option("9 GiB", "It is not at the floor yet: what is divided?"),
        ),
    ),
    Question(
        "A convolutional net in training mode has other gradients with four micro-batches than with the whole batch: "
        "by some per cent, in float64, with equal parts. What do you look at?",
        (
            Option("its BatchNorms", "Each sample is normalised by what stands beside it in its part.", right=True),
            Option("the weights of the parts", "They are equal, so that 1 / 4 is right for each."),
            Option(
                "rounding, since the gradients of the parts are added in another order",
                "In float64 that is off in the fifteenth digit, and not by some per cent.",
            ),
        ),
    ),
)
