"""A memory limit on any device, its error, and what the error explains.

With `limit(budget)` around a block, tensors may own `budget` bytes at once. The operator that goes over raises
`OutOfMemoryError`, which says what was in use, who held it, and what each technique could have saved at most.

Rule 1. What counts is what `Trace.tensor_peak_bytes` counts: the error comes if and only if that exceeds the budget.
Rule 2. A storage that is older than the block but met late (a parameter, when its module is called) was there all
        along: meeting it can show that the limit was exceeded earlier.
Rule 3. Once raised, the limit is silent until use has fallen to the budget: whatever cleans up must be able to run.
Rule 4. When the error leaves the block, what the block made is let go: frames, graphs, gradients, and the optimizer
        state of an update that was cut short. What was changed in place stays changed, as after any exception.
"""

from __future__ import annotations

import functools
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import nn

from . import release
from .clock import user_line
from .errors import MemlabError
from .record import Recorder, record
from .trace import Allocation, Peak, Trace
from .tracker import Storage, Tracker
from .units import format_bytes, parse_bytes

_HOLDERS = 5  # named in the message


class OutOfMemoryError(MemlabError, torch.OutOfMemoryError):
    """A block needed more than its `memlab.limit`. The message explains; the figures, in bytes:

    budget:    the limit
    requested: what the operator that went over asked for
    trace:     a `Trace` of what ran up to there (None where a framework made the error anew from its text)
    """

    def __init__(self, message: str, trace: Trace | None = None, budget: int = 0, requested: int = 0) -> None:
        super().__init__(message)
        self.trace = trace
        self.budget = budget
        self.requested = requested


OutOfMemoryError.__module__ = "memlab"


_active: list[_Limited] = []  # the innermost last


def refuse(trace: Trace) -> None:
    """Raise where a simulated step would exceed a limit that is on: nothing of it exists that could be counted."""
    for limited in _active:
        if trace.tensor_peak_bytes > limited.budget:
            raise limited.would_be_exceeded(trace)


class limit(record):  # a lower-case class: used like a function, as torch.no_grad is
    """Give a block of code a memory limit, on any device: a context manager, or a decorator.

    >>> import torch, memlab
    >>> model = torch.nn.Linear(1024, 1024)
    >>> with memlab.limit("5 MiB", model=model) as trace:
    ...     loss = model(torch.ones(8, 1024)).sum()
    >>> trace.tensor_peak_bytes
    4263940
    >>> try:
    ...     with memlab.limit("5 MiB", model=model):
    ...         model(torch.ones(8, 1024)).sum().backward()
    ... except torch.OutOfMemoryError as error:
    ...     print(str(error).splitlines()[0].partition(" (")[0])
    Out of a memory limit of 5.00 MiB: mm needed 4.00 MiB in the backward pass, in Linear

    Parameters
    ----------
    budget:    bytes, or text such as "512 MiB"
    model, optimizer, batch: as for `record`: what they hold counts from the start. Without them, modules are recognised
               as they are called, parameters by the graph and the optimizer
    sources:   in backward, also name the line of the forward pass whose derivative ran (slower). Without it the error
               names there the line that called backward; elsewhere it names your line in any case

    Yields a `Trace` as `record` does; where nothing was raised its tensor peak is within the budget. Otherwise raises
    `OutOfMemoryError` (a `torch.OutOfMemoryError`) at the operator that went over; where the model is too large by
    itself, before anything runs. `MemlabError` for a budget that is no number of bytes above 0.

    When the error (or a device's own `torch.OutOfMemoryError`) leaves the block, the memory of what the block made is
    let go, even while a notebook keeps the traceback: variables of the functions that it had called, what autograd
    saved (a later backward through a tensor of the block is refused), gradients of parameters that were made in it.
    The variables of the function or cell that holds the `with` keep their values. What was changed in place
    (parameters, running statistics, older gradients) and random streams stay as they were when the block ended.

    The block may also catch the error itself and go on: the limit holds again once use has fallen to the budget.

    A limit counts what tensors own, operator by operator. On a GPU the workspace inside operators, the rounding of the
    caching allocator, fragmentation and the CUDA context come on top. Of nested limits each holds, so the tighter one
    counts; `record` may be around or inside. Around `measure` and `compare` memlab's own back-ups and proofs do not
    count, but the plain step does, with which both begin. Around `simulate` the error says what the step would need.
    """

    def __init__(
        self,
        budget: int | str,
        *,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        batch: Any = None,
        sources: bool = False,
    ) -> None:
        nbytes = parse_bytes(budget)
        if not nbytes:
            raise MemlabError(
                f"a memory limit of {budget!r} leaves room for nothing: give bytes, or text such as '512 MiB'"
            )
        if model is not None and not isinstance(model, nn.Module):
            raise MemlabError(f"limit() takes a module as model=, not {type(model).__name__}")
        super().__init__()
        self._make = functools.partial(_Limited, nbytes, model, optimizer, batch, sources)
        self._recorder: _Limited | None = None

    def __enter__(self) -> Trace:
        trace = super().__enter__()
        recorder = self._recorder
        assert recorder is not None
        _active.append(recorder)
        if recorder.tracker.over():
            self._give_up(recorder, late=False)
        return trace

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        recorder = self._recorder
        assert recorder is not None
        if kind is None and recorder.tracker.over():  # Rule 2
            self._give_up(recorder, late=True)
        try:
            if isinstance(error, torch.OutOfMemoryError):
                release.frames(error, tb)
                recorder.let_go()
        finally:
            _active.remove(recorder)
            super().__exit__(kind, error, tb)

    def _give_up(self, recorder: _Limited, late: bool) -> None:
        """Raise outside any operator."""
        error = recorder.exceeded(late=late)
        try:
            self.__exit__(OutOfMemoryError, error, None)
            raise error
        finally:
            del error  # its traceback holds this frame


