"""Lesson 7, gradients on the fly: five exercises and the quiz.

What is checked are trained parameters, bytes, files and the order of events; the truth is a plain training step of
PyTorch, its own optimizers, memlab's instruments, or events that were logged while they happened.
"""

from __future__ import annotations

import functools
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ...record import record
from ...units import format_bytes
from ..exercises import Answer, Exercise, Mistake, Result, letters_of, same
from ..quizzes import Option, Question
from .numbers import drawn

_STEP = "step the optimizer inside backward, with hooks of your own"
_WHEN = "say when gradients are born and let go, and when that lowers the peak"
_TOP = "find a peak that sits in the optimizer, and predict its height"
_OFFLOAD = "offload saved tensors to another memory, with hooks of your own"


def _net(depth: int = 3) -> nn.Sequential:
    """Linear layers in float64, all 4 by 4; the same weights in every call."""
    net = nn.Sequential(*(nn.Linear(4, 4, bias=False, dtype=torch.float64) for _ in range(depth)))
    for number, parameter in enumerate(net.parameters()):
        parameter.data = drawn(number, 4, 4) / 2
    return net


def _backward(net: nn.Sequential, step: int) -> None:
    """The backward pass of that step, each on data of its own."""
    net(drawn(100 + step, 6, 4)).square().mean().backward()


def _copies(net: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in net.parameters()]


def _left(net: nn.Module) -> int:
    """Bytes of gradients."""
    return sum(parameter.grad.nbytes for parameter in net.parameters() if parameter.grad is not None)


def _times(result: Sequence[Tensor], truth: Sequence[Tensor], start: Sequence[Tensor]) -> float | None:
    """How many times the right step each parameter has made, where that is one number for all."""
    made, right = (
        torch.cat([(its - at).flatten() for its, at in zip(all_, start, strict=True)]) for all_ in (result, truth)
    )
    times = float(made @ right / (right @ right))
    return times if same(made, times * right) else None


def _of_a_wrong_length(times: float, lr: float) -> str:
    """What to say to a first step that is so many times the right one."""
    if abs(times) < 1e-9:
        return (
            "In the first step no parameter moves: is a hook called, and which of its lines changes the parameter's "
            "own numbers?"
        )
    if times < 0:
        return "The loss climbs: in which direction does a gradient point?"
    if same(times, 1 / lr):
        return "The first step is as if `lr` were 1: what is `lr` for?"
    return f"The first step is {times:.3g} times what it should be. What is the gradient multiplied by, on its way?"


# ---------------------------------------------------------------------------------------------------- 7.1 SGD in a hook

_RATES = (0.1, 0.03)
_Update = Callable[[Tensor, Tensor, float], None]


def _trained_by(make_hook: Answer) -> Result:
    """For each learning rate: the parameters after one step and after three, and the bytes of gradients left."""
    results = []
    for lr in _RATES:
        net, after = _net(), []
        for parameter in net.parameters():
            if (hook := make_hook(lr)) is None:
                return None
            parameter.register_post_accumulate_grad_hook(hook)
        for step in range(3):
            _backward(net, step)
            after.append(_copies(net))
        results.append({"first": after[0], "last": after[-1], "left": _left(net)})
    return results


def _trained_by_sgd() -> Result:
    results = []
    for lr in _RATES:
        net, after = _net(), []
        optimizer = torch.optim.SGD(net.parameters(), lr=lr)
        for step in range(3):
            _backward(net, step)
            optimizer.step()
            optimizer.zero_grad()
            after.append(_copies(net))
        results.append({"first": after[0], "last": after[-1], "left": 0})
    return results


def _hook(update: _Update, let_go: Callable[[Any], None] | None = None) -> Answer:
    """A hook that makes this update, and lets the gradient go like that."""

    def make_hook(lr: float) -> Callable[[Any], None]:
        def hook(parameter: Any) -> None:
            update(parameter, parameter.grad, lr)
            if let_go:
                let_go(parameter)
            else:
                parameter.grad = None

        return hook

    return make_hook


def _descend(parameter: Tensor, gradient: Tensor, lr: float) -> None:
    parameter.sub_(lr * gradient)


def _nothing(*_: Any) -> None:
    pass


