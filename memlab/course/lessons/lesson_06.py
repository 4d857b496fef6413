"""Lesson 6, mixed precision: five exercises and the quiz.

What is checked are saved tensors, bytes, weights after a step, and sums; the truth is PyTorch's own autocast, its own
`torch.amp.GradScaler`, its own arithmetic in 8, 11 and 24 digits, and memlab's count of what is saved.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...record import record
from ..exercises import Answer, Exercise, Mistake, Result, letters_of, same
from ..quizzes import Option, Question
from .numbers import drawn

_WHICH_TYPE = "predict which tensors autocast keeps, and in which type"
_SCALED = "write a training step with loss scaling"
_VANISHES = "say when an update of a weight vanishes"

_NAN = 1e30


_numbers = functools.partial(drawn, dtype=torch.float32)


def _weights(model: nn.Module) -> Tensor:
    """All of them; one that is NaN, which equals nothing, as a number that no other is."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).nan_to_num(_NAN)


# ----------------------------------------------------------------------------------------------- 6.1 autocast by hand

_Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


@contextlib.contextmanager
def _ledger() -> Iterator[list[Tensor]]:
    """What autograd saves, each storage once."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        if all(tensor.untyped_storage().data_ptr() != other.untyped_storage().data_ptr() for other in saved):
            saved.append(tensor.detach())
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def _forward(answer: Answer) -> Result:
    """For each size: the loss, what is saved for backward, and the weight's gradient."""
    results = []
    for samples, width in ((48, 32), (16, 64)):
        x, target = _numbers(1, samples, width), _numbers(2, samples, width)
        weight = (_numbers(3, width, width) / width**0.5).requires_grad_()
        with _ledger() as saved:
            loss = answer(x, weight, target)
        if not isinstance(loss, Tensor):
            return loss
        if loss.requires_grad:
            try:
                loss.backward()
            except RuntimeError as error:  # PyTorch 2.11 has no backward for a loss between two types
                if "Found dtype" not in str(error):
                    raise
        kept = sorted(f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}" for tensor in saved)
        results.append({"loss": loss.detach(), "type": str(loss.dtype), "saved": kept, "gradient": weight.grad})
    return results


def _by_autocast(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.mse_loss(F.linear(torch.tanh(F.linear(x, weight)), weight), target)


def _with_casts(
    of_x: Callable[[Tensor], Tensor], of_weight: Callable[[Tensor], Tensor], of_y: Callable[[Tensor], Tensor]
) -> _Forward:
    """The exercise's function with these three casts in it."""

    def forward(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        x_low, weight_low = of_x(x), of_weight(weight)
        h = torch.tanh(F.linear(x_low, weight_low))
        return F.mse_loss(of_y(F.linear(h, weight_low)), target)

    return forward


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _what_the_casts_did(result: Result, truth: Result) -> str | None:
    first, right = result[0], truth[0]
    if first["gradient"] is None:
        return "No gradient comes to W: is the copy that you multiply by still tied to it?"
    if first["type"] != right["type"]:
        return f"Your loss is a {first['type']}. In which type does autocast compute a loss?"
    if first["saved"] != right["saved"]:
        kept = "; ".join(first["saved"])
        return f"Autocast keeps other tensors. Yours, in the first case: {kept}. Which of them is in a wrong type?"
    if not same(first["loss"], right["loss"]):
        return "The types are those of autocast, the loss is not: is there a step of yours that autocast does not have?"
    return "Loss and saved tensors are those of autocast, and the gradient of W is not: what does backward go through?"


_CASTS = Exercise(
    number="6.1",
    kind="fill",
    task="Write the casts that autocast makes around two layers that share a weight.",
    difficulty=1,
    minutes=4,
    objective=_WHICH_TYPE,
    run=_forward,
    truth=lambda: _forward(_by_autocast),
    mistakes=(
        Mistake(
            _with_casts(_as_it_is, _as_it_is, _as_it_is),
            "Nothing is cast: that is the plain step in fp32. What does a linear layer multiply under autocast?",
        ),
        Mistake(
            _with_casts(Tensor.half, Tensor.half, Tensor.float),
            "These are products in fp16. The two formats of 16 bits are different types.",
        ),
        Mistake(
            _with_casts(Tensor.bfloat16, Tensor.bfloat16, _as_it_is),
            "The products are right. Look at what the loss keeps of y, and in which type.",
        ),
        Mistake(
            _with_casts(Tensor.bfloat16, lambda weight: weight.detach().bfloat16(), Tensor.float),
            "The numbers are right, and W gets no gradient: `detach` and `data` cut the copy off from W. A cast alone "
            "is an operator that backward goes through.",
        ),
        Mistake(
            _with_casts(lambda x: x.bfloat16().float(), lambda w: w.bfloat16().float(), Tensor.float),
            "The numbers were rounded and then made fp32 again: each is still 4 bytes, and the products run in fp32.",
        ),
    ),
    diagnose=_what_the_casts_did,
)


# ------------------------------------------------------------------------------------------ 6.2 bytes under autocast

_NETS: tuple[tuple[tuple[int, ...], int], ...] = (
    ((64, 256, 256, 10), 128),
    ((40, 16), 32),
    ((32, 512, 8), 4),
    ((16, 48, 24, 80, 12), 96),
)


def _bytes_by(answer: Answer) -> Result:
    return [answer(list(sizes), samples) for sizes, samples in _NETS]


def _bytes_counted() -> Result:
    """Each net run under autocast, and what autograd then holds."""
    counted = []
    for sizes, samples in _NETS:
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), nn.GELU()]
        net = nn.Sequential(*layers[:-1])
        x, target = torch.randn(samples, sizes[0]), torch.randn(samples, sizes[-1])
        with record(net, batch=(x, target)) as trace, torch.autocast("cpu", dtype=torch.bfloat16):
            F.mse_loss(net(x), target).backward()
        counted.append(trace.saved_bytes)
    return counted


