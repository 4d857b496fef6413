"""The explorer: sizes and techniques under one's hands, and at once what they do to the memory of a training step.

    explore()                                                             memlab's teaching GPT
    explore(build, depth=(2, 24), width=[128, 256, 512], batch=(1, 64))   your function, which makes a training step
    explore(step)                                                         a training step as it is: techniques alone

Rules:

1. Every answer is a simulation: sizes may be those of any GPU, and nothing of them exists. Each is made once and kept.
2. Simulations run where cells do and never beside one (the panel's Rule 5), since what they change in PyTorch while
   they run is the whole process's.
3. A choice that cannot run says why, and the controls stay. What cannot run as it is given, raises.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import html
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ..errors import MemlabError
from ..measure import Stage
from ..nest import kind
from ..reasons import reason
from ..simulate import Device, simulated, simulation
from ..simulation.fake import FakeMode
from ..step import TrainingStep
from ..strategies import Baseline, MicroBatch, Runner, Strategy
from ..trace import Trace
from ..units import format_bytes, format_ratio, format_seconds, parse_bytes
from ..views.fit import plot_fit
from ..views.words import bounds, findings, percent
from .controls import TECHNIQUES, Values, chosen, controls_of
from .panel import Panel, View, ipywidgets

_TRACES_KEPT = 256
_TIMED_ON = "A100"
_TIGHT = " style='margin: 0.2em 0'"


def explore(
    subject: TrainingStep | Callable[..., TrainingStep] | None = None,
    *,
    device: Device = "cuda",
    budget: str | int = "16 GiB",
    **sliders: Any,
) -> Explorer:
    """Move sizes and techniques, and see at once what they do to the memory of a training step, and whether it fits.

    >>> import memlab
    >>> explorer = memlab.explore(budget="8 GiB")       # in a notebook: the value of a cell
    >>> explorer.controls["checkpoint"].value = True    # as if a hand had moved it
    >>> explorer.text.splitlines()[0]
    'Fits in 8 GiB: 1.40 GiB left.'

    Parameters
    ----------
    subject: None: memlab's teaching GPT, with sliders for depth, width, context and batch. A function that is called
             with the sliders' values and makes a `TrainingStep`; it runs inside the simulation, where models of any
             size take no memory. If it has an argument `optimizer`, it is given a function from parameters to the
             optimizer that is chosen. Or a `TrainingStep`, whose sizes are as they are
    device:  "cuda" or "cpu", to begin with
    budget:  the device's memory: "16 GiB", or bytes
    sliders: for each argument of the function a range, `depth=(2, 24)`, or with its step `batch=(8, 64, 8)`, or a
             list of choices, `width=[128, 256, 512]`; it starts at the argument's default, else at its first value

    The explorer's `text` is what it says, `values` what its controls hold, `strategy` the techniques chosen, `trace`
    what they do and `plain` the step of the same sizes without them; `controls` has the widgets by name. Raises
    `MemlabError` for sliders that do not go with the function, and for a step that cannot be simulated as it begins.
    """
    return Explorer(subject, device, budget, sliders)


class Explorer(Panel):
    """The panel that `explore` makes. See there, and the module's rules."""

    trace: Trace | None = None  # of the choice; None where it cannot run
    plain: Trace | None = None  # of the same sizes without techniques
    _running = False

    def __init__(self, subject: Any, device: Device, budget: str | int, sliders: Mapping[str, Any]) -> None:
        self._make, self.controls = controls_of(subject, sliders, device, budget)
        self.headline = ipywidgets.HTML()  # above the picture, so that nothing moves while a simulation runs
        self._traces: dict[tuple[str, Strategy], Trace] = {}
        grid = ipywidgets.Layout(grid_template_columns="repeat(auto-fit, minmax(290px, 1fr))", width="100%")
        super().__init__(ipywidgets.GridBox(list(self.controls.values()), layout=grid), self.headline)
        self._running = True

    @property
    def values(self) -> Values:
        """What each control holds now, by name."""
        return {name: control.value for name, control in self.controls.items()}

    @property
    def strategy(self) -> Strategy:
        """The techniques that are chosen. Raises MemlabError where they cannot go together."""
        return chosen(self.values)

    def view(self) -> View:
        values = self.values
        self.plain = self.trace = None
        try:
            self.plain, self.trace = self._simulated(values, Baseline(), chosen(values, _TwoMicroBatches))
        except MemlabError as error:
            if not self._running:
                raise
            verdict, budget, said = "This choice cannot run.", None, [_ended(str(error))]
            with contextlib.suppress(MemlabError):  # the plain step of these sizes may run, or not
                (self.plain,) = self._simulated(values, Baseline())
        else:
            verdict, budget = _verdict(self.trace, values["budget"])
            said = list(_said(self.trace, self.plain, values))
        plain, trace = self.plain, self.trace
        self._announce(verdict, good=trace is not None and trace.peak_bytes <= (budget or 0))
        return View("\n".join([verdict, *said]), repr(values), lambda: plot_fit(plain, trace, budget), _page(said))

    def _simulated(self, values: Values, *strategies: Strategy) -> list[Trace]:
        """The step of these sizes under each strategy; those not yet known are simulated, on one stage."""
        sizes = repr({name: value for name, value in values.items() if name not in (*TECHNIQUES, "budget")})
        device, known = values["device"], self._traces
        missing = [strategy for strategy in dict.fromkeys(strategies) if (sizes, strategy) not in known]
        if missing:
            self._announce("simulating…")
            step = _Deferred(lambda: self._make(values))
            with _own_errors_in_words(), simulation(step, device) as (stage, mode):
                for strategy in missing:
                    known[sizes, strategy] = _trace(stage, mode, strategy, device)
        found = [known[sizes, strategy] for strategy in strategies]
        for old in list(known)[:-_TRACES_KEPT]:
            del known[old]
        return found

    def _announce(self, verdict: str, good: bool | None = None) -> None:
        colour = {None: "#94a4a2", True: "#3f90da", False: "#bd1f01"}[good]
        style = (
            f"border-left: 6px solid {colour}; padding-left: 8px; margin: 6px 0; font-weight: bold; line-height: 1.4"
        )
        self.headline.value = f"<div role='status' style='{style}'>{html.escape(verdict)}</div>"


