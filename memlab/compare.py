"""Several strategies on one training step, side by side, each with its proof.

With `compare(step, strategies)` one gets a `Comparison`: for each strategy its trace, its price in time and
arithmetic, and whether it trains the same model (see `proof.py`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from .errors import MemlabError
from .measure import Stage, refuse, trace
from .progress import progress
from .proof import Prover
from .reasons import reason
from .simulate import Device, simulation
from .simulate import simulated as simulated_trace
from .simulation.fake import FakeMode
from .step import TrainingStep
from .strategies import Baseline, Strategy
from .trace import Trace

if TYPE_CHECKING:
    import pandas as pd

Tell = Callable[[str], None]  # of a bar: what begins now


@dataclass(frozen=True)
class Row:
    """One strategy's results. Sizes are bytes; a strategy that could not run has `error` and Nones.

    time_ratio:           median time of a step to the plain step's, interleaved, without instruments
    flops_ratio:          floating-point operations of a step to the plain step's
    equivalent:           True, False, or None where it was not proven
    proof:                "float64", "same precision" or "none"
    loss_difference, gradient_difference: to the plain step, relative, in the proof's precision
    gradient_error:       the gradient in the strategy's own precision against the float64 truth
    buffer_differences:   names of buffers, frozen parameters and other state of modules that end differently
    """

    strategy: Strategy
    label: str
    trace: Trace | None = field(default=None, repr=False)
    time_ratio: float | None = None
    flops_ratio: float | None = None
    equivalent: bool | None = None
    proof: str = "none"
    loss_difference: float | None = None
    gradient_difference: float | None = None
    gradient_error: float | None = None
    buffer_differences: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    error: str | None = None

    @property
    def peak_bytes(self) -> int | None:
        return None if self.trace is None else self.trace.peak_bytes

    @property
    def tensor_peak_bytes(self) -> int | None:
        return None if self.trace is None else self.trace.tensor_peak_bytes

    @property
    def saved_bytes(self) -> int | None:
        return None if self.trace is None else self.trace.saved_bytes


@dataclass(frozen=True, repr=False)
class Comparison:
    """The rows of `compare`; row 0 is the plain step."""

    rows: tuple[Row, ...]

    def to_frame(self, strict: bool = False) -> pd.DataFrame:
        """A pandas frame, a row per strategy. `strict=True` keeps to figures that are the same on every machine:
        tensor bytes and the verdict, no times, no workspace."""
        from .views.table import comparison_frame

        return comparison_frame(self, strict)

    def plot(self, **options: Any) -> Any:
        """Peak by category per strategy, and memory against time, as a matplotlib figure."""
        from .views.plots import plot_comparison

        return plot_comparison(self, **options)

    def explain(self) -> str:
        """Plain sentences: what the rows say."""
        from .views.verdicts import explain_comparison

        return explain_comparison(self)

    def to_html(self) -> str:
        """One page without outside links: table, figure, explanation, to hand to a colleague."""
        from .views.html import comparison_page

        return comparison_page(self)

    def __str__(self) -> str:
        from .views.table import comparison_text

        return comparison_text(self)

    __repr__ = __str__  # what a notebook keeps beside the table

    def _repr_html_(self) -> str:
        from .views.html import comparison_html

        return comparison_html(self)


def compare(
    step: TrainingStep,
    strategies: Iterable[Strategy] | Mapping[str, Strategy],
    simulated: bool = False,
    repeats: int = 5,
    *,
    device: Device = "cuda",
) -> Comparison:
    """Run one training step under several strategies, from the same start, and compare them with the plain step.

    >>> import torch, memlab
    >>> model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(4)])
    >>> step = memlab.TrainingStep(model, (torch.ones(256, 64), torch.ones(256, 64)), torch.nn.MSELoss())
    >>> rows = memlab.compare(step, [memlab.Checkpoint(), memlab.MicroBatch(count=4)], repeats=1).rows
    >>> [row.label for row in rows]
    ['baseline', 'checkpoint', '4 micro-batches of 64']
    >>> [row.equivalent for row in rows]
    [True, True, True]

    Parameters
    ----------
    strategies: an iterable, or a dict whose keys become the labels. The plain step is always row 0
    simulated:  run nothing: the traces are those of `simulate`, for `device`. Rows then have no times and no proof
    repeats:    timed steps of each strategy, interleaved and without instruments; 0 leaves times out

    A strategy that cannot run becomes a row with its reason in `error` and does not end the comparison; a plain step
    that cannot run raises. Model, optimizer, batch and random streams are afterwards as before.
    """
    if not isinstance(step, TrainingStep):
        raise MemlabError(f"compare() takes a TrainingStep, not {type(step).__name__}")
    if not isinstance(repeats, int) or repeats < 0:
        raise MemlabError(f"repeats is {repeats!r}: give how often each step is timed, 0 for not at all")
    if simulated:
        return _simulated(step, strategies, device)
    labelled = _labelled(step, strategies)
    refuse(allocator=True)
    with progress(len(labelled) * 2 + repeats) as tell, Stage(step) as stage:
        tell("plain step")
        prover = Prover(stage)
        with prover.ready():
            rows = [_row(stage, *item, lambda row: _measured_row(stage, prover, row, tell)) for item in labelled]
        ratios = _time_ratios(stage, {row.label: row.strategy for row in rows if row.error is None}, repeats, tell)
    return Comparison(tuple(replace(row, time_ratio=ratios.get(row.label)) for row in rows))


def _simulated(
    step: TrainingStep, strategies: Iterable[Strategy] | Mapping[str, Strategy], device: Device
) -> Comparison:
    with simulation(step, device) as (stage, mode):
        labelled = _labelled(stage.step, strategies)
        with progress(len(labelled)) as tell:
            rows = [_row(stage, *item, lambda row: _simulated_row(stage, mode, row, device, tell)) for item in labelled]
    plain = rows[0].trace
    assert plain is not None
    return Comparison(
        tuple(
            replace(row, flops_ratio=row.trace.flops / plain.flops) if row.trace and plain.flops else row
            for row in rows
        )
    )


def _simulated_row(stage: Stage, mode: FakeMode, row: Row, device: Device, tell: Tell) -> Row:
    tell(row.label)
    made = simulated_trace(stage, mode, row.strategy, device)
    return replace(row, trace=made, notes=made.notes)


def _labelled(
    step: TrainingStep, strategies: Iterable[Strategy] | Mapping[str, Strategy]
) -> list[tuple[str, Strategy]]:
    """Labels, made different from each other, with the plain step first."""
    if isinstance(strategies, Strategy):
        strategies = [strategies]
    if not isinstance(strategies, Iterable):
        raise MemlabError(f"strategies are {strategies!r}: give them in a list or a dict")
    given = list(strategies.items()) if isinstance(strategies, Mapping) else [(None, s) for s in strategies]
    for _, strategy in given:
        if not isinstance(strategy, Strategy):
            raise MemlabError(
                f"{strategy!r} is no strategy: give values such as memlab.Checkpoint() or memlab.MicroBatch(count=4), "
                "in a list or a dict"
            )
    plain = next((item for item in given if item[1] == Baseline()), (None, Baseline()))
    ordered = [plain, *(item for item in given if item[1] != Baseline())]
    labelled: dict[str, Strategy] = {}
    for label, strategy in ordered:
        name = strategy.label(step) if label is None else label
        labelled[name if name not in labelled else f"{name} ({strategy!r})"] = strategy
    return list(labelled.items())


def _row(stage: Stage, label: str, strategy: Strategy, filled: Callable[[Row], Row]) -> Row:
    """The strategy's row, filled, or with the reason why it cannot run."""
    row = Row(strategy, label)
    try:
        return filled(row)
    except Exception as error:
        if strategy == Baseline():
            raise
        stage.release_graphs()
        return replace(row, error=reason(error, stage.step, strategy))