class _LimitedTracker(Tracker):
    """Keeps the running sum of live tensor bytes, from the log, and compares its peak with the budget."""

    def __init__(self, recorder: _Limited, budget: int) -> None:
        super().__init__(recorder.clock)
        self._recorder: _Limited = weakref.proxy(recorder)  # which holds this tracker
        self._budget = budget
        self._device = recorder.device.type
        self._in_use = 0
        self._peak = 0
        self._read = 0  # entries of the log
        self._told = False
        self._sum: tuple[int, Storage, int] | None = None  # a gradient, a sum in its place, use if both stay
        self.first = 0  # the operator before which use was last known to be within the budget again (Rule 3)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        number = len(self.operators)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if number < len(self.operators) and self.over():
            raise self._recorder.exceeded()
        return out

    def over(self) -> bool:
        """Whether the peak is over the budget, and this has not yet been told (Rule 3)."""
        end = len(self.log)
        for position in range(self._read, end):
            entry = self.log[position]
            storage = self.storages[abs(entry) - 1]
            if self._takes_over(entry, storage):
                continue
            if storage.role == "workspace" or storage.device != self._device:  # Rule 1
                continue
            if entry < 0:
                self._in_use -= storage.nbytes
                self._fallen(position)
                continue
            self._in_use += storage.nbytes
            if storage.operator < 0:  # Rule 2
                self._peak += storage.nbytes
            self._peak = max(self._peak, self._in_use)
        self._read = end
        over = self._peak > self._budget and not self._told
        self._told |= over
        return over

    def _takes_over(self, entry: int, storage: Storage) -> bool:
        """Whether that entry of the log is not to be counted: the birth of a sum that takes a gradient's place (see
        `accumulation.py`), or that gradient's death. Such a sum counts after all if something is born before that."""
        if self._sum is not None:
            gradient, total, level = self._sum
            if entry > 0:
                self._in_use += total.nbytes
                self._peak = max(self._peak, level)
                self._sum = None
            elif storage.number == gradient:
                self._sum = None
                return True
        gradient, number = next(reversed(self.continued.items()), (-1, -1))
        if entry > 0 and storage.number == number:
            self._sum = gradient, storage, self._in_use + storage.nbytes
            return True
        return False

    def _fallen(self, position: int) -> None:
        if self._told and self._in_use <= self._budget:
            self._told, self._peak = False, self._in_use
            self.first = bisect_right(self.operators, position, key=lambda row: row[3])