def _parts(sizes: Sequence[int], samples: int) -> dict[str, int]:
    """Numbers of each kind that are saved; `all copies` has the first layer's too."""
    products = [inputs * outputs for inputs, outputs in pairwise(sizes)]
    return {
        "inputs": samples * sum(sizes[:-1]),
        "batch": samples * sizes[0],
        "gelu": samples * sum(sizes[1:-1]),
        "copies": sum(products[1:]),
        "all copies": sum(products),
        "first copy": products[0],
        "biases": sum(sizes[1:]),
        "output": samples * sizes[-1],
    }


def _sum_of(**bytes_of_each: int) -> Answer:
    """The answer that has so many bytes for each number of these kinds."""

    def saved(sizes: Sequence[int], samples: int) -> int:
        parts = _parts(sizes, samples)
        return sum(nbytes * parts[kind] for kind, nbytes in bytes_of_each.items())

    return saved


def _halved_layers(sizes: Sequence[int], samples: int) -> int:
    """What a plain step saves, in half the bytes."""
    parts = _parts(sizes, samples)
    return 2 * (parts["inputs"] + parts["gelu"] + parts["output"])


_IN_WORDS = {
    "inputs": "the layers' inputs",
    "batch": "the copy of x, the first layer's input",
    "gelu": "what the GELUs keep",
    "copies": "the copies of the weights",
    "first copy": "the copy of the first layer's weight, which nobody asks for",
    "biases": "the biases, of which none is saved",
    "output": "what the loss keeps of the output",
}


def _which_part(result: Result, truth: Result) -> str | None:
    if not all(isinstance(its, int | float) and not isinstance(its, bool) for its in result):
        return "It returns something else than a number of bytes."
    numbers = [_parts(sizes, samples) for sizes, samples in _NETS]
    off = [one - right for one, right in zip(result, truth, strict=True)]
    if all(one == 2 * right for one, right in zip(result, truth, strict=True)):
        return "Twice what is saved: how many bytes has a number in bf16?"
    if all(2 * one == right for one, right in zip(result, truth, strict=True)):
        return "Half of what is saved: did you count numbers in place of bytes?"
    slips = [(kind, nbytes) for kind in _IN_WORDS for nbytes in (-4, -2, 2, 4)]
    for together in (*combinations(slips, 1), *combinations(slips, 2)):
        if off == [sum(nbytes * part[kind] for kind, nbytes in together) for part in numbers]:
            named = [
                f"{_IN_WORDS[kind]}: yours has {abs(nbytes)} bytes each too {_more(nbytes)}"
                for kind, nbytes in together
            ]
            return f"All of it is right but for {'; and '.join(named)}."
    x, w, copies = 32 * 40, 40 * 16, 32 * 16
    if off[1]:
        return (
            f"Take the net that is one layer from 40 to 16, with 32 samples: yours is {result[1]:g} bytes. Of x "
            f"({x} numbers), the weight ({w}) and the output ({copies}), which are kept, and in which type?"
        )
    return "With one layer yours is right. What does a second one add: which input, which copy, and what of the GELU?"


