"""Lesson 11, folklore: five exercises and the quiz.

What is checked is measured: peaks of nets that the learner has not seen, and of a net that the learner brings. Two
exercises are about bounds and decisions, whose truth is a sum and a list written down.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ... import zoo
from ...errors import MemlabError
from ...measure import measure
from ...record import record
from ...step import TrainingStep
from ...strategies import Checkpoint, LowPrecision, MicroBatch, OptimizerInBackward
from ...units import MiB
from ..exercises import Answer, Exercise, Mistake, Result, letters_of, same
from ..quizzes import Option, Question

_REFUTE = "refute or bound a claim with two measurements of two lines each"
_CONDITION = "name the condition under which a claim begins to hold"
_CHOOSE = "choose a technique from where the peak is"

_AdamW = partial(torch.optim.AdamW, foreach=True)

# ---------------------------------------------------------------------------------------- 11.1 in place, where it helps

_MakeNet: TypeAlias = Callable[[bool], nn.Module]
_Highest: TypeAlias = Callable[[Callable[[nn.Module], None], nn.Module], int]


def _highest(run: Callable[[nn.Module], None], net: nn.Module) -> int:
    with record(net) as trace:
        run(net)
    return trace.tensor_peak_bytes


def _normalised(inplace: bool) -> nn.Module:
    """Linear, BatchNorm, ReLU: what a ReLU is given is kept by nobody, and in backward something else is the peak."""
    sizes = (32, 128, 128, 128)
    layers = [nn.Sequential(nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU(inplace)) for a, b in pairwise(sizes)]
    return nn.Sequential(*layers, nn.Linear(128, 4))


def _frozen(inplace: bool) -> nn.Module:
    """A frozen first layer: its ReLU's two tensors pass through the forward pass of training, and nobody keeps them."""
    return nn.Sequential(nn.Linear(16, 256).requires_grad_(False), nn.ReLU(inplace), nn.Linear(256, 4))


_NETS: tuple[tuple[_MakeNet, tuple[int, int]], ...] = ((_normalised, (256, 32)), (_frozen, (64, 16)))


def _savings(answer: Callable[[_Highest, _MakeNet, Tensor], Any]) -> Result:
    return [answer(_highest, make_net, torch.ones(*shape)) for make_net, shape in _NETS]


def _train(x: Tensor, net: nn.Module) -> None:
    net(x).sum().backward()


def _infer(x: Tensor, net: nn.Module) -> None:
    with torch.no_grad():
        net(x)


def _peaks(make_net: _MakeNet, x: Tensor) -> dict[str, int]:
    return {
        f"{name}{' in place' * inplace}": _highest(partial(run, x), make_net(inplace))
        for name, run in (("training", _train), ("inference", _infer))
        for inplace in (False, True)
    }


def _from_peaks(of: Callable[[dict[str, int]], Any]) -> Answer:
    """An answer that computes its two values from the four peaks."""
    return lambda highest, make_net, x: of(_peaks(make_net, x))


def _two_differences(p: dict[str, int]) -> tuple[int, int]:
    return p["training"] - p["training in place"], p["inference"] - p["inference in place"]


def _about_in_place(result: Any, truth: Any) -> str | None:
    if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in result):
        return "Return both values, as the last line of the cell does."
    given, right = ([value for pair in pairs for value in pair] for pairs in (result, truth))
    for scale, words in ((4, "elements"), (MiB, "MiB"), (1024, "KiB")):
        if same([value * scale for value in given], right):
            return f"Bytes are asked for, and yours are {words}."
    if same([-value for value in given], right):
        return "The sign is the other way round: what is saved is how far the net in place lies *below* the other."
    wrong = [n for n, value in enumerate(given) if not same(value, right[n])]
    if all(n % 2 for n in wrong):
        return "The saving in training is right. Which function, and which two nets, go into the other?"
    if not any(n % 2 for n in wrong):
        return "The saving under `no_grad` is right. Which function, and which two nets, go into the other?"
    return "Each of the two is a difference of two calls of `highest`: of the same run, on which two nets?"