def _what_the_hook_does(result: Result, truth: Result) -> str | None:
    one, right = result[0], truth[0]
    times = _times(one["first"], right["first"], _copies(_net()))
    if times is None:
        return "The parameters have moved, but not along their gradients: which two tensors does the update read?"
    if not same(times, 1.0):
        return _of_a_wrong_length(times, _RATES[0])
    if one["left"]:
        return (
            f"The first update is right. After backward {format_bytes(one['left'])} of gradients are in memory: "
            "what has to happen to them, and what does the next backward add to?"
        )
    return "The first update is right, a later one or one with another `lr` is not: do you use the hook's `lr`?"


_FILL = Exercise(
    number="7.1",
    kind="fill",
    task="Fill in a hook that makes the update of plain SGD, and lets the gradient go.",
    difficulty=1,
    minutes=3,
    objective=_STEP,
    run=_trained_by,
    truth=_trained_by_sgd,
    mistakes=(
        Mistake(
            _hook(_descend, _nothing),
            "The first update is right. But the gradient is still there after it: the next backward pass adds to it, "
            "and all gradients are alive together.",
        ),
        Mistake(
            _hook(_descend, lambda parameter: parameter.grad.zero_()),
            "The parameters are right, and the memory is not given back: a gradient of zeros is as large as any other.",
        ),
        Mistake(
            _hook(_nothing, _nothing),
            "No parameter has moved, and its gradient is still there. `parameter = ...` gives the name to a new "
            "tensor: which operation changes the numbers of the one that there is?",
        ),
        Mistake(
            _hook(_nothing),
            "No parameter has moved. `parameter - ...` computes a new tensor: which operation changes the numbers of "
            "the one that there is?",
        ),
    ),
    diagnose=_what_the_hook_does,
)


# -------------------------------------------------------------------------------------- 7.2 births and deaths, in order

_EVENTS = {
    "a": "layer 1's gradient is born",
    "b": "layer 2's gradient is born",
    "c": "layer 3's gradient is born",
    "d": "layer 1 is updated, its gradient let go",
    "e": "layer 2 is updated, its gradient let go",
    "f": "layer 3 is updated, its gradient let go",
    "g": "the loss is computed",
    "h": "all gradients are there together",
}


def _events(order: Answer) -> Result:
    """The events that the letters name."""
    return [_EVENTS[letter] for letter in letters_of(order, _EVENTS, "event", "d b")]


def _events_that_happened() -> Result:
    """Logged in a step: a gradient's birth by a hook on the gradient, its end by the hook that makes the update."""
    log: list[str] = []
    net = _net()

    def consume(layer: int, parameter: Tensor) -> None:
        if all(its.grad is not None for its in net.parameters()):
            log.append(_EVENTS["h"])
        parameter.sub_(0.1 * parameter.grad)  # type: ignore[operator]
        parameter.grad = None
        log.append(f"layer {layer} is updated, its gradient let go")

    for layer, parameter in enumerate(net.parameters(), 1):
        born = f"layer {layer}'s gradient is born"
        parameter.register_hook(lambda gradient, born=born: log.append(born))
        parameter.register_post_accumulate_grad_hook(functools.partial(consume, layer))
    loss = net(drawn(0, 2, 4)).square().mean()
    log.append(_EVENTS["g"])
    loss.backward()
    return log


def _what_is_out_of_order(result: Result, truth: Result) -> str | None:
    if _EVENTS["h"] in result:
        return "When layer 2's gradient is born, is layer 3's still there? Then can all be there together?"
    if twice := [its for its in result if result.count(its) > 1]:
        return f"“{twice[0]}” is there twice: in one step each happens once."
    if missing := [its for its in truth if its not in result]:
        return f"{len(missing)} of the things that happen {'is' if len(missing) == 1 else 'are'} missing."
    if result[0] != truth[0]:
        return "Something happens before the loss is there: what would a gradient be the gradient of?"
    at = {its: place for place, its in enumerate(result)}
    born, gone = ([at[_EVENTS[letter]] for letter in letters] for letters in ("cba", "fed"))
    if any(end < birth for birth, end in zip(born, gone, strict=True)):
        return "A layer is updated before its gradient is born: what would the update read?"
    if born != sorted(born):
        return "Backward begins at the loss: which layer does it come to first?"
    return "Two gradients are there together: when is a layer's hook called, and what does it do?"