def _measured_row(stage: Stage, prover: Prover, row: Row, tell: Tell) -> Row:
    tell(f"{row.label}: bytes")
    measured = trace(stage, row.strategy)
    tell(f"{row.label}: proof")
    verdict = prover.verdict(row.strategy)
    plain = prover.plain_flops()
    return replace(
        row,
        trace=measured,
        flops_ratio=verdict.flops / plain if plain else None,
        equivalent=verdict.equivalent,
        proof=verdict.proof,
        loss_difference=verdict.loss_difference,
        gradient_difference=verdict.gradient_difference,
        gradient_error=verdict.gradient_error,
        buffer_differences=verdict.buffer_differences,
        notes=(*measured.notes, *verdict.notes),
    )


def _time_ratios(stage: Stage, strategies: dict[str, Strategy], repeats: int, tell: Any) -> dict[str, float]:
    """Median time of each strategy's step to the plain one's: A B C, A B C, ..., synchronised, without instruments."""
    seconds: dict[str, list[float]] = {label: [] for label in strategies}
    for number in range(repeats):
        tell(f"timing {number + 1} of {repeats}")
        for label, strategy in strategies.items():
            with stage.applied(strategy) as runner:
                _synchronise(stage.step.device)
                start = time.perf_counter()
                runner.run()
                _synchronise(stage.step.device)
                seconds[label].append(time.perf_counter() - start)
    if not repeats:
        return {}
    medians = {label: statistics.median(values) for label, values in seconds.items()}
    plain = next(iter(medians.values()))
    return {label: median / plain for label, median in medians.items()}


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
