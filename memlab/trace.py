"""A `Trace`: what one training step did to memory, as one immutable value.

With this one can ask where the peak is and what is alive there, by category, module and phase, what autograd
saved for backward, and what the trace cannot see. Nothing here measures; instruments make traces
(`memlab.measure`, `memlab.record`), views draw them.

Time in a trace is a *tick*: the number of the allocation or release, in the order in which they happened. An
allocation is alive from its `born` tick until just before its `freed` tick, so memory in use after tick t is the
sum over `born <= t < freed`. Tick 0 is the start: what was there before the step has `born == 0`.

Rule 1. A storage is one allocation, at its full size, however many tensors view it.
Rule 2. *Tensor bytes* are what tensors own; workspace and rounding are the allocator's and not among them.
Rule 3. Every sum at an instant (by category, by module) is a sum over the same set of allocations.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from .errors import MemlabError

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer state",
    "buffers",
    "batch",
    "activations",
    "weight copies",
    "checkpoint inputs",
    "temporaries",
    "workspace",
    "rounding",
    "other",
)
PHASES = ("forward", "backward", "recompute", "optimizer")
SAVED_CATEGORIES = ("activations", "weight copies", "checkpoint inputs")  # what autograd holds for backward
_NOT_TENSORS = ("workspace", "rounding")


@dataclass(frozen=True, slots=True)
class Place:
    """Where the program was: `phase`, `micro_batch` (from 0), `module` (dotted name), `operator`, `source` line."""

    phase: str = "start"
    module: str = ""
    operator: str = ""
    micro_batch: int = 0
    step: int = 0
    source: str | None = None

    def __str__(self) -> str:
        where = f"{self.phase} of micro-batch {self.micro_batch + 1}" if self.micro_batch else self.phase
        inside = f" in {self.module}" if self.module else ""
        return f"{where}{inside}" + (f", {self.operator}" if self.operator else "")


@dataclass(frozen=True, slots=True)
class Allocation:
    """The life of one block of memory: `nbytes` bytes, alive for ticks `born <= t < freed` (None: to the end).

    `operator_number` counts operators from 0 (-1: there before the step); `storage` is the identifier that
    `SavedTensor.storage` refers to (None for workspace and rounding); `name` is that of the parameter, buffer or
    batch entry it belongs to, where there is one.
    """

    nbytes: int
    category: str
    place: Place
    born: int
    freed: int | None
    operator_number: int
    storage: int | None = None
    name: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """One tensor that autograd saved, found in the graph when backward was entered.

    module:         name of the module whose forward saved it
    operator:       the operator's derivative, such as `AddmmBackward0`
    slot:           operator and name under which it is saved, such as `AddmmBackward0.mat1`
    shape, dtype:   of the tensor; `nbytes` = elements x element size (views may share bytes)
    storage:        identifier of the storage that holds it; `storage_bytes` its full size
    kind:           a category: parameters, buffers, batch, activations, weight copies, checkpoint inputs, ...
    state:          "kept" (in memory), "recomputed" (dropped, made again in backward), "offloaded" (moved to another
                    device), "packed" (in a form of the user's own hooks), "unseen" (alive when backward began, and
                    explained by nothing but an operator that shows nothing of what it saved)
    shares_with:    slots saved earlier on the same storage
    micro_batch, step, entry: which micro-batch and step; `entry` numbers the entries to backward
    """

    module: str
    operator: str
    slot: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    storage: int | None
    storage_bytes: int
    kind: str
    state: str = "kept"
    shares_with: tuple[str, ...] = ()
    micro_batch: int = 0
    step: int = 0
    entry: int = 0
    source: str | None = None


@dataclass(frozen=True, slots=True)
class Growth:
    """What each training step of a block left behind, on top of what the steps before it had.

    bytes_per_step:              tensor bytes
    module, operator, source:    where they were made; the line where sources were recorded
    holder:                      what holds them, in words: "the global list `losses`"
    through_graph:               whether autograd's graph hangs on what is held, and all that the graph saved with it:
                                 `.detach()` lets go of the graph
    """

    bytes_per_step: int
    module: str
    operator: str
    source: str | None
    holder: str
    through_graph: bool


@dataclass(frozen=True, slots=True)
class Peak:
    """The instant of the largest memory use: how much, where, and what was alive (largest first)."""

    nbytes: int
    tick: int
    place: Place
    allocations: tuple[Allocation, ...] = field(repr=False)

    @property
    def phase(self) -> str:
        return self.place.phase

    @property
    def module(self) -> str:
        return self.place.module

    @property
    def operator(self) -> str:
        return self.place.operator

    @property
    def micro_batch(self) -> int:
        return self.place.micro_batch

    @property
    def source(self) -> str | None:
        return self.place.source


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator that ran: where, when it ended (`seconds` after the start), and the first tick after it.

    Its work, where it was counted (`measure` and `simulate` do): floating-point operations, bytes read and written, and
    the type that it computes in.
    """

    place: Place
    tick: int
    seconds: float
    flops: int = 0
    moved_bytes: int = 0
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class TimelinePoint:
    """Memory in use while one operator ran: its highest `nbytes`, and when."""

    operator_number: int
    place: Place
    nbytes: int
    seconds: float