def _more(nbytes: int) -> str:
    return "many" if nbytes > 0 else "few"


_BYTES = Exercise(
    number="6.2",
    kind="write",
    task="Say how many bytes a chain of linear layers and GELUs saves for backward under autocast.",
    difficulty=2,
    minutes=8,
    objective=_WHICH_TYPE,
    run=_bytes_by,
    truth=_bytes_counted,
    mistakes=(
        Mistake(
            _sum_of(inputs=2, gelu=2, output=4),
            "The activations are right. And what do the layers multiply by, in which type, and who keeps it?",
        ),
        Mistake(
            _sum_of(inputs=2, gelu=2, output=4, **{"all copies": 2}),
            "Almost: a layer keeps its weight's copy for the gradient of its input. Who asks for the gradient of x?",
        ),
        Mistake(
            _sum_of(inputs=2, gelu=2, output=2, copies=2),
            "Almost: the loss runs in fp32. What does it keep of the output?",
        ),
        Mistake(
            _sum_of(inputs=2, gelu=2, output=6, copies=2),
            "Almost: the last layer's result is in your sum in bf16 too. Is there a GELU behind it that keeps it?",
        ),
        Mistake(
            _sum_of(inputs=2, gelu=2, copies=2),
            "Almost: the loss keeps something as well. In which type does it run?",
        ),
        Mistake(
            _sum_of(inputs=2, output=4, copies=2),
            "A GELU keeps its input, the layer after it what the GELU gives. Is that one tensor, as in a ReLU?",
        ),
        Mistake(
            _sum_of(inputs=4, gelu=4, output=4),
            "That is the plain step, in fp32. How many bytes has an input that is cast?",
        ),
        Mistake(
            _halved_layers,
            "That is half of the plain step. What does autocast add to it, and what does it leave in fp32?",
        ),
        Mistake(
            _sum_of(inputs=1, gelu=1, output=1, copies=1), "These are numbers, not bytes: how many bytes has each kind?"
        ),
        Mistake(
            _sum_of(inputs=2, gelu=2, output=4, copies=4),
            "Almost: the copies of the weights are what was multiplied. In which type was that?",
        ),
        Mistake(
            _sum_of(inputs=2, gelu=4, output=4, copies=2),
            "Almost: a GELU has a linear layer before it. In which type is what that layer gives?",
        ),
    ),
    diagnose=_which_part,
)


# ------------------------------------------------------------------------------------- 6.3 a scaled step, in order

_LINES = {
    "a": "scaler.scale(loss).backward()",
    "b": "scaler.update()",
    "c": "optimizer.step()",
    "d": "optimizer.zero_grad()",
    "e": "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
    "f": "scaler.step(optimizer)",
    "g": "loss = loss_fn(model(x), y)",
    "h": "loss.backward()",
    "i": "scaler.unscale_(optimizer)",
}