# -- a simulation ------------------------------------------------------------------------------------------------------


class _Deferred(TrainingStep):
    """A step that the user's function makes when the simulation asks for it: what it builds has no data then."""

    is_built = False

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def rebuilt(self) -> TrainingStep:
        step = self._make()
        if not isinstance(step, TrainingStep):
            raise MemlabError(
                f"the function made {kind(step)}: have it return memlab.TrainingStep(model, batch, loss_fn, optimizer)"
            )
        return copy.copy(step) if step.is_built else step.rebuilt()  # the user's own stays as it is


class _TwoMicroBatches(MicroBatch):
    """The first two micro-batches stand for all: what is in memory during the second is there during each later one,
    but for the losses of those before it, 4 bytes each (512 on a GPU)."""

    @contextlib.contextmanager
    def install(self, runner: Runner) -> Iterator[None]:
        with super().install(runner):
            parts = runner.micro_batches or []
            if len(parts) > 2:
                runner.notes.append(
                    f"two of the {len(parts)} micro-batches are simulated: the others are as the second"
                )
                del parts[2:]
            yield

    def __repr__(self) -> str:
        return repr(MicroBatch(count=self.count))  # as errors name it


def _trace(stage: Stage, mode: FakeMode, strategy: Strategy, device: Device) -> Trace:
    try:
        return simulated(stage, mode, strategy, device)
    except MemlabError:
        raise
    except Exception as error:
        raise MemlabError(reason(error, stage.step, strategy)) from error


@contextlib.contextmanager
def _own_errors_in_words() -> Iterator[None]:
    """What the user's code raises is said as what memlab refuses is (Rule 3); the first time, both are raised."""
    try:
        yield
    except MemlabError:
        raise
    except Exception as error:
        raise MemlabError(f"{type(error).__name__}: {error}") from error


# -- what it says ------------------------------------------------------------------------------------------------------


def _verdict(trace: Trace, budget: str) -> tuple[str, int | None]:
    """Whether it fits, in words, and the budget in bytes (None for what is no number of bytes)."""
    try:
        nbytes = parse_bytes(budget)
    except MemlabError as error:
        return _ended(str(error)), None
    rest = nbytes - trace.peak_bytes
    if rest < 0:
        return f"Does not fit in {budget.strip()}: {format_bytes(-rest)} missing.", nbytes
    return f"Fits in {budget.strip()}: {format_bytes(rest)} left.", nbytes


def _said(trace: Trace, plain: Trace, values: Values) -> Iterator[str]:
    if trace is plain:
        yield "This is the plain step: no technique is on."
    else:
        share = percent(trace.peak_bytes, plain.peak_bytes)
        yield (
            f"{trace.strategy}: a peak of {format_bytes(trace.peak_bytes)}, {share} of the plain step's "
            f"{format_bytes(plain.peak_bytes)}."
        )
    yield from _times(trace, plain, values)
    yield from (f"{note[:1].upper()}{note[1:]}." for note in trace.notes)
    yield from findings(trace)
    yield from bounds(trace)
    yield f"Not in these figures: {'; '.join(trace.absent)}."


def _times(trace: Trace, plain: Trace, values: Values) -> Iterator[str]:
    """The time of a step, estimated; of GPUs alone."""
    if values["device"] == "cuda":
        seconds = _seconds(trace, values["micro_batches"])
        beside = "" if trace is plain else f", {format_ratio(seconds / _seconds(plain))} the plain step's"
        yield f"Time, an estimate: at least {format_seconds(seconds)} a step on one {_TIMED_ON}{beside}."


def _seconds(trace: Trace, micro_batches: int = 1) -> float:
    """Of a step whose trace has two of its micro-batches at most: the second stands for the others."""
    seconds = trace.estimate_seconds(_TIMED_ON)
    if micro_batches > 2:
        second = (o for o in trace.operators if o.place.micro_batch == 1 and o.place.phase != "optimizer")
        each = dataclasses.replace(trace, operators=tuple(second))
        seconds += (micro_batches - 2) * each.estimate_seconds(_TIMED_ON)
    return seconds


def _page(sentences: Iterable[str]) -> str:
    """Paragraphs; those that begin with a dash are a list."""
    parts: list[str] = []
    for is_list, group in itertools.groupby(sentences, key=lambda sentence: sentence.startswith("- ")):
        tag = "li" if is_list else "p"
        text = (f"<{tag}{_TIGHT}>{html.escape(sentence.removeprefix('- '))}</{tag}>" for sentence in group)
        parts += [f"<ul{_TIGHT}>", *text, "</ul>"] if is_list else text
    return "".join(parts)


def _ended(sentence: str) -> str:
    return sentence if sentence.endswith((".", "!", "?")) else f"{sentence}."