@dataclass(frozen=True, repr=False)
class Trace:
    """What one training step did to memory. Made by `memlab.measure` or `memlab.record`; see the module's rules.

    All sizes are bytes. `strategy` is the label of the technique that ran, `source` is "measured" or "simulated",
    `allocator` tells whether the device's allocator was listened to (workspace is seen), `growth` what grew from step
    to step (in a block of three steps or more), `absent` lists in words what this trace cannot see, `notes` what a
    reader should know, `provenance` the device, versions and settings.

    `memlab.load` makes one of a CUDA memory snapshot, too: the allocator's history, without modules and saved tensors;
    an operator is then a run of allocations from one place, and `Allocation.name` is the user's metadata.
    """

    allocations: tuple[Allocation, ...] = field(repr=False)
    operators: tuple[Operator, ...] = field(repr=False)
    saved: tuple[SavedTensor, ...] = field(repr=False)
    strategy: str = "baseline"
    source: str = "measured"
    allocator: bool = False
    absent: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    provenance: dict[str, Any] = field(default_factory=dict, repr=False)
    step_ends: tuple[int, ...] = field(default=(), repr=False)  # operator numbers
    growth: tuple[Growth, ...] = field(default=(), repr=False)

    # -- the peak ------------------------------------------------------------------------------------------------

    @property
    def peak_bytes(self) -> int:
        """Largest number of bytes in use at once: tensors, workspace and rounding (workspace and rounding only
        where the allocator was listened to)."""
        return self.peak.nbytes

    @property
    def tensor_peak_bytes(self) -> int:
        """Largest number of bytes owned by tensors at once: the same on every processor; what simulation predicts."""
        return self.tensor_peak.nbytes

    @cached_property
    def peak(self) -> Peak:
        return self._top(self._running)

    @cached_property
    def tensor_peak(self) -> Peak:
        return self._top(self._tensor_running)

    @property
    def saved_bytes(self) -> int:
        """Largest number of bytes that autograd held for backward at one entry to backward, each storage once:
        activations, weight copies and checkpoint inputs; not parameters, buffers, the batch."""
        entries: dict[int, dict[int, int]] = {}
        for tensor in self.saved:
            if tensor.kind in SAVED_CATEGORIES and tensor.storage is not None:
                entries.setdefault(tensor.entry, {})[tensor.storage] = tensor.storage_bytes
        return max((sum(storages.values()) for storages in entries.values()), default=0)

    @property
    def flops(self) -> int:
        """Floating-point operations of all that ran, where they were counted (`measure` and `simulate` do)."""
        return sum(operator.flops for operator in self.operators)

    # -- sums at an instant --------------------------------------------------------------------------------------

    def by_category(self, at: str = "peak") -> dict[str, int]:
        """Bytes of each category that is present, in the order of `CATEGORIES`.

        `at` is the instant: "peak", "tensor_peak" (tensor bytes alone, the same on every machine), or a phase
        ("forward", "backward", "recompute", "optimizer"), meaning the highest point within it.
        """
        sums = self._sums(at, lambda allocation: allocation.category)
        return {category: sums[category] for category in CATEGORIES if category in sums}

    def by_module(self, at: str = "peak", depth: int | None = None) -> dict[str, int]:
        """Bytes by the module that owns (parameters, their gradients and state) or made them, largest first.

        `depth` cuts names to so many parts: with depth=2 `blocks.0.attn.qkv` counts for `blocks.0`.
        """

        def module(allocation: Allocation) -> str:
            name = allocation.place.module or f"({allocation.category})"
            return ".".join(name.split(".")[:depth]) if depth else name

        sums = self._sums(at, module)
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def by_phase(self, at: str = "peak") -> dict[str, int]:
        """The highest bytes reached within each phase that ran; the largest of them is the peak.

        `at="tensor_peak"` counts tensor bytes alone.
        """
        running = self._tensor_running if at == "tensor_peak" else self._running
        top: dict[str, int] = {}
        for operator, (first, end) in zip(self.operators, self._spans, strict=True):
            phase = operator.place.phase
            top[phase] = max(top.get(phase, 0), *running[first:end])
        return {phase: top[phase] for phase in PHASES if phase in top}

    def alive(self, tick: int) -> tuple[Allocation, ...]:
        """The allocations alive after that tick, largest first."""
        found = [a for a in self.allocations if a.born <= tick and (a.freed is None or tick < a.freed)]
        return tuple(sorted(found, key=lambda a: -a.nbytes))

    # -- over time -----------------------------------------------------------------------------------------------

    def timeline(self, category: str | None = None) -> list[TimelinePoint]:
        """Memory in use by operator number: for each operator the highest bytes from its start to the next one's
        start; the largest of them is the peak. `category` restricts to one category."""
        running = self._running if category is None else self._sum_over(lambda a: a.category == category)
        return [
            TimelinePoint(number, operator.place, max(running[first:end]), operator.seconds)
            for number, (operator, (first, end)) in enumerate(zip(self.operators, self._spans, strict=True))
        ]

    @cached_property
    def steps(self) -> tuple[Trace, ...]:
        """Each training step of the block as a trace of its own (a block of one step: that step alone)."""
        if len(self.step_ends) < 2:
            return (self,)
        parts, first = [], 0
        for end in self.step_ends:
            parts.append(self._window(first, end))
            first = end
        return tuple(parts)

    def estimate_seconds(self, device: Any = "A100", phase: str | None = None) -> float:
        """An estimate of how long the step takes on a GPU, at least: a roofline over its operators (`memlab.roofline`).

        `device` is a name in `memlab.roofline.DEVICES` or a `memlab.roofline.Device` of your own; `phase` restricts to
        "forward", "backward", "recompute" or "optimizer". For traces of `measure` and `simulate`, which count the work;
        MemlabError for others.
        """
        from .roofline import seconds

        return seconds(self, device, phase)

    # -- in words, tables, pictures, files -----------------------------------------------------------------------

    def explain(self) -> str:
        """Plain sentences: which phase holds the peak, what is alive there, which technique can move it."""
        from .views.words import explain_trace

        return explain_trace(self)

    def to_frame(self, of: str = "allocations") -> pd.DataFrame:
        """A pandas frame with a row per allocation, or per saved tensor with `of="saved"`, per operator with
        `of="timeline"`."""
        import pandas as pd

        if of == "saved":
            return pd.DataFrame([dataclasses.asdict(tensor) for tensor in self.saved])
        rows: Iterable[Any]
        if of == "allocations":
            rows = self.allocations
        elif of == "timeline":
            rows = self.timeline()
        else:
            raise MemlabError(f'to_frame(of={of!r}): there are "allocations", "saved" and "timeline"')
        return pd.DataFrame([_flat(row) for row in rows])

    def plot(self, kind: str = "timeline", **options: Any) -> Any:
        """A matplotlib figure: "timeline" (stacked by category, phases marked), "modules" (a treemap of the peak),
        "network" (its blocks, with what each saves for backward) or "saved" (the largest saved tensors)."""
        from .views.figures import plot

        return plot(self, kind, **options)

    def saved_table(self, top: int | None = None) -> Any:
        """What autograd saved as a `SavedTable` (text, HTML, `.to_frame()`): a row for each storage, and why it is
        needed; the `top` largest rows, or all."""
        from .views.saved import saved_table

        return saved_table(self, top)

    def diff(self, other: Trace) -> Any:
        """What `other` changes against this trace, as a `memlab.contrast.Difference`: bytes by category at the peak,
        and the tensors that are saved in one of them alone."""
        from .contrast import contrast

        return contrast(self, other)

    def to_html(self) -> str:
        """One whole HTML page, in one file, to hand on: peak, figures, saved tensors, bounds, what is not seen."""
        from .views.report import trace_page

        return trace_page(self)

    def save(self, path: str | Path) -> Path:
        """Write the trace to one file (compressed JSON); `memlab.load` reads it back."""
        from .files.store import save

        return save(self, path)

    def export(self, path: str | Path) -> Path:
        """Write the trace for another tool, by the suffix: `.json` or `.json.gz` (trace events: Perfetto,
        chrome://tracing), `.pickle` or `.pkl` (a memory snapshot: pytorch.org/memory_viz)."""
        from .files.store import export

        return export(self, path)

    def __str__(self) -> str:
        from .views.words import describe_trace

        return describe_trace(self)

    __repr__ = __str__  # what a notebook keeps beside the table

    def _repr_html_(self) -> str:
        from .views.html import trace_html

        return trace_html(self)

    # -- arithmetic ----------------------------------------------------------------------------------------------

    def _sum_over(self, include: Callable[[Allocation], bool]) -> list[int]:
        """Bytes in use after each tick, over the allocations to include."""
        changes = [0] * self._ticks
        for allocation in self.allocations:
            if include(allocation):
                changes[allocation.born] += allocation.nbytes
                if allocation.freed is not None:
                    changes[allocation.freed] -= allocation.nbytes
        return list(accumulate(changes))

    @cached_property
    def _ticks(self) -> int:
        return max((max(a.born, a.freed or 0) for a in self.allocations), default=0) + 1

    @cached_property
    def _running(self) -> list[int]:
        return self._sum_over(lambda a: True)

    @cached_property
    def _tensor_running(self) -> list[int]:
        return self._sum_over(lambda a: a.category not in _NOT_TENSORS)

    @cached_property
    def _spans(self) -> list[tuple[int, int]]:
        """For each operator the ticks `first <= tick < end` of its time; where nothing was allocated or released in it,
        the tick before: the level that it ran at."""
        spans, start = [], 0
        for number, operator in enumerate(self.operators):
            last = number == len(self.operators) - 1
            end = self._ticks if last else min(operator.tick, self._ticks)
            spans.append((min(start, end - 1), end))
            start = end
        return spans

    @cached_property
    def _operator_ticks(self) -> list[int]:
        return [operator.tick for operator in self.operators]

    def _place(self, tick: int) -> Place:
        """Where the program was at that tick: in the operator that had not yet ended."""
        if not self.operators:
            return Place()
        number = bisect_right(self._operator_ticks, tick)
        return self.operators[min(number, len(self.operators) - 1)].place

    def _top(self, running: list[int]) -> Peak:
        nbytes = max(running)
        tick = running.index(nbytes)
        return Peak(nbytes, tick, self._place(tick), self.alive(tick))

    def _instant(self, at: str) -> tuple[int, bool]:
        """(tick, tensors only) of a named instant."""
        if at == "peak":
            return self.peak.tick, False
        if at == "tensor_peak":
            return self.tensor_peak.tick, True
        spans = [
            range(*span)
            for operator, span in zip(self.operators, self._spans, strict=True)
            if operator.place.phase == at
        ]
        inside = [(self._running[tick], -tick) for span in spans for tick in span]
        if not inside:
            ran = ", ".join(f'"{phase}"' for phase in self.by_phase())
            raise MemlabError(f'at={at!r}: choose "peak", "tensor_peak" or a phase that ran: {ran}')
        return -max(inside)[1], False

    def _sums(self, at: str, key: Callable[[Allocation], str]) -> dict[str, int]:
        tick, tensors_only = self._instant(at)
        sums: dict[str, int] = {}
        for allocation in self.alive(tick):
            if not (tensors_only and allocation.category in _NOT_TENSORS):
                sums[key(allocation)] = sums.get(key(allocation), 0) + allocation.nbytes
        return sums

    def _window(self, first: int, end: int) -> Trace:
        """The trace of the operators `first <= number < end`; what is alive at its start is resident."""
        start = self.operators[first - 1].tick if first else 1
        stop = self.operators[end - 1].tick if end < len(self.operators) else self._ticks

        def shift(a: Allocation) -> Allocation:
            born = max(a.born - start + 1, 0)
            freed = None if a.freed is None or a.freed >= stop else a.freed - start + 1
            return dataclasses.replace(a, born=born, freed=freed, operator_number=max(a.operator_number - first, -1))

        alive = [a for a in self.allocations if a.born < stop and (a.freed is None or a.freed >= start)]
        operators = [dataclasses.replace(o, tick=o.tick - start + 1) for o in self.operators[first:end]]
        step = operators[0].place.step if operators else 0
        return dataclasses.replace(
            self,
            allocations=tuple(shift(a) for a in alive),
            operators=tuple(operators),
            saved=tuple(tensor for tensor in self.saved if tensor.step == step),
            step_ends=(),
            growth=(),
        )


def _flat(row: Any) -> dict[str, Any]:
    """A dataclass with a `place` as one flat dictionary."""
    values = {f.name: getattr(row, f.name) for f in dataclasses.fields(row)}
    place = dataclasses.asdict(values.pop("place"))
    return values | place