_IN_PLACE = Exercise(
    number="11.1",
    kind="fill",
    task="Measure what in-place ReLUs save, in training and under `no_grad`.",
    difficulty=2,
    minutes=5,
    objective=_REFUTE,
    run=_savings,
    truth=lambda: [_two_differences(_peaks(make_net, torch.ones(*shape))) for make_net, shape in _NETS],
    mistakes=(
        Mistake(
            _from_peaks(lambda p: tuple(-value for value in _two_differences(p))),
            "The sign is the other way round: what is saved is how far the net in place lies *below* the other.",
        ),
        Mistake(
            _from_peaks(lambda p: (_two_differences(p)[0],) * 2),
            "Both values are those of training: which function runs without a graph?",
        ),
        Mistake(
            _from_peaks(lambda p: (_two_differences(p)[1],) * 2),
            "Both values are those under `no_grad`: which function goes through backward?",
        ),
        Mistake(
            _from_peaks(lambda p: _two_differences(p)[::-1]),
            "Both are right, and each is in the other's place.",
        ),
        Mistake(
            _from_peaks(lambda p: (p["training in place"], p["inference in place"])),
            "These are the peaks of the net in place. What is saved is a difference: to what do you compare?",
        ),
        Mistake(
            _from_peaks(lambda p: (p["training"], p["inference"])),
            "These are the peaks of the net that is not in place. What is saved is a difference: to what?",
        ),
        Mistake(
            _from_peaks(lambda p: (0, 0)),
            "No saving anywhere: do the two nets that you compare differ? The argument of `make_net` says which it is.",
        ),
        Mistake(
            _from_peaks(lambda p: (p["training"] - p["inference"], p["training in place"] - p["inference in place"])),
            "You compare training with inference. The sentence compares a net in place with one that is not.",
        ),
        Mistake(
            _from_peaks(
                lambda p: (
                    p["training in place"] / p["training"],
                    p["inference in place"] / p["inference"],
                )
            ),
            "That is the share that is left: bytes are asked for.",
        ),
        Mistake(
            _from_peaks(
                lambda p: (
                    1 - p["training in place"] / p["training"],
                    1 - p["inference in place"] / p["inference"],
                )
            ),
            "That is the share that is saved: bytes are asked for.",
        ),
    ),
    diagnose=_about_in_place,
)

# ------------------------------------------------------------------------------------- 11.2 the bound for micro-batches

_Bound: TypeAlias = Callable[[int, int, int], Any]
_SIZES = ((10, 40, 1), (400, 4000, 4), (5000, 300, 2), (90, 9001, 3))


def _bounds(answer: _Bound) -> Result:
    return [answer(*sizes) for sizes in _SIZES]


def _summed_up() -> Result:
    """What lies in memory at that moment, thing by thing."""
    totals = []
    for parameters, activations, k in _SIZES:
        alive = {"parameters": parameters, "first moments": parameters, "second moments": parameters}
        if k > 1:
            alive["gradients of the micro-batches before"] = parameters
        totals.append(sum(alive.values()) + activations / k)
    return totals


def _about_bound(result: Any, truth: Any) -> str | None:
    if same([4 * value for value in result], truth) or same([value / 4 for value in result], truth):
        return "The arguments are bytes already, and not elements."
    if not same(result[0], truth[0]):
        return (
            "Begin with the plain step, `k = 1`, before backward: the task's example adds it up. Is each of its three "
            "parts there, once?"
        )
    off = [one - other for one, other in zip(result, truth, strict=True)][1:]
    if all(value < 0 for value in off):
        return "With `k = 1` it is right; with more it is too small: what have the micro-batches before left behind?"
    return "With `k = 1` it is right; with more it is not: which of the parts does k divide, and which not?"


