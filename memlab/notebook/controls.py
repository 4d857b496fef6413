"""The explorer's controls: sliders for what a function takes, switches for techniques, optimizer and device; and what
they mean: the training step and the strategy that their values ask for.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from .. import zoo
from ..errors import MemlabError
from ..nest import kind
from ..simulate import Device
from ..step import Optimizer, TrainingStep
from ..strategies import (
    Baseline,
    Checkpoint,
    LowPrecision,
    MicroBatch,
    MixedPrecision,
    OptimizerInBackward,
    Strategy,
)
from ..units import parse_bytes
from ..views.words import listed
from .panel import ipywidgets

Values = dict[str, Any]
Make = Callable[[Values], Any]

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "SGD": torch.optim.SGD,
    "SGD with momentum": functools.partial(torch.optim.SGD, momentum=0.9),
}
FORMS: dict[str, dict[str, bool]] = {
    "PyTorch's default": {},
    "for-loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
PRECISIONS: dict[str, Strategy] = {
    "fp32": Baseline(),
    "bf16 autocast": MixedPrecision("bf16"),
    "fp16 autocast": MixedPrecision("fp16"),
    "pure bf16": LowPrecision("bf16"),
}
DEVICES = {"GPU (CUDA)": "cuda", "CPU": "cpu"}
MEMORIES = tuple(f"{gib} GiB" for gib in (8, 12, 16, 24, 40, 80))  # of cards that people have

TECHNIQUES = ("checkpoint", "optimizer_in_backward", "micro_batches", "precision")
_SWITCHES = (*TECHNIQUES, "optimizer", "form", "device", "budget")
_MOST_MICRO_BATCHES = 64
_GPT_SLIDERS = {"depth": (1, 24), "width": [128, 256, 512, 768, 1024], "context": (128, 2048, 128), "batch": (1, 128)}
_LOOK: dict[str, Any] = {"style": {"description_width": "110px"}}


# -- what the values mean ----------------------------------------------------------------------------------------------


def chosen(values: Values, micro_batches: type[MicroBatch] = MicroBatch) -> Strategy:
    """The techniques that are on, in one. Raises MemlabError where they cannot go together."""
    total = PRECISIONS[values["precision"]]
    if values["checkpoint"]:
        total += Checkpoint()
    if values["micro_batches"] > 1:
        total += micro_batches(count=values["micro_batches"])
    return total + OptimizerInBackward() if values["optimizer_in_backward"] else total


def _gpt(
    depth: int = 4, width: int = 1024, context: int = 1024, batch: int = 64, optimizer: Any = torch.optim.AdamW
) -> TrainingStep:
    return zoo.gpt_step(depth=depth, width=width, context=context, batch=batch, optimizer=optimizer)


# -- the controls ------------------------------------------------------------------------------------------------------


def controls_of(
    subject: Any, sliders: Mapping[str, Any], device: Device, budget: str | int
) -> tuple[Make, dict[str, Any]]:
    """What makes the step from the controls' values, and the controls by name."""
    if isinstance(subject, TrainingStep):
        if sliders:
            raise MemlabError(
                f"{listed(sliders)}: a TrainingStep has its sizes. Give sliders to a function that makes one: "
                "memlab.explore(build, depth=(2, 24))"
            )
        return lambda values: subject, _switches(device, budget, _most_micro_batches(subject), with_optimizer=False)
    if subject is None:
        subject, sliders = _gpt, _GPT_SLIDERS | dict(sliders)
    if not callable(subject) or isinstance(subject, nn.Module):
        raise MemlabError(
            "explore() takes a TrainingStep, or a function that makes one from the sliders' values, not "
            f"{kind(subject)}"
        )
    starts, with_optimizer = _arguments(subject, sliders)
    sizes = {name: _slider(name, given, starts.get(name)) for name, given in sliders.items()}

    def make(values: Values) -> Any:
        given = {name: values[name] for name in sizes}
        if with_optimizer:
            given["optimizer"] = functools.partial(OPTIMIZERS[values["optimizer"]], **FORMS[values["form"]])
        return subject(**given)

    return make, sizes | _switches(device, budget, _MOST_MICRO_BATCHES, with_optimizer)