class _Limited(Recorder):
    """A recorder that stops the program at a budget."""

    tracker: _LimitedTracker

    def __init__(self, budget: int, model: nn.Module | None, optimizer: Any, batch: Any, sources: bool) -> None:
        super().__init__(model, optimizer, batch, sources=sources)
        self.budget = budget
        self.tracker = _LimitedTracker(self, budget)
        self._first_node = torch._C._autograd._get_sequence_nr()
        self._updating: tuple[Any, list[torch.Tensor]] | None = None  # an optimizer, its parameters without state

    def _optimizer_begins(self, optimizer: Any) -> None:
        super()._optimizer_begins(optimizer)
        if self.tracker.over():  # by state met only now (Rule 2): before the update begins
            raise self.exceeded(late=True)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._updating = optimizer, [parameter for parameter in parameters if not optimizer.state.get(parameter)]

    def _optimizer_ends(self, optimizer: Any) -> None:
        super()._optimizer_ends(optimizer)
        self._updating = None

    # -- the error -----------------------------------------------------------------------------------------------

    def exceeded(self, late: bool = False) -> OutOfMemoryError:
        """The error to raise now; `late` where no operator ends."""
        in_backward = torch._C._current_graph_task_id() != -1  # then the ledger was read when it began
        roots = [] if in_backward else release.graph_tensors(self._first_node)
        if roots:
            self._read_ledger(roots)
        self._find_gradients(self._parameters)
        text = format_bytes(self.budget)
        trace = self.trace(notes=[f"a memory limit of {text} was exceeded: the trace covers what ran up to there"])
        if self.tracker.first:
            trace = trace._window(self.tracker.first, len(trace.operators))
        peak = trace.tensor_peak
        number = next((a.operator_number for a in peak.allocations if a.born == peak.tick), -1)
        requested = sum(a.nbytes for a in peak.allocations if a.operator_number == number >= 0)
        late = late or number != len(trace.operators) - 1
        message = [
            f"Out of a memory limit of {text}: {self._what_happened(peak, requested, late)}",
            *_holders(a for a in peak.allocations if not a.operator_number == number >= 0),
            *_bounds(_expecting(trace) if torch.is_grad_enabled() and (roots or in_backward) else trace),
            *self._what_stays(),
        ]
        return OutOfMemoryError("\n".join(message), trace, self.budget, requested)

    def would_be_exceeded(self, trace: Trace) -> OutOfMemoryError:
        """The error for a simulated step, whose trace is whole."""
        from .views.words import bounds, pass_name

        peak, text = trace.tensor_peak, format_bytes(self.budget)
        message = [
            f"Out of a memory limit of {text}: the simulated step would need {format_bytes(peak.nbytes)} in "
            f"{pass_name(peak.place)}, {format_bytes(peak.nbytes - self.budget)} too much.",
            *_holders(peak.allocations),
            *bounds(trace),
        ]
        return OutOfMemoryError("\n".join(message), trace, self.budget, peak.nbytes - self.budget)

    def _what_happened(self, peak: Peak, requested: int, late: bool) -> str:
        from .views.words import operator_name, pass_name

        excess = f"{format_bytes(peak.nbytes - self.budget)} too much"
        if not requested:
            happened = f"{format_bytes(peak.nbytes)} were in use before anything ran, {excess}."
        else:
            place = peak.place
            where = f", in {place.module}" if place.module else ""
            line = place.source or (None if late else user_line())
            if line is not None:
                where += f" (called from {line})" if place.phase == "backward" and not place.source else f" ({line})"
            happened = (
                f"{operator_name(place)} needed {format_bytes(requested)} in {pass_name(place)}{where}, "
                f"with {format_bytes(peak.nbytes - requested)} in use: {excess}."
            )
        if late:
            happened += (
                " This is known only now, since some of it was recognised late: pass model=, optimizer= and batch= to "
                "limit() to be stopped there."
            )
        return happened

    def _what_stays(self) -> Iterator[str]:
        if self._updating is not None or self._stepped_in_backward:
            yield "The update had begun: some parameters may be changed and others not. Go back to a saved state."
        old = any(s.role == "gradients" and s.operator < 0 and s.died is None for s in self.tracker.storages)
        if old and self._entered:
            yield "Gradients older than this block may have been added to: clear them before the next step."

    # -- letting go ----------------------------------------------------------------------------------------------

    def let_go(self) -> None:
        """Release what was made since `start` (Rule 4). `stop` comes after."""
        if self._updating is not None:
            optimizer, stateless = self._updating
            for owner in stateless:
                optimizer.state.pop(owner, None)
            self._updating = None
        for reference, _, _ in self._parameters.values():
            parameter = reference()
            storage = None if parameter is None else self.tracker.find(parameter.grad)
            if parameter is not None and storage is not None and storage.operator >= 0:
                parameter.grad = None
        release.graphs(self._first_node)


def _holders(allocations: Iterable[Allocation]) -> Iterator[str]:
    """The largest, by parameter or module, a line each."""
    sums: dict[str, int] = {}
    for allocation in allocations:
        name = allocation.name or allocation.place.module or "outside modules"
        holder = f"{name} ({allocation.category})"
        sums[holder] = sums.get(holder, 0) + allocation.nbytes
    largest = sorted(sums.items(), key=lambda item: -item[1])[:_HOLDERS]
    if largest:
        yield "Largest holders of what was in use:"
    for holder, nbytes in largest:
        yield f"- {holder}: {format_bytes(nbytes)}"


def _expecting(trace: Trace) -> Trace:
    """The trace with all that is alive in a forward pass or a recomputation counted as saved: autograd may be about to
    save it, and no bound must be too low."""
    if not trace.operators or trace.operators[-1].place.phase not in ("forward", "recompute"):
        return trace
    allocations = (
        replace(a, category="activations") if a.category == "temporaries" and a.freed is None else a
        for a in trace.allocations
    )
    return replace(trace, allocations=tuple(allocations))


def _bounds(trace: Trace) -> Iterator[str]:
    from .views.words import bounds

    yield from bounds(trace)
    yield "All of this is about what ran up to here. The rest of the block did not run, and may have needed more."