_BOUND = Exercise(
    number="11.2",
    kind="write",
    task="Return the bytes that are alive when the last micro-batch's backward pass is about to begin.",
    difficulty=2,
    minutes=5,
    objective=_CONDITION,
    run=_bounds,
    truth=_summed_up,
    mistakes=(
        Mistake(
            lambda p, a, k: 3 * p + a / k,
            "With `k = 1` it is right. With more, other micro-batches have gone before: what do they leave in `.grad`?",
        ),
        Mistake(
            lambda p, a, k: 4 * p + a / k,
            "In the plain step no gradient is alive before backward: they were freed before the forward pass.",
        ),
        Mistake(
            lambda p, a, k: (3 * p + a) / k,
            "That is the sentence as it is told: all of it is divided. Does a micro-batch need a part of the "
            "parameters only?",
        ),
        Mistake(
            lambda p, a, k: (3 * p + (k > 1) * p + a) / k,
            "All of it is divided. Does a micro-batch need a part of the parameters only?",
        ),
        Mistake(
            lambda p, a, k: 3 * p / k + (k > 1) * p + a / k,
            "You divide the parameters and the state: does a micro-batch need a part of them only?",
        ),
        Mistake(
            lambda p, a, k: p + (k > 1) * p + a / k,
            "AdamW's state is not in your sum: it is there all the time.",
        ),
        Mistake(lambda p, a, k: p + a / k, "Parameters and activations: what else is alive, before backward?"),
        Mistake(
            lambda p, a, k: 2 * p + (k > 1) * p + a / k,
            "One of AdamW's two tensors for each parameter, or the parameters, are not in your sum.",
        ),
        Mistake(
            lambda p, a, k: 3 * p + (k > 1) * p + a,
            "Only one micro-batch's activations are alive at a time.",
        ),
        Mistake(
            lambda p, a, k: 3 * p + (k > 1) * p / k + a / k,
            "You divide the gradients. Has the gradient of a micro-batch fewer numbers than the parameters?",
        ),
        Mistake(
            lambda p, a, k: 3 * p + (k - 1) * p + a / k,
            "You keep gradients for each micro-batch before. `.grad` adds them up: how many of them are there?",
        ),
        Mistake(
            lambda p, a, k: 3 * p + k * p + a / k,
            "You keep gradients for each micro-batch. `.grad` adds them up: how many of them are there?",
        ),
        Mistake(
            lambda p, a, k: 3 * p + (k > 1) * p,
            "The activations are not in your sum: when backward is about to begin, a micro-batch's are all there.",
        ),
        Mistake(
            lambda p, a, k: a / k,
            "That is the part that k divides. What stays whatever k is?",
        ),
        Mistake(
            lambda p, a, k: 3 * p + (k > 1) * p + a // k,
            "Right but for the fraction: do not round.",
        ),
        Mistake(
            lambda p, a, k: 3 * p + (k > 1) * p + a * (k - 1) / k,
            "These are the activations of the micro-batches that are over. Their backward passes have let go of them.",
        ),
    ),
    diagnose=_about_bound,
)

# ------------------------------------------------------------------------------------------------ 11.3 a counterexample

_LARGEST = 64 * MiB
_HALF, _STAYS, _SMALL = "fall by more than half", "stays", "at most 64 MiB"


def _measured_both(answer: Callable[[], Any]) -> Result:
    step = answer()
    if step is None or step is ...:
        return None
    if not isinstance(step, TrainingStep):
        raise MemlabError(
            f"it returns a {type(step).__name__}: return memlab.TrainingStep(model, (inputs, targets), nn.MSELoss(), "
            "torch.optim.AdamW)"
        )
    plain, again = (measure(step, strategy, allocator=False) for strategy in (None, Checkpoint()))
    peak = plain.tensor_peak_bytes
    inputs = {tensor.storage: tensor.storage_bytes for tensor in again.saved if tensor.kind == "checkpoint inputs"}
    stays = "the blocks' inputs" if sum(inputs.values()) > again.saved_bytes / 2 else "saved outside of the blocks"
    return {
        "saved bytes": _HALF if again.saved_bytes < plain.saved_bytes / 2 else stays,
        "peak": _STAYS if again.tensor_peak_bytes > 0.99 * peak else f"falls, from {plain.tensor_peak.phase}",
        "size": _SMALL if peak <= _LARGEST else "above 64 MiB",
    }


def _step(block: Callable[[], nn.Module], samples: int, width: int = 32, optimizer: Any = _AdamW) -> TrainingStep:
    model = nn.Sequential(*(block() for _ in range(4)))
    return TrainingStep(model, (torch.ones(samples, width), torch.ones(samples, width)), nn.MSELoss(), optimizer)