def _training() -> tuple[nn.Module, torch.optim.Optimizer, list[tuple[Tensor, Tensor]]]:
    """Four batches, the third of which has an infinite loss."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    batches = [(_numbers(n, 16, 6), 20 * _numbers(n + 10, 16, 3)) for n in range(4)]
    batches[2][1][0] = math.inf
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), batches


def _ordered(order: Answer) -> Result:
    """The lines run in that order, for each batch; text where PyTorch refuses."""
    letters = letters_of(order, _LINES, "line", "d b")
    model, optimizer, batches = _training()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    space: dict[str, Any] = {
        "torch": torch, "model": model, "optimizer": optimizer, "scaler": scaler, "loss_fn": nn.MSELoss()
    }  # fmt: skip
    for x, y in batches:
        space |= {"x": x, "y": y}
        for letter in letters:
            try:
                exec(_LINES[letter], space)
            except (AssertionError, NameError, RuntimeError) as error:
                return {"refused": letter, "why": str(error), "order": "".join(letters)}
    return {"weights": _weights(model), "scale": scaler.get_scale()}


def _unscaled() -> Result:
    """The same steps without scaling, where the batch with an infinite loss is left out."""
    model, optimizer, batches = _training()
    for x, y in (batches[0], batches[1], batches[3]):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return {"weights": _weights(model), "scale": 512.0}


def _what_ran(result: Result, truth: Result) -> str | None:
    if "refused" in result:
        letter, order = result["refused"], result["order"]
        if "loss" in result["why"] and "defined" in result["why"]:
            return f"At `{_LINES[letter]}` there is no loss yet."
        if "second time" in result["why"]:
            return "Two backward passes run through one graph: which of the two lines is to stay out?"
        if "already been called" in result["why"]:
            return (
                f"At `{_LINES[letter]}` the scaler says that it has done so for this optimizer since the last update: "
                "is a line there twice, or does one that ends the iteration come too early or not at all?"
            )
        if order.find("a") < 0 and order.find("h") < 0:
            return "No backward pass is in it, so that there are no gradients."
        return (
            f"At `{_LINES[letter]}` the scaler has looked at no gradients: {result['why']} Are there gradients at that "
            "place, and did the scaler get to see them?"
        )
    if (result["weights"] == _NAN).any():
        return "After a batch whose gradients are not finite, the weights are not either: who was to skip that step?"
    if same(result["weights"], truth["weights"]):
        return f"The weights are right, the scale is {result['scale']:g}: what sets it when gradients were infinite?"
    return (
        "It runs, and the weights are not those of training without scaling: when each line runs, are the gradients "
        "scaled or not, this batch's alone, and all of them there?"
    )


_IN_ORDER = Exercise(
    number="6.3",
    kind="order",
    task="Order the lines of a training step with loss scaling and clipped gradients.",
    difficulty=2,
    minutes=4,
    objective=_SCALED,
    run=_ordered,
    truth=_unscaled,
    mistakes=(
        Mistake(
            "d g a e i f b",
            "It runs, and hardly learns: when gradients are clipped to a norm of 1, are they scaled or not?",
        ),
        Mistake(
            "d g a i e c b",
            "`optimizer.step()` steps whatever the gradients are: the third batch has made the weights NaN.",
        ),
        Mistake(
            "d g h i e f b",
            "Your backward pass starts from the loss as it is, and the gradients are divided by the scale.",
        ),
        Mistake(
            "d g a i f e b",
            "The optimizer steps with gradients that nobody has clipped: is that line there, and before the step?",
        ),
        Mistake(
            "g a i e f b",
            "No line clears the gradients: to what does the second backward pass add its own?",
        ),
        Mistake(
            "d g a i e b f",
            "The scaler is updated before it steps: it then forgets what it saw, and divides by the scale once more.",
        ),
        Mistake(
            "d g a i e f",
            "The first batch goes well, the second is refused: the scaler never hears that an iteration is over.",
        ),
        Mistake(
            "g a d i e f b",
            "The gradients are cleared before anyone has used them, so that the scaler finds none.",
        ),
    ),
    diagnose=_what_ran,
)


# ----------------------------------------------------------------------------------------- 6.4 a scaled step, by hand

_Loss = Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]


def _fp16_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    with torch.autocast("cpu", dtype=torch.float16):
        return F.mse_loss(model(batch[0]), batch[1])


def _first_is_nan(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A loss that is finite, and gradients of which the first parameter's alone are not."""
    return _fp16_loss(model, batch) + (0 * next(model.parameters()).sum()).sqrt()