_ORDER = Exercise(
    number="7.2",
    kind="order",
    task="Order the births and ends of three layers' gradients, with the optimizer in backward.",
    difficulty=1,
    minutes=3,
    objective=_WHEN,
    run=_events,
    truth=_events_that_happened,
    mistakes=(
        Mistake(
            "g a d b e c f",
            "Each gradient is used at once, but the order is that of the forward pass: which layer is next to the "
            "loss?",
        ),
        Mistake(
            "g c b a f e d",
            "This is the plain step: all gradients are born before the first is used. When is a layer's hook called?",
        ),
        Mistake(
            "g c b f a e d",
            "In yours an update waits for the next gradient, so that two are alive. When a layer's hook is called, "
            "backward has used that layer's old weights: what is there to wait for?",
        ),
        Mistake(
            "g a b c d e f",
            "Two things: which layer is next to the loss? And does a hook wait until backward is over?",
        ),
        Mistake(
            "c f b e a d g",
            "Backward goes from the loss to the layers, so what has to be there before any gradient?",
        ),
    ),
    diagnose=_what_is_out_of_order,
)


# ------------------------------------------------------------------------------------------------ 7.3 SGD with momentum

_HOW: tuple[dict[str, Any], ...] = ({"lr": 0.1, "momentum": 0.9}, {"lr": 0.02, "momentum": 0.5})


def _half_frozen() -> nn.Sequential:
    """Four layers, of which the second is frozen."""
    net = _net(depth=4)
    net[1].requires_grad_(False)
    return net


def _trained_in_backward(answer: Answer) -> Result:
    """The parameters after each of three steps, what is then in memory beside them and the velocities, and whether the
    hooks can be taken away."""
    results: list[dict[str, Any]] = []
    for how in _HOW:
        net, after = _half_frozen(), []
        with record(net) as trace:
            remove = answer(net, **how)
            if remove is None or remove is ...:
                return None
            for step in range(3):
                _backward(net, step)
                after.append(_copies(net))
            left = _left(net)
            torch.zeros(1)  # one more operator: what is alive then is what the steps have left
        there = trace.alive(max(its.tick for its in trace.operators))
        held = sum(its.nbytes for its in there if its.category != "parameters")
        held -= sum(its.nbytes for copies in after for its in copies)
        held -= sum(its.nbytes for its in net.parameters() if its.requires_grad)
        before = _copies(net)
        if not callable(remove):
            return f"What you return is no function but {remove!r:.60}: what can be called to take the hooks away?"
        remove()
        net.zero_grad()
        _backward(net, 3)
        stayed = [same(its, at) for its, at in zip(net.parameters(), before, strict=True)]
        results.append({"after": after, "left": left, "held": held if held > 64 else 0, "removed": stayed})
    return results


def _trained_by_momentum() -> Result:
    results: list[dict[str, Any]] = []
    for how in _HOW:
        net, after = _half_frozen(), []
        optimizer = torch.optim.SGD(net.parameters(), **how)
        for step in range(3):
            _backward(net, step)
            optimizer.step()
            optimizer.zero_grad()
            after.append(_copies(net))
        results.append({"after": after, "left": 0, "held": 0, "removed": [True] * 4})
    return results


_Momentum = Callable[[Any, Tensor, float, float], None]


def _with_velocity(
    update: _Momentum,
    *,
    shared: bool = False,
    let_go: Callable[[Any], None] | None = None,
    removed: slice = slice(None),
) -> Answer:
    """The exercise's function with this update, which is given a parameter, its velocity, lr and momentum."""

    def step_in_backward(model: nn.Module, lr: float, momentum: float) -> Callable[[], None]:
        handles: list[Any] = []
        velocities: dict[Tensor, Tensor] = {}

        def hook(parameter: Any) -> None:
            update(parameter, velocities[parameter], lr, momentum)
            if let_go:
                let_go(parameter)
            else:
                parameter.grad = None

        for parameter in model.parameters():
            if parameter.requires_grad:
                first = next(iter(velocities.values()), None)
                velocities[parameter] = first if shared and first is not None else torch.zeros_like(parameter)
                handles.append(parameter.register_post_accumulate_grad_hook(hook))

        def remove() -> None:
            for handle in handles[removed]:
                handle.remove()

        return remove

    return step_in_backward