def _wide_block(width: int = 32, hidden: int = 128) -> nn.Module:
    return nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, width))


def _flat_block() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), nn.Tanh())


def _about_counterexample(result: Any, truth: Any) -> str | None:
    if result["size"] != truth["size"]:
        return "The plain peak is above 64 MiB: a smaller net will do."
    if result["saved bytes"] == "saved outside of the blocks":
        return (
            "The saved bytes do not fall by more than half: most of what stays is saved outside of the blocks, and "
            "counts as well. Which phase of the step has a peak in which nothing saved is alive?"
        )
    if result["saved bytes"] != truth["saved bytes"]:
        return "The saved bytes do not fall by more than half: how much do your blocks save beyond their inputs?"
    return "The peak falls: what is alive at your plain peak that checkpointing acts on?"


_COUNTEREXAMPLE = Exercise(
    number="11.3",
    kind="write",
    task="Return a step whose saved bytes fall by more than half with checkpoints, and whose peak stays.",
    difficulty=3,
    minutes=8,
    objective=_REFUTE,
    run=_measured_both,
    truth=lambda: {"saved bytes": _HALF, "peak": _STAYS, "size": _SMALL},
    mistakes=(
        Mistake(
            lambda: _step(_wide_block, samples=4096),
            "The saved bytes fall by more than half, and the peak falls too: it is in backward, and activations are "
            "alive there. With how many samples would another phase be the highest?",
        ),
        Mistake(
            lambda: _step(_flat_block, samples=16),
            "The peak stays, but the saved bytes fall by half or less: a block that saves little beyond its input has "
            "little to throw away. (The state of the random numbers, 5 KiB a block, is kept as well: with very few "
            "samples it outweighs the rest.)",
        ),
        Mistake(
            lambda: _step(partial(_wide_block, 512, 2048), samples=256, width=512),
            "That is a counterexample, but its plain peak is above 64 MiB: a smaller net will do.",
        ),
    ),
    diagnose=_about_counterexample,
)

# ------------------------------------------------------------------------------------------ 11.4 the questions in order

_Case: TypeAlias = dict[str, Any]

_ANSWERS = {
    "a": "checkpoint the blocks",
    "b": "update in backward",
    "c": "checkpoint the blocks",
    "d": "nothing: it fits",
    "e": "micro-batches",
    "f": "fewer bits, or a smaller model",
    "g": "fewer bits, or a smaller model",
}
_CONDITIONS: dict[str, Callable[[_Case], bool]] = {
    "a": lambda case: case["saved"] > case["limit"],
    "b": lambda case: case["phase"] == "optimizer",
    "c": lambda case: True,
    "d": lambda case: case["peak"] <= case["limit"],
    "e": lambda case: case["checkpointed"],
    "f": lambda case: case["peak"] > case["lasting"],
    "g": lambda case: case["lasting"] > case["limit"],
}


def _case(peak: int, lasting: int, saved: int, limit: int, phase: str, checkpointed: bool = False) -> _Case:
    return {
        "peak": peak,
        "lasting": lasting,
        "saved": saved,
        "limit": limit,
        "phase": phase,
        "checkpointed": checkpointed,
    }


_CASES: tuple[tuple[str, _Case, str], ...] = (
    ("a step that fits", _case(30, 10, 15, 40, "backward"), _ANSWERS["d"]),
    ("a step that fits, its peak in the optimizer step", _case(30, 15, 5, 40, "optimizer"), _ANSWERS["d"]),
    ("a checkpointed step that fits", _case(30, 15, 5, 40, "recompute", True), _ANSWERS["d"]),
    ("parameters and state above the limit, the peak in backward", _case(120, 50, 60, 40, "backward"), _ANSWERS["g"]),
    ("parameters and state above the limit, the peak in optimizer", _case(90, 50, 20, 40, "optimizer"), _ANSWERS["g"]),
    ("the same, checkpointed", _case(110, 50, 20, 40, "recompute", True), _ANSWERS["g"]),
    ("the peak in the optimizer step", _case(60, 30, 20, 45, "optimizer"), _ANSWERS["b"]),
    ("the peak in the optimizer step, much saved before", _case(100, 40, 50, 45, "optimizer"), _ANSWERS["b"]),
    ("the peak in the optimizer step, all checkpointed", _case(60, 30, 5, 45, "optimizer", True), _ANSWERS["b"]),
    ("all checkpointed, the peak in backward", _case(60, 20, 10, 50, "backward", True), _ANSWERS["e"]),
    ("all checkpointed, much saved", _case(80, 15, 55, 50, "backward", True), _ANSWERS["e"]),
    ("nothing checkpointed, the peak in backward", _case(90, 20, 60, 50, "backward"), _ANSWERS["c"]),
    ("nothing checkpointed, little saved", _case(55, 20, 30, 50, "backward"), _ANSWERS["c"]),
)