def _last_is_infinite(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    total = [*model.parameters()][-1].sum()
    return _fp16_loss(model, batch) + (total - total.detach()).sqrt()


# One model's three steps, of which the second overflows, and a step of each of two others.
_TRAININGS: tuple[tuple[tuple[_Loss, float], ...], ...] = (
    ((_fp16_loss, 2.0**12), (_fp16_loss, 2.0**40), (_fp16_loss, 2.0**6)),
    ((_first_is_nan, 2.0**10),),
    ((_last_is_infinite, 2.0**8),),
)


def _steps(step: Answer) -> Result:
    """For each step: the scale that came back, and the weights after it."""
    results: list[dict[str, Any]] = []
    for training in _TRAININGS:
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for number, (loss_fn, scale) in enumerate(training):
            batch = _numbers(number, 32, 8), _numbers(20 + number, 32, 4)
            returned = step(model, batch, loss_fn, optimizer, scale)
            results.append({"scale": returned, "weights": _weights(model)})
    return None if all(its["scale"] is None for its in results) else results


def _by_grad_scaler(
    model: nn.Module, batch: tuple[Tensor, Tensor], loss_fn: _Loss, optimizer: torch.optim.Optimizer, scale: float
) -> float:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    optimizer.zero_grad()
    scaler.scale(loss_fn(model, batch)).backward()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


def _all_finite(gradients: Iterable[Tensor]) -> bool:
    return all(bool(gradient.isfinite().all()) for gradient in gradients)


def _by_hand(
    *,
    clear: bool = True,
    scaled: bool = True,
    unscale: Callable[[Tensor, float], Tensor] = lambda gradient, scale: gradient / scale,
    look: Callable[[Tensor, list[Tensor]], bool] = lambda loss, gradients: _all_finite(gradients),
    skipped: Callable[[nn.Module, torch.optim.Optimizer], None] = lambda model, optimizer: None,
    after: Callable[[float, bool], float] = lambda scale, finite: scale if finite else scale / 2,
) -> Answer:
    """A scaled step with one of its parts another than it should be."""

    def step(model: nn.Module, batch: Any, loss_fn: _Loss, optimizer: torch.optim.Optimizer, scale: float) -> float:
        if clear:
            optimizer.zero_grad()
        loss = loss_fn(model, batch)
        (loss * scale if scaled else loss).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad = unscale(parameter.grad, scale)
        finite = look(loss, [p.grad for p in model.parameters() if p.grad is not None])
        if finite:
            optimizer.step()
        else:
            skipped(model, optimizer)
        return after(scale, finite)

    return step


def _cleaned(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A step with what is not finite set to 0."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = torch.nan_to_num(parameter.grad, 0.0, 0.0, 0.0)
    optimizer.step()


def _zeroed(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.zero_()
    optimizer.step()


def _what_the_step_did(result: Result, truth: Result) -> str | None:
    scales, right = [its["scale"] for its in result], [its["scale"] for its in truth]
    weights, moved_to = [its["weights"] for its in result], [its["weights"] for its in truth]
    if not all(isinstance(scale, int | float) and not isinstance(scale, bool) for scale in scales):
        return "What comes back is to be the scale for the next step, a number, after a good step and after a skip."
    if not same(weights[0], moved_to[0]):
        return "The first step, with finite gradients, moves the weights to a wrong place: what did the optimizer get?"
    if (weights[1] == _NAN).any():
        return "In the second case gradients are not finite, and the weights took them."
    if not same(weights[1], weights[0]):
        return "In the second case gradients are not finite. Your weights move all the same: by momentum, perhaps?"
    if not same(weights[3:], moved_to[3:]):
        return "In two cases one parameter's gradient is NaN or infinite and others are finite. Did you look at all?"
    if same(weights[2], weights[1]):
        return "After a step that was skipped the next one is skipped too. What did the skipped one leave behind?"
    if not same(scales, right):
        return "The weights are right. The scale is not: what is it after a good step, what after a skip?"
    return "The first step is right, and a later one is not: what had the steps before it left behind?"


_BY_HAND = Exercise(
    number="6.4",
    kind="write",
    task="Write one training step with loss scaling, without GradScaler.",
    difficulty=3,
    minutes=8,
    objective=_SCALED,
    run=_steps,
    truth=lambda: _steps(_by_grad_scaler),
    mistakes=(
        Mistake(
            _by_hand(unscale=lambda gradient, scale: gradient),
            "The optimizer is given gradients that are still scaled. What has to happen between backward and the step?",
        ),
        Mistake(
            _by_hand(look=lambda loss, gradients: True),
            "A step was made with gradients that are not finite: the weights are NaN from there on.",
        ),
        Mistake(
            _by_hand(skipped=_cleaned),
            "What is not finite was set to 0, and then there was a step. Such a batch is left out altogether.",
        ),
        Mistake(
            _by_hand(skipped=_zeroed),
            "A step with gradients of 0 is a step: momentum moves the weights, and decays.",
        ),
        Mistake(
            _by_hand(look=lambda loss, gradients: bool(loss.isfinite())),
            "You looked at the loss. It is computed in fp32 and finite: what overflows is on the way back.",
        ),
        Mistake(
            _by_hand(look=lambda loss, gradients: bool(gradients[-1].isfinite().all())),
            "You looked at the last parameter's gradient. In one case another one is not finite.",
        ),
        Mistake(
            _by_hand(look=lambda loss, gradients: bool(gradients[0].isfinite().all())),
            "You step where the first parameter's gradient is finite and the last one's is infinite. Do you look at "
            "all of them, and for infinity as well as for NaN?",
        ),
        Mistake(
            _by_hand(look=lambda loss, gradients: any(bool(g.isfinite().all()) for g in gradients)),
            "You step where one parameter's gradient is not finite and others are. How many have to be?",
        ),
        Mistake(
            _by_hand(clear=False),
            "The gradients of the step before are still there, and backward adds to them.",
        ),
        Mistake(
            _by_hand(after=lambda scale, finite: scale),
            "The steps are right. After a skip the scale is as it was: will the next step not overflow as well?",
        ),
        Mistake(
            _by_hand(after=lambda scale, finite: 2 * scale if finite else scale / 2),
            "The steps are right. The task leaves growth out: after a good step the scale stays.",
        ),
        Mistake(
            _by_hand(after=lambda scale, finite: scale / 2 if finite else scale),
            "The steps are right, and the scale falls in the wrong case: when was it too large?",
        ),
        Mistake(
            _by_hand(scaled=False),
            "The loss was not multiplied by the scale, and the gradients were divided by it all the same.",
        ),
        Mistake(
            _by_hand(scaled=False, unscale=lambda gradient, scale: gradient),
            "That is a step without scaling. What would a scale of 2**40 have done in the second case?",
        ),
        Mistake(
            _by_hand(unscale=lambda gradient, scale: gradient * scale),
            "The gradients are multiplied by the scale once more: how does one undo the first time?",
        ),
    ),
    diagnose=_what_the_step_did,
)


# ------------------------------------------------------------------------------------------ 6.5 updates that vanish

_TYPES = {8: torch.bfloat16, 11: torch.float16, 24: torch.float32}
_WEIGHTS = (1.0, 1.5, 1.9375, 2.0, 3.0, 0.75, 0.0625, 20.0, 256.0)
_OF_A_SPACING = (0.2, 0.45, 0.55, 0.8, 1.5)
_CASES = [
    (weight, share * 2.0 ** (math.floor(math.log2(weight)) - digits + 1), digits)
    for digits in _TYPES
    for weight in _WEIGHTS
    for share in _OF_A_SPACING
]


def _verdicts(answer: Answer) -> Result:
    return [answer(*case) for case in _CASES]


def _added() -> Result:
    """What PyTorch's own addition says."""
    return [
        bool(
            torch.tensor(weight, dtype=_TYPES[digits]) + torch.tensor(update, dtype=_TYPES[digits])
            == torch.tensor(weight, dtype=_TYPES[digits])
        )
        for weight, update, digits in _CASES
    ]


def _below(limit: Callable[[float, int], float]) -> Answer:
    """The answer by which an update vanishes below that limit."""
    return lambda weight, update, digits: update < limit(weight, digits)


def _spacing(weight: float, digits: int) -> float:
    """The distance to the next larger number."""
    return math.ldexp(1.0, math.frexp(weight)[1] - digits)


def _where_it_differs(result: Result, truth: Result) -> str | None:
    if not all(isinstance(its, bool) or its in (0, 1) for its in result):
        return "It is to return True where the update vanishes, and False where the weight moves."
    wrong = [number for number, its in enumerate(result) if bool(its) != truth[number]]
    if not wrong:
        return "The answers are right and are numbers: return True or False."
    weight, update, digits = _CASES[wrong[0]]
    said = "vanishes" if result[wrong[0]] else "moves the weight"
    return (
        f"In {len(wrong)} of {len(truth)} cases PyTorch's addition says otherwise. One of them: {digits} digits, "
        f"w = {weight:g}. Next to it the numbers are {_spacing(weight, digits):.3g} apart, and yours says that "
        f"{update:.3g} {said}."
    )


_LOST = Exercise(
    number="6.5",
    kind="write",
    task="Say whether an update vanishes when it is added to a weight, in a format with so many digits.",
    difficulty=2,
    minutes=6,
    objective=_VANISHES,
    run=_verdicts,
    truth=_added,
    mistakes=(
        Mistake(
            _below(_spacing),
            "Your limit is twice too large: a sum is rounded to the nearest number. How far is it to the middle? (At 1 "
            "a format with 8 digits is spaced by 2**-7.)",
        ),
        Mistake(
            _below(lambda weight, digits: _spacing(weight, digits) / 4),
            "Some updates that you let through vanish: your limit is half of what it should be. Is a format with 8 "
            "digits spaced by 2**-7 or by 2**-8 at 1?",
        ),
        Mistake(
            _below(lambda weight, digits: 2.0**-digits),
            "Right at 1. At 256 the numbers are further apart than at 1: where is w in your limit?",
        ),
        Mistake(
            _below(lambda weight, digits: 2.0 ** (1 - digits)),
            "Two things: a sum goes to the nearest number, so half a spacing counts; and where is w in your limit?",
        ),
        Mistake(
            _below(lambda weight, digits: weight * 2.0**-digits),
            "Right at powers of 2. Between two of them the spacing stays as it is: at 1.9 it is that at 1.",
        ),
        Mistake(
            _below(lambda weight, digits: weight * 2.0 ** (1 - digits)),
            "Two things: half a spacing counts; and between two powers of 2 the spacing does not grow with w.",
        ),
        Mistake(
            lambda weight, update, digits: weight + update == weight,
            "With you nothing vanishes. Python's own numbers have 53 digits, whatever `digits` is.",
        ),
        Mistake(
            lambda weight, update, digits: update >= _spacing(weight, digits) / 2,
            "The limit is right. You say the opposite: what is asked is when the update is lost.",
        ),
        Mistake(
            _below(lambda weight, digits: torch.finfo(_TYPES[digits]).smallest_normal),
            "All of these updates are numbers that the format has. What is lost is in the sum, beside w.",
        ),
        Mistake(
            _below(lambda weight, digits: 2.0 ** (round(math.log2(weight)) - digits)),
            "Your limit jumps at 1.41 times a power of 2: the power that counts is the one at or below w.",
        ),
        Mistake(
            _below(lambda weight, digits: 2.0 ** (math.ceil(math.log2(weight)) - digits)),
            "Right at powers of 2. Between two of them you take the upper one: which one is the spacing's?",
        ),
    ),
    diagnose=_where_it_differs,
)


EXERCISES: tuple[Exercise, ...] = (_CASTS, _BYTES, _IN_ORDER, _BY_HAND, _LOST)

QUIZ: tuple[Question, ...] = (
    Question(
        "A model's parameters take 100 MiB in fp32. It is trained with AdamW, under autocast in bf16. What do "
        "parameters, gradients and optimizer state take at the end of the backward pass?",
        (
            Option("200 MiB, half of what they take in fp32", "autocast leaves all of them in fp32."),
            Option(
                "300 MiB: parameters and gradients are halved, the optimizer state is not",
                "a gradient has the type of its parameter.",
            ),
            Option("400 MiB, as in fp32", "autocast rounds copies, and those are extra.", right=True),
        ),
    ),
    Question(
        "Training in fp16 has its first layers' gradients at 0. In bf16 they are not 0. Why?",
        (
            Option("bf16 has more digits", "it has fewer: 8 against 11."),
            Option("bf16 has the exponents of fp32", "its smallest numbers are far smaller.", right=True),
            Option(
                "in bf16 PyTorch scales the loss by itself, and undoes it before the step",
                "it scales in neither; `GradScaler` is for the program to call.",
            ),
        ),
    ),
    Question(
        "A model is cast with `model.bfloat16()` and trained with AdamW at a small learning rate. The loss hardly "
        "moves. What happens?",
        (
            Option(
                "most updates are less than half a spacing of their weight",
                "the sum is rounded back to the weight.",
                right=True,
            ),
            Option("the gradients underflow to 0", "bf16 has the range of fp32; they are there."),
            Option(
                "AdamW's averages overflow, since squares of gradients leave the range",
                "the range is that of fp32.",
            ),
            Option("autocast's copies of the weights are out of date", "there is no autocast here, and no copy."),
        ),
    ),
)
