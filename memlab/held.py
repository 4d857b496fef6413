"""What autograd held for backward: the saved tensors of one entry to backward, those on one storage together.

With `held(trace)` one has the list that `Trace.saved_bytes` is the sum of, and beside it what was saved without being
counted there: parameters, buffers and the batch, and what is recomputed or moved away.
"""

from __future__ import annotations

from dataclasses import dataclass

from .trace import SAVED_CATEGORIES, SavedTensor, Trace


@dataclass(frozen=True, slots=True)
class Held:
    """A storage held for backward, by all the tensors saved on it, in the order in which they were saved. A tensor
    that is not in memory (recomputed, packed) is alone."""

    tensors: tuple[SavedTensor, ...]

    @property
    def first(self) -> SavedTensor:
        return self.tensors[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the storage; 0 where nothing is in memory."""
        return self.first.storage_bytes if self.first.storage is not None else 0

    @property
    def counted(self) -> bool:
        """Whether it is one of those that `Trace.saved_bytes` adds up."""
        return self.first.kind in SAVED_CATEGORIES and self.first.storage is not None


def held(trace: Trace) -> tuple[Held, ...]:
    """What was held when most was, at one entry to backward: each storage once, in the order of the forward pass."""
    entries: dict[int, dict[object, list[SavedTensor]]] = {}
    for number, tensor in enumerate(trace.saved):
        alone = ("alone", number)
        storages = entries.setdefault(tensor.entry, {})
        storages.setdefault(alone if tensor.storage is None else tensor.storage, []).append(tensor)
    found = [tuple(Held(tuple(tensors)) for tensors in storages.values()) for storages in entries.values()]
    return max(found, key=counted_bytes, default=())


def counted_bytes(items: tuple[Held, ...]) -> int:
    """Their part of `Trace.saved_bytes`."""
    return sum(item.nbytes for item in items if item.counted)