def _decided(order: Answer) -> Result:
    """For each case the answer of the first line whose condition is true."""
    letters = letters_of(order, _ANSWERS, "line", "b a")
    return [
        next((_ANSWERS[letter] for letter in letters if _CONDITIONS[letter](case)), "no answer")
        for _, case, _ in _CASES
    ]


def _about_decisions(result: Any, truth: Any) -> str | None:
    if "no answer" in result:
        return "Some steps get no answer at all: which line is true always?"
    wrong = next(n for n, answer in enumerate(result) if answer != truth[n])
    return f"It says “{result[wrong]}” to this: {_CASES[wrong][0]}. Which line should have been asked before?"


_DECIDE = Exercise(
    number="11.4",
    kind="order",
    task="Put the questions in order, so that each step gets what can help it.",
    difficulty=2,
    minutes=5,
    objective=_CHOOSE,
    run=_decided,
    truth=lambda: [answer for _, _, answer in _CASES],
    mistakes=(
        Mistake(
            "d b g e c",
            "A step whose parameters and state alone exceed the limit, with the peak in the optimizer step, is told to "
            "update in backward. Can that make it fit?",
        ),
        Mistake(
            "d b e g c",
            "Where parameters and state alone exceed the limit, no schedule helps: what has to be asked before?",
        ),
        Mistake(
            "d e g b c",
            "Two steps are told to use micro-batches for no other reason than that they are checkpointed: what comes "
            "before?",
        ),
        Mistake(
            "d g e b c",
            "A checkpointed step with its peak in the optimizer step is told to use micro-batches. What is alive "
            "there?",
        ),
        Mistake(
            "d f b e c",
            "Nearly each peak is higher than what lasts: with which other number is that to be compared?",
        ),
        Mistake(
            "d g a b e c",
            "Where the peak is in the optimizer step, the saved bytes may be as many as they like: are they alive "
            "there?",
        ),
        Mistake(
            "d g b a e c",
            "A step that is checkpointed already is told to checkpoint: is there a line that asks for it?",
        ),
        Mistake(
            "d g b a e",
            "Saved bytes below the limit do not make a step fit: what is alive beside them? Some steps get no answer.",
        ),
        Mistake(
            "d a g b e c",
            "Saved bytes come second with you. Where parameters and state alone exceed the limit, do they matter?",
        ),
        Mistake("c e b g d", "The line that is always true comes first, so that no other is ever asked."),
        Mistake(
            "g b e d c",
            "A step that fits is given a cure: what has to be asked before anything is changed?",
        ),
        Mistake(
            "g b e c",
            "A step that fits is given a cure: what has to be asked before anything is changed?",
        ),
        Mistake("d g b e", "Some steps get no answer at all: which line is true always?"),
        Mistake(
            "d b e c",
            "What if parameters and state alone are more than the limit? Which of two lines asks for that?",
        ),
        Mistake("d g b c e", "A line stands behind the one that is always true, and is never asked."),
        Mistake("d g e c", "No line of yours asks for the phase of the peak."),
    ),
    diagnose=_about_decisions,
)

# ----------------------------------------------------------------------------------------- 11.5 what can move this peak