def _momentum(parameter: Any, velocity: Tensor, lr: float, momentum: float) -> None:
    velocity.mul_(momentum).add_(parameter.grad)
    parameter.sub_(lr * velocity)


def _no_momentum(parameter: Any, velocity: Tensor, lr: float, momentum: float) -> None:
    parameter.sub_(lr * parameter.grad)


def _dampened(parameter: Any, velocity: Tensor, lr: float, momentum: float) -> None:
    velocity.mul_(momentum).add_((1 - momentum) * parameter.grad)
    parameter.sub_(lr * velocity)


def _old_velocity(parameter: Any, velocity: Tensor, lr: float, momentum: float) -> None:
    parameter.sub_(lr * velocity)
    velocity.mul_(momentum).add_(parameter.grad)


def _rate_twice(parameter: Any, velocity: Tensor, lr: float, momentum: float) -> None:
    velocity.mul_(momentum).add_(lr * parameter.grad)
    parameter.sub_(lr * velocity)


def _undamped(parameter: Any, velocity: Tensor, lr: float, momentum: float) -> None:
    velocity.add_(parameter.grad)
    parameter.sub_(lr * velocity)


def _nesterov(parameter: Any, velocity: Tensor, lr: float, momentum: float) -> None:
    velocity.mul_(momentum).add_(parameter.grad)
    parameter.sub_(lr * (parameter.grad + momentum * velocity))


def _what_is_off(result: Result, truth: Result) -> str | None:
    if isinstance(result, str):
        return result
    for one, right in zip(result, truth, strict=True):
        for step, (parameters, its) in enumerate(zip(one["after"], right["after"], strict=True)):
            if same(parameters, its):
                continue
            if not same(parameters[1], its[1]):
                return "A parameter that is frozen has moved: which parameters take a hook?"
            if step == 1 and one["left"]:
                return "The first step is right, the second is not, and gradients are left. What does backward add to?"
            if step:
                return (
                    "The first step is right, a later one is not. What does a velocity remember from the step before, "
                    "and by what is that multiplied?"
                )
            times = _times(parameters, its, _copies(_half_frozen()))
            if times is None:
                return (
                    "Even the first step is off, and not by a factor: is each velocity zeros at first, and one's own?"
                )
            return _of_a_wrong_length(times, _HOW[0]["lr"])
    one = result[0]
    if one["left"]:
        return f"All steps are right. After backward {format_bytes(one['left'])} of gradients are there: who lets go?"
    if one["held"]:
        return f"All steps are right, and {format_bytes(one['held'])} more than the velocities stay in memory. What of?"
    return "All steps are right. After the call of what you return, backward still trains: which hooks are left?"


_WRITE = Exercise(
    number="7.3",
    kind="write",
    task="Write SGD with momentum that steps inside backward, and can be taken away again.",
    difficulty=2,
    minutes=7,
    objective=_STEP,
    run=_trained_in_backward,
    truth=_trained_by_momentum,
    mistakes=(
        Mistake(
            _with_velocity(_no_momentum),
            "This is SGD without momentum: in each call the velocity is what it was at first. `velocity = ...` in a "
            "hook makes a new tensor, forgotten when the hook returns: where does it stay?",
        ),
        Mistake(
            _with_velocity(_momentum, shared=True),
            "All parameters share one velocity. A hook looks a variable up when it is called, and by then the loop is "
            "at its end: how does each hook keep its own?",
        ),
        Mistake(
            _with_velocity(_momentum, let_go=lambda parameter: parameter.grad.zero_()),
            "All steps are right, and the gradients stay: zeros take as much memory as any gradient.",
        ),
        Mistake(
            _with_velocity(_momentum, let_go=_nothing),
            "The first step is right. Then the gradient of the step before is still there, and backward adds to it.",
        ),
        Mistake(
            _with_velocity(_momentum, removed=slice(0)),
            "All steps are right. But what you return takes no hook away: `register_post_accumulate_grad_hook` returns "
            "something with a `remove()`.",
        ),
        Mistake(
            _with_velocity(_momentum, removed=slice(-1, None)),
            "All steps are right. What you return takes one hook away, the last: where are the others' handles?",
        ),
        Mistake(
            _with_velocity(_dampened),
            "The new gradient goes in with a weight of 1 - momentum. That is a mean; which weight has the task?",
        ),
        Mistake(
            _with_velocity(_old_velocity),
            "The parameter moves by the velocity of the step before: which of the two lines comes first?",
        ),
        Mistake(_with_velocity(_rate_twice), "`lr` is in it twice: in the velocity, and where the parameter moves."),
        Mistake(
            _with_velocity(_undamped),
            "The velocity adds gradients up and never gets less: by what is the old one multiplied?",
        ),
        Mistake(
            _with_velocity(_nesterov),
            "That looks one step ahead, as Nesterov's form of momentum does. In the task the parameter moves by the "
            "velocity alone.",
        ),
    ),
    diagnose=_what_is_off,
)