def _arguments(build: Callable[..., Any], sliders: Mapping[str, Any]) -> tuple[Values, bool]:
    """The defaults of a function's arguments, and whether it takes an optimizer. Raises where the sliders do not go
    with it."""
    for slider in sliders:
        if slider in _SWITCHES:
            raise MemlabError(f"{slider} is a switch of the explorer's own: give the slider another name")
    try:
        arguments = inspect.signature(build).parameters
    except (TypeError, ValueError):  # a builtin
        return {}, False
    name = getattr(build, "__name__", type(build).__name__)
    named = {key: a for key, a in arguments.items() if a.kind in (a.POSITIONAL_OR_KEYWORD, a.KEYWORD_ONLY)}
    takes_any = any(a.kind is a.VAR_KEYWORD for a in arguments.values())
    for slider in sliders:
        if slider not in named and not takes_any:
            raise MemlabError(f"{name}() has no argument {slider}: its arguments are {listed(named) or 'none'}")
    for key, argument in named.items():
        if argument.default is argument.empty and key not in sliders and key != "optimizer":
            raise MemlabError(f"{name}() needs {key}: give it a slider, such as {key}=(1, 8), or a default")
    return {key: a.default for key, a in named.items() if a.default is not a.empty}, "optimizer" in named


def _slider(name: str, given: Any, start: Any) -> Any:
    """A slider over a range of whole numbers (a tuple) or over choices (a list)."""
    if isinstance(given, tuple) and len(given) in (2, 3) and all(type(number) is int for number in given):
        low, high, step = (*given, 1)[:3]
        if low < high and 0 < step <= high - low:
            begins = start if type(start) is int and low <= start <= high else low
            return ipywidgets.IntSlider(begins, low, high, step, description=name, **_LOOK)
    elif isinstance(given, list) and given:
        options = [(str(choice), choice) for choice in given]
        begins = start if start in given else given[0]
        return ipywidgets.SelectionSlider(options=options, value=begins, description=name, **_LOOK)
    raise MemlabError(
        f"{name}={given!r} is no slider: give a range of whole numbers, {name}=(2, 24) or with its step (2, 24, 2), or "
        f"a list of choices, {name}=[128, 256, 512]"
    )


def _switches(device: Device, budget: str | int, most_micro_batches: int, with_optimizer: bool) -> dict[str, Any]:
    if device not in DEVICES.values():
        raise MemlabError(f"device is {device!r}: give 'cuda' or 'cpu'")
    parse_bytes(budget)  # raises for what is no number of bytes

    def choice(label: str, options: Iterable[Any], **more: Any) -> Any:
        return ipywidgets.Dropdown(options=list(options), description=label, **_LOOK, **more)

    counts = [2**power for power in range(most_micro_batches.bit_length())]
    techniques = {
        "checkpoint": ipywidgets.Checkbox(False, description="checkpoint every block", **_LOOK),
        "optimizer_in_backward": ipywidgets.Checkbox(False, description="optimizer in backward", **_LOOK),
        "micro_batches": ipywidgets.SelectionSlider(options=counts, description="micro-batches", **_LOOK),
        "precision": choice("precision", PRECISIONS),
    }
    optimizer = {"optimizer": choice("optimizer", OPTIMIZERS), "form": choice("its form", FORMS)}
    memory = ipywidgets.Combobox(
        value=budget if isinstance(budget, str) else f"{budget} B",
        options=MEMORIES,
        description="device memory",
        continuous_update=False,  # a number half typed is another number
        **_LOOK,
    )
    where = {"device": choice("device", DEVICES.items(), value=device), "budget": memory}
    return techniques | (optimizer if with_optimizer else {}) | where


def _most_micro_batches(step: TrainingStep) -> int:
    if step.is_built:
        with contextlib.suppress(MemlabError):  # only the user's `split` knows
            return max(step.batch_size, 1)
    return _MOST_MICRO_BATCHES