_TECHNIQUES = {
    "checkpoint": Checkpoint(),
    "micro-batches": MicroBatch(count=4),
    "optimizer in backward": OptimizerInBackward(),
    "pure bf16": LowPrecision("bf16"),
}
_ACTS_ON = {
    "checkpoint": ("activations",),
    "micro-batches": ("activations",),
    "optimizer in backward": ("gradients",),
    "pure bf16": ("parameters", "gradients", "optimizer state", "activations", "temporaries"),
}


def _steps() -> tuple[TrainingStep, ...]:
    """One with activations at its peak, and one whose peak is in the optimizer step."""
    return (
        zoo.gpt_step(batch=8, context=32, depth=2, width=32, heads=2, optimizer=_AdamW),
        zoo.mlp_step(batch=4, width=64, depth=3, optimizer=_AdamW),
    )


@cache
def _plain() -> tuple[dict[str, int], ...]:
    return tuple(measure(step, allocator=False).by_category("tensor_peak") for step in _steps())


# Three that are written down, as how little is too little is said in the task.
_FEW = {"parameters": 40, "gradients": 3, "optimizer state": 80, "activations": 60, "temporaries": 30, "batch": 100}
_NO_FLOATS = {"parameters": 2, "gradients": 2, "optimizer state": 4, "activations": 8, "temporaries": 1, "batch": 983}
_NO_STATE = {"parameters": 40, "gradients": 40, "activations": 5}


def _named(answer: Callable[[dict[str, int]], Any]) -> Result:
    results = []
    for alive in (*_plain(), _FEW, _NO_FLOATS, _NO_STATE):
        names = answer(dict(alive))
        if names is None or names is ...:
            return None
        results.append(set(names) if isinstance(names, list | tuple | dict | frozenset) else names)
    return results


@cache
def _that_lower_it() -> tuple[frozenset[str], ...]:
    """By running them: which lower the peak by 3 % or more."""
    found = []
    for step, alive in zip(_steps(), _plain(), strict=True):
        plain = sum(alive.values())
        peaks = {name: measure(step, its, allocator=False).tensor_peak_bytes for name, its in _TECHNIQUES.items()}
        found.append(frozenset(name for name, peak in peaks.items() if peak <= 0.97 * plain))
    return tuple(found)


def _movers() -> Result:
    return [
        *map(set, _that_lower_it()),
        {"checkpoint", "micro-batches", "pure bf16"},
        set(),
        {"optimizer in backward", "pure bf16"},
    ]


def _moving(
    least: float = 0.1,
    acts_on: dict[str, tuple[str, ...]] = _ACTS_ON,
    of: Callable[..., float] = lambda a: sum(a.values()),
) -> Answer:
    """An answer by the rule, or by another one."""

    def can_move(alive: dict[str, int]) -> set[str]:
        return {
            name
            for name, categories in acts_on.items()
            if sum(alive.get(category, 0) for category in categories) > least * of(alive)
        }

    return can_move


def _about_movers(result: Any, truth: Any) -> str | None:
    if not all(isinstance(names, set) for names in result):
        return "It gives something else than a set of names where one is asked for."
    if unknown := sorted({str(name) for names in result for name in names} - set(_TECHNIQUES)):
        return f"“{unknown[0]}” is none of the four names."
    too_many = {name for names, right in zip(result, truth, strict=True) for name in names - right}
    missing = {name for names, right in zip(result, truth, strict=True) for name in right - names}
    name = min(too_many or missing)
    acts = "all but the batch" if name == "pure bf16" else " and ".join(_ACTS_ON[name])
    if too_many:
        return (
            f"“{name}” is in a set where it does not belong: it acts on {acts}. Is a tenth of all bytes of that kind?"
        )
    return f"“{name}” is missing from a set: it acts on {acts}. Is a tenth of all bytes of that kind?"


