"""What grows from training step to training step, and who holds it.

With `growth(tracker, clock)`, after a recording of at least three steps, one learns which places of the program leave
more in memory after each step, how many bytes a step, and the variable or attribute that holds them.

Rule 1. A storage is *kept* when it was made in one step and is still there when the next one has ended: a loop's
        variables (`loss`, `logits`) hold their last step's until the next forward pass, which is no leak.
Rule 2. A place (module, operator, source line) grows when its kept bytes rose in each of the last two steps. So a cache
        that the first step fills does not grow, nor does a buffer of the last few losses that is full by then.
Rule 3. Bytes per step are those that the last step but one left behind: the last step's own are not yet known as kept.
Rule 4. Parameters, buffers, optimizer state and the batch do not count, whatever they do; gradients of past steps do.
Rule 5. Below `LEAST` bytes a step nothing is reported, unless what is held carries a graph: a list of 4-byte losses is
        harmless, while a graph has nodes as well, which are no tensors and not in the figure.
Rule 6. The price is paid at the end of a recording; where nothing grows it is one pass over the storages.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import torch

from . import holders, ledger
from .clock import Clock
from .trace import Growth
from .tracker import Storage, Tracker, parts

LEAST = 1024  # bytes per step and holder
UNSEEN = "something that Python does not show"

_MOST = 64  # tensors of each sort whose holders are looked for, the largest or newest first
_NO_LEAK = ("parameters", "buffers", "optimizer state", "batch", "workspace")

_Where = tuple[str, str, str | None]  # module, operator, source line


def growth(tracker: Tracker, clock: Clock) -> tuple[Growth, ...]:
    """What grew, the largest first. The tracker has stopped and forgotten."""
    growing = _growing(tracker, clock)
    if not growing:
        return ()
    gc.collect()  # what only waits for the collector is no leak
    growing = {storage: where for storage, where in growing.items() if storage() is not None}
    with torch._C.DisableTorchFunctionSubclass():
        held = _held({storage.address: storage for storage in growing}, clock)
    sums: Counter[tuple[_Where, str, bool]] = Counter()
    for storage, where in growing.items():
        holder, with_graph = held.get(storage.number, (UNSEEN, False))
        if holder != holders.BOUNDED:
            sums[where, holder, with_graph] += storage.nbytes
    by_holder: Counter[tuple[str, bool]] = Counter()
    for (_, holder, with_graph), nbytes in sums.items():
        by_holder[holder, with_graph] += nbytes
    return tuple(
        Growth(nbytes, *where, holder, with_graph)
        for (where, holder, with_graph), nbytes in sums.most_common()
        if with_graph or by_holder[holder, with_graph] >= LEAST
    )


# -- what grows --------------------------------------------------------------------------------------------------------


def _growing(tracker: Tracker, clock: Clock) -> dict[Storage, _Where]:
    """What the last step but one left behind in places that grow (Rules 1 to 4)."""
    ends = clock.step_ends
    if len(ends) < 3:
        return {}
    last = [  # of the last three steps: its first operator, and the length of the log at its end
        (first, tracker.operators[end - 1][3] if end else 0) for first, end in pairwise([0, *ends])
    ][-3:]
    levels: dict[_Where, list[int]] = {}
    left: dict[Storage, _Where] = {}
    for storage in tracker.storages:
        if not 0 <= storage.operator < ends[-2] or storage.role in _NO_LEAK:
            continue
        kept = [storage.operator < first and (storage.died is None or storage.died >= end) for first, end in last]
        if any(kept):
            where = _where(tracker, clock, storage.operator)
            level = levels.setdefault(where, [0, 0, 0])
            for step, is_kept in enumerate(kept):
                level[step] += is_kept * storage.nbytes
            if kept[2] and storage.operator >= ends[-3]:
                left[storage] = where
    return {storage: where for storage, where in left.items() if levels[where][0] < levels[where][1] < levels[where][2]}


def _where(tracker: Tracker, clock: Clock, number: int) -> _Where:
    function, (_, module, source), _, _ = tracker.operators[number]
    module, source = clock.resolved(module, source)
    return module, function.name().partition(".")[0], source


# -- who holds it ------------------------------------------------------------------------------------------------------


def _held(wanted: dict[int, Storage], clock: Clock) -> dict[int, tuple[str, bool]]:
    """By the storage's number, the name of its holder and whether a graph hangs on the tensor that is held: one of the
    storage, or else one whose graph has saved it. `wanted` has the storages by their address."""

    def largest(tensor: torch.Tensor) -> int:
        return sum(wanted[address].nbytes for address in _addresses([tensor]) & wanted.keys())

    def newest(tensor: torch.Tensor) -> int:
        return 0 if (graph := _graph_of(tensor)) is None else 1 + int(graph._sequence_nr())

    held: dict[int, tuple[str, bool]] = {}
    waiting = set(wanted)
    for order, stored in ((largest, lambda tensor: _addresses([tensor])), (newest, _saved_below)):
        if not waiting:
            break
        tensors = sorted((tensor for tensor in _tensors() if order(tensor)), key=order, reverse=True)[:_MOST]
        named = holders.names(tensors, clock.names)
        for tensor in tensors:
            name = named.get(id(tensor))
            if name is None or not waiting:
                continue
            found = stored(tensor) & waiting
            held |= {wanted[address].number: (name, _graph_of(tensor) is not None) for address in found}
            waiting -= set() if name == holders.BOUNDED else found
    return held


def _tensors() -> Iterator[torch.Tensor]:
    """Every tensor that has a Python object."""
    return (value for value in gc.get_objects() if issubclass(type(value), torch.Tensor))


def _saved_below(tensor: torch.Tensor) -> set[int]:
    return _addresses(entry.tensor for entry in ledger.walk([tensor]).entries if entry.tensor is not None)


def _addresses(tensors: Iterable[torch.Tensor]) -> set[int]:
    found: set[int] = set()
    for tensor in tensors:
        try:
            found.update(part.untyped_storage()._cdata for part in parts(tensor))
        except (RuntimeError, NotImplementedError):  # a tensor without storage: of a transform that is over, for one
            continue
    return found


def _graph_of(tensor: torch.Tensor) -> Any:
    try:
        return tensor.grad_fn
    except RuntimeError:  # a view that an in-place edit has made invalid
        return None