# ---------------------------------------------------------------------------------------- 7.4 the optimizer step's peak

_Sizes = Sequence[int]
_Peak = Callable[[_Sizes, str], float]
_NETS = ([4096, 1024, 2048], [1024, 8192, 7168], [2048] * 5, [2048, 512, 512, 4096], [1024])
_OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "fused": functools.partial(torch.optim.AdamW, fused=True),
    "foreach": functools.partial(torch.optim.AdamW, foreach=True),
    "loop": functools.partial(torch.optim.AdamW, foreach=False),
}
_STATES = {"sgd": 0, "momentum": 1, "fused": 2, "foreach": 2, "loop": 2}


def _peaks(answer: Answer) -> Result:
    return {kind: [answer(list(sizes), kind) for sizes in _NETS] for kind in _OPTIMIZERS}


@functools.cache
def _measured(sizes: tuple[int, ...], kind: str) -> int:
    """A second step of the optimizer on float32 parameters of these sizes, measured; without AdamW's counts of steps,
    and without the few bytes of single numbers."""
    parameters = [torch.zeros(size // 4, requires_grad=True) for size in sizes]
    optimizer = _OPTIMIZERS[kind](parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with record(optimizer=optimizer) as trace:
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return trace.by_phase("tensor_peak")["optimizer"] // 256 * 256


def _measured_peaks() -> Result:
    return {kind: [_measured(tuple(sizes), kind) for sizes in _NETS] for kind in _OPTIMIZERS}


def _in_turn(sizes: _Sizes) -> int:
    return max(2 * size + before for before, size in pairwise([0, *sizes]))


def _sum_with(
    loop: Callable[[_Sizes], int] = _in_turn,
    *,
    foreach: float = 1,
    fused: float = 0,
    copies: int = 2,
    states: dict[str, int] = _STATES,
) -> _Peak:
    """The exercise's function with these parts."""

    def optimizer_peak(sizes: _Sizes, kind: str) -> float:
        temporaries = {"loop": loop(sizes), "foreach": foreach * sum(sizes), "fused": fused * sum(sizes)}
        return (copies + states[kind]) * sum(sizes) + temporaries.get(kind, 0)

    return optimizer_peak


def _temporaries_alone(sizes: _Sizes, kind: str) -> float:
    return {"loop": _in_turn(sizes), "foreach": sum(sizes)}.get(kind, 0)


def _how_far_off(result: Result, truth: Result) -> str | None:
    for kind, name in (
        ("sgd", "plain SGD"),
        ("momentum", "SGD with momentum"),
        ("fused", "fused AdamW"),
        ("foreach", "AdamW with foreach"),
    ):
        for sizes, given, right in zip(_NETS, result[kind], truth[kind], strict=True):
            if not isinstance(given, int | float) or isinstance(given, bool):
                return "It returns something else than a number of bytes: at the highest moment there is one number."
            if not same(given, right):
                return (
                    f"Begin with {name}: for sizes {sizes} yours says {given:g} bytes, {given / sum(sizes):.3g} times "
                    "the parameters. Which copies of the parameters' size are alive in it?"
                )
    low = any(given < right for given, right in zip(result["loop"], truth["loop"], strict=True))
    return (
        "All are right but the loop. There yours is too "
        + ("low" if low else "high")
        + f": for sizes {_NETS[0]}, which temporaries are alive while each of the three is updated?"
    )


_HEIGHT = Exercise(
    number="7.4",
    kind="write",
    task="Predict how many bytes are alive at the highest moment of the optimizer step.",
    difficulty=2,
    minutes=6,
    objective=_TOP,
    run=_peaks,
    truth=_measured_peaks,
    mistakes=(
        Mistake(
            _sum_with(lambda sizes: 0, foreach=0),
            "These are parameters, gradients and state. What do foreach and the loop need while they compute?",
        ),
        Mistake(
            _sum_with(copies=1),
            "Parameters and gradients are both alive while the optimizer reads them. In your sum one of the two is "
            "missing.",
        ),
        Mistake(
            _sum_with(states={**_STATES, "fused": 1, "foreach": 1, "loop": 1}),
            "AdamW keeps two numbers for each parameter, and in your sum there is one.",
        ),
        Mistake(
            _sum_with(lambda sizes: 3 * max(sizes)),
            "Right for parameters of one size, if there are two or more. In the loop one of the three temporaries has "
            "the size of the parameter before: which one is before the largest?",
        ),
        Mistake(
            _sum_with(lambda sizes: 2 * max(sizes)),
            "In the loop there are two temporaries of the parameter's size, and one that is left from the parameter "
            "before it.",
        ),
        Mistake(
            _sum_with(lambda sizes: 3 * sum(sizes)),
            "Your loop holds the temporaries of all parameters at once. Which of them are gone when the next is due?",
        ),
        Mistake(
            _sum_with(lambda sizes: sum(2 * size + before for before, size in pairwise([0, *sizes]))),
            "You add up what each parameter needs in its turn. Are these there at the same time?",
        ),
        Mistake(
            _sum_with(lambda sizes: 2 * sizes[-1] + (sizes[-2] if sizes[1:] else 0)),
            "That is the loop at its last parameter. At which is the most alive?",
        ),
        Mistake(
            _sum_with(lambda sizes: max(2 * size + after for size, after in pairwise([*sizes, 0]))),
            "The third temporary is left from the parameter before, and yours has the size of the one after.",
        ),
        Mistake(
            _sum_with(
                lambda sizes: 2 * max(sizes) + ([0, *sizes][sizes.index(max(sizes))]),
            ),
            "Must the highest moment be that of the largest parameter? Take sizes [1, 8, 7]: what is alive at the 7?",
        ),
        Mistake(
            _sum_with(lambda sizes: max(2 * size + sizes[at - 1] for at, size in enumerate(sizes))),
            "The loop is nearly right. In Python `sizes[-1]` is the last: which parameter is before the first?",
        ),
        Mistake(
            _sum_with(foreach=0, fused=1),
            "foreach and fused are the other way round: which of them does all in a single operator?",
        ),
        Mistake(
            _sum_with(sum),
            "Your loop has the temporaries of foreach. How many parameters does it work on at a time?",
        ),
        Mistake(
            _sum_with(foreach=0),
            "The loop is right. foreach does each operation for all parameters at once: how large is its temporary?",
        ),
        Mistake(
            _temporaries_alone, "These are the temporaries alone. Beside them, what is alive all through the step?"
        ),
    ),
    diagnose=_how_far_off,
)


# ------------------------------------------------------------------------------------------------- 7.5 to disk and back

_CASES = ({"samples": 16, "smallest": 1024}, {"samples": 8, "smallest": 1}, {"samples": 64, "smallest": 3000})


_WRITTEN_OVER = -1  # for a tensor: it got the name of a file that was there before


def _layers(samples: int) -> tuple[nn.Module, Tensor]:
    """A net whose weights, saved as views, are as large as what it saves of 16 samples."""
    net = nn.Sequential(
        nn.Linear(16, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 16, bias=False), nn.Tanh(), nn.Linear(16, 4)
    )
    for number, parameter in enumerate(net.parameters()):
        parameter.data = drawn(number, *parameter.shape).float() / 4
    return net, drawn(50, samples, 16).float()


def _offloaded(make_hooks: Answer) -> Result:
    """For each case: how many files each saved tensor became. If that is right, also the bytes that are in memory in
    spite of it when backward begins, and the gradients."""
    results: list[dict[str, Any]] = []
    for case in _CASES:
        net, x = _layers(case["samples"])
        with tempfile.TemporaryDirectory() as name:
            if (hooks := make_hooks(net, Path(name), case["smallest"])) is None:
                return None
            pack, unpack = hooks
            files, gone, loss = _packed(pack, unpack, net, x, Path(name))
            results.append({"files": files})
            if files == _files_asked(**case):
                kept = sum(storage.nbytes() for its in gone if (storage := its()) is not None)
                loss.backward()
                results[-1] |= {"kept": kept, "gradients": [parameter.grad for parameter in net.parameters()]}
    return results


def _packed(
    pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor], net: nn.Module, x: Tensor, folder: Path
) -> tuple[list[int], list[weakref.ref[Any]], Tensor]:
    """A forward pass under these hooks: the files that each saved tensor became, the storages of those that became one
    (but for the batch's), and the loss."""
    files: list[int] = []
    gone: list[weakref.ref[Any]] = []

    def watched(tensor: Tensor) -> Any:
        before = len([*folder.iterdir()])
        packed = pack(tensor)
        files.append(len([*folder.iterdir()]) - before)
        if not files[-1] and isinstance(packed, str | Path):
            files[-1] = _WRITTEN_OVER
        if files[-1] > 0 and not _shares(tensor, x):
            gone.append(weakref.ref(tensor.untyped_storage()))
        return packed

    with saved_tensors_hooks(watched, unpack):
        return files, gone, net(x).square().mean()


def _shares(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are on one storage."""
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def _saved(samples: int) -> Iterator[tuple[Tensor, bool]]:
    """Each tensor that the net saves, in order, and whether it is a parameter's."""
    net, x = _layers(samples)
    seen: list[Tensor] = []

    def see(tensor: Tensor) -> Tensor:
        seen.append(tensor.detach())
        return seen[-1]

    with saved_tensors_hooks(see, lambda tensor: tensor):
        net(x).square().mean()
    for tensor in seen:
        yield tensor, any(_shares(tensor, parameter) for parameter in net.parameters())


def _files_asked(samples: int, smallest: int) -> list[int]:
    return [
        int(not parameters and tensor.numel() * tensor.element_size() >= smallest)
        for tensor, parameters in _saved(samples)
    ]


def _offloaded_as_asked() -> Result:
    results = []
    for case in _CASES:
        net, x = _layers(case["samples"])
        net(x).square().mean().backward()
        gradients = [parameter.grad for parameter in net.parameters()]
        results.append({"files": _files_asked(**case), "kept": 0, "gradients": gradients})
    return results


def _on_its_storage(tensor: Tensor, parameter: nn.Parameter) -> bool:
    return tensor.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()


def _choosing(
    large: Callable[[Tensor, int], bool] = lambda tensor, smallest: tensor.nbytes >= smallest,
    is_parameter: Callable[[Tensor, nn.Parameter], bool] = _on_its_storage,
    *,
    file: Callable[[int], int] = lambda number: number,
    holds: bool = False,
) -> Answer:
    """The exercise's function, with these for large tensors, for parameters, and for the name of the n-th file."""

    def make_hooks(model: nn.Module, folder: Path, smallest: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
        written: list[Tensor | None] = []

        def pack(tensor: Tensor) -> Any:
            if not large(tensor, smallest) or any(is_parameter(tensor, its) for its in model.parameters()):
                return tensor.detach()
            path = folder / f"{file(len(written))}.npy"
            np.save(path, tensor.detach().numpy())
            written.append(tensor.detach() if holds else None)
            return path

        def unpack(packed: Any) -> Tensor:
            return packed if isinstance(packed, Tensor) else torch.from_numpy(np.load(packed))

        return pack, unpack

    return make_hooks


def _what_went_out(result: Result, truth: Result) -> str | None:
    for case, one, right in zip(_CASES, result, truth, strict=True):
        for (tensor, parameter), files, asked in zip(
            _saved(case["samples"]), one["files"], right["files"], strict=True
        ):
            about = f"With smallest={case['smallest']}, a tensor of shape {tuple(tensor.shape)}, {tensor.nbytes} bytes"
            if files == _WRITTEN_OVER:
                return (
                    f"{about}, got the name of a file that was there: that is written over. Which name is new in every "
                    "call? An address is not: two tensors may share it, and it is given out again."
                )
            if files > 1:
                return f"{about}, became {files} files: one is asked for."
            if files and not asked:
                what = "it is a parameter, or a view of one" if parameter else "that is below the smallest"
                return f"{about}, went out: {what}."
            if asked and not files:
                return f"{about}, stayed. No parameter is on its storage."
    if any(one.get("kept") for one in result):
        return "The right tensors are in files, and are in memory as well: what else holds them?"
    return "The right tensors go out. The gradients are not those of the plain step: what comes back for a name?"


_DISK = Exercise(
    number="7.5",
    kind="write",
    task="Write hooks that move large saved tensors to disk and leave parameters where they are.",
    difficulty=2,
    minutes=8,
    objective=_OFFLOAD,
    run=_offloaded,
    truth=_offloaded_as_asked,
    mistakes=(
        Mistake(
            _choosing(is_parameter=lambda tensor, its: False),
            "The weights go out too. They are in memory anyway: which storage is theirs?",
        ),
        Mistake(
            _choosing(is_parameter=lambda tensor, its: tensor is its),
            "Weights go out all the same. A layer saves a view of its weight, which is another tensor: what is it that "
            "the two have in common?",
        ),
        Mistake(
            _choosing(lambda tensor, smallest: True, lambda tensor, its: False),
            "Everything goes out. What of it is too small to be worth a file, what is in memory anyway?",
        ),
        Mistake(
            _choosing(lambda tensor, smallest: True),
            "Parameters stay, and all else goes out, however small. What is `smallest` for?",
        ),
        Mistake(
            _choosing(lambda tensor, smallest: tensor.nbytes > smallest),
            "Look at a tensor of exactly `smallest` bytes: “at least” includes it.",
        ),
        Mistake(
            _choosing(lambda tensor, smallest: tensor.numel() >= smallest),
            "That compares the number of elements with a number of bytes.",
        ),
        Mistake(
            _choosing(lambda tensor, smallest: tensor.nbytes < smallest),
            "The small ones go out and the large ones stay: in which direction do you compare?",
        ),
        Mistake(
            _choosing(is_parameter=lambda tensor, its: tensor.shape == its.shape),
            "A tensor is not a parameter because it has the same shape. What is it that a view and its weight share?",
        ),
        Mistake(
            _choosing(file=lambda number: 0),
            "All are written to one file, each over the one before. What does `unpack` find there?",
        ),
        Mistake(
            _choosing(holds=True),
            "The right tensors are in files, and in memory too: something holds them still, beside the file's name.",
        ),
    ),
    diagnose=_what_went_out,
)


EXERCISES: tuple[Exercise, ...] = (_FILL, _ORDER, _WRITE, _HEIGHT, _DISK)

QUIZ: tuple[Question, ...] = (
    Question(
        "A transformer is trained with large batches, without checkpointing. You put the optimizer into backward, and "
        "the peak does not move. Why?",
        (
            Option("the hooks hold the gradients", "a hook that sets `.grad` to None holds nothing."),
            Option(
                "its peak is where backward begins, with all activations and hardly a gradient",
                "so there is nothing at the peak that could be let go of earlier.",
                right=True,
            ),
            Option(
                "its gradients are born in another order than its layers run",
                "last layer first, always, and for the peak that does not matter.",
            ),
        ),
    ),
    Question(
        "A model with many parameters runs out of memory on a GPU, in the optimizer step, with PyTorch's default "
        "AdamW. What costs nothing and helps at once?",
        (
            Option("checkpointing every block", "activations are gone by then: the peak is elsewhere."),
            Option("smaller batches", "in the optimizer step nothing depends on the batch."),
            Option(
                "`fused=True`",
                "the default there is foreach, with temporaries of all parameters' size; fused has none.",
                right=True,
            ),
        ),
    ),
    Question(
        "Which of these goes together with the optimizer in backward?",
        (
            Option(
                "a weight that two layers share",
                "the hook is called once, when autograd has added up what both uses give.",
                right=True,
            ),
            Option(
                "clipping by the norm of all gradients",
                "the norm is known with the last gradient, and by then the others are gone.",
            ),
            Option("accumulating over micro-batches", "the first one's gradient is used before the second's is there."),
            Option("loss scaling", "one infinite gradient must stop updates that have been made already."),
        ),
    ),
)