_MOVE = Exercise(
    number="11.5",
    kind="write",
    task="Return the names of the techniques that act on a tenth or more of the bytes alive at the peak.",
    difficulty=2,
    minutes=6,
    objective=_CHOOSE,
    run=_named,
    truth=_movers,
    mistakes=(
        Mistake(
            _moving(least=0),
            "A technique is in your set as soon as it acts on a single byte: how much is needed for a tenth?",
        ),
        Mistake(
            _moving(acts_on={name: its for name, its in _ACTS_ON.items() if name != "micro-batches"}),
            "Micro-batches are in none of your sets: on what do they act?",
        ),
        Mistake(
            _moving(acts_on={name: its for name, its in _ACTS_ON.items() if name != "pure bf16"}),
            "“pure bf16” is in none of your sets. It acts on whatever is a floating-point number.",
        ),
        Mistake(
            _moving(acts_on=_ACTS_ON | {"optimizer in backward": ("optimizer state",)}),
            "The optimizer in backward does not touch the optimizer's state. On what does it act?",
        ),
        Mistake(
            _moving(acts_on=_ACTS_ON | {"optimizer in backward": ("gradients", "optimizer state")}),
            "You count the optimizer's state for the optimizer in backward: it stays as it is. On what does it act?",
        ),
        Mistake(
            _moving(acts_on=_ACTS_ON | {"micro-batches": ("activations", "gradients")}),
            "You count gradients for micro-batches: they stay whole, however many micro-batches there are.",
        ),
        Mistake(
            _moving(acts_on=_ACTS_ON | dict.fromkeys(("checkpoint", "micro-batches"), ("activations", "temporaries"))),
            "You count temporaries among what checkpoints and micro-batches act on. By the task it is activations.",
        ),
        Mistake(
            _moving(acts_on=_ACTS_ON | {"pure bf16": ("parameters",)}),
            "Pure bf16 acts on more than parameters: what else is made of floating-point numbers?",
        ),
        Mistake(
            _moving(acts_on=_ACTS_ON | {"pure bf16": (*_ACTS_ON["pure bf16"], "batch")}),
            "“pure bf16” is in a set where nearly all bytes are the batch: by the task it acts on all but that. Is a "
            "tenth left?",
        ),
        Mistake(
            _moving(least=0.5),
            "A tenth will do; you ask for half.",
        ),
        Mistake(
            _moving(of=lambda alive: alive["parameters"]),
            "You compare with the parameters: a tenth of which bytes is asked for?",
        ),
        Mistake(
            _moving(of=lambda alive: sum(alive.values()) - alive.get("batch", 0)),
            "A tenth of all bytes that are alive: you left the batch out of the whole.",
        ),
        Mistake(
            lambda alive: set(_TECHNIQUES),
            "All four, always? Look at what each acts on, and at whether it is alive.",
        ),
        Mistake(
            lambda alive: {name for name, its in _ACTS_ON.items() if max(alive, key=lambda key: alive[key]) in its},
            "You look at the largest category only: a tenth of the bytes is enough.",
        ),
    ),
    diagnose=_about_movers,
)

EXERCISES: tuple[Exercise, ...] = (_IN_PLACE, _BOUND, _COUNTEREXAMPLE, _DECIDE, _MOVE)

QUIZ: tuple[Question, ...] = (
    Question(
        "“With technique T the memory falls by 40 %.” What is the first thing to ask?",
        (
            Option("On which GPU was that?", "bytes of tensors are nearly the same on each. Something else decides."),
            Option(
                "Of which step: what was alive at its peak?",
                "a technique lowers a peak as far as it acts on what is alive there.",
                right=True,
            ),
            Option("How many parameters has the model?", "a small model may gain much, and a large one nothing: 14."),
        ),
    ),
    Question(
        "Parameters, gradients and AdamW's state alone are more than the memory. What can help?",
        (
            Option(
                "checkpointing every block, since it saves most", "it acts on activations, and these are not meant."
            ),
            Option(
                "a batch of one sample, or as many micro-batches", "all of these bytes are there for one sample too."
            ),
            Option("fewer bits for all of it, or a smaller model", "they make these bytes fewer.", right=True),
        ),
    ),
    Question(
        "Someone shows you one net on which a general sentence about memory is false. What have you learned?",
        (
            Option(
                "that it has a condition, or is false",
                "and a second measurement, where it holds, shows which.",
                right=True,
            ),
            Option("that it is false everywhere", "one net shows that it is not true everywhere, and no more."),
            Option(
                "nothing: one net is no proof, and most others may well agree with the sentence",
                "against a sentence that is told of all nets, one is enough.",
            ),
        ),
    ),
)
