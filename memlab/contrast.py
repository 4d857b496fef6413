"""Two traces side by side: what the second changes, by category at the peak and tensor by tensor in what is saved.

With `contrast(first, second)`, or `first.diff(second)`, one has a `Difference`. Both traces may be of any step, source
and strategy. All differences are the second's bytes less the first's.

Rule 1. A saved tensor is the same in both where module, operator, slot, shape and dtype are; of several that are the
        same, as many as both have. A storage is in both where one of the tensors saved on it is.
Rule 2. Only what is counted in `saved_bytes` is compared: what is recomputed or moved away is not kept. So
        bytes of only_second - only_first + what those in both differ by = the difference in `saved_bytes`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from .errors import MemlabError
from .held import Held, held
from .trace import CATEGORIES, SavedTensor, Trace

if TYPE_CHECKING:
    import pandas as pd

Pair = tuple[Held, Held]


@dataclass(frozen=True, repr=False)
class Difference:
    """What the trace `second` has and `first` has not, and the reverse.

    only_first, only_second: storages held for backward in one of them alone, at its largest entry to backward
    both:                    those held in both, of the first and of the second
    """

    first: Trace
    second: Trace
    only_first: tuple[Held, ...] = field(default=())
    only_second: tuple[Held, ...] = field(default=())
    both: tuple[Pair, ...] = field(default=())

    @property
    def peak_bytes(self) -> int:
        """The second's peak less the first's."""
        return self.second.peak_bytes - self.first.peak_bytes

    @property
    def saved_bytes(self) -> int:
        """The second's bytes saved for backward less the first's."""
        return self.second.saved_bytes - self.first.saved_bytes

    def by_category(self) -> dict[str, tuple[int, int]]:
        """Bytes of each category at the first's peak and at the second's, in the order of `CATEGORIES`."""
        first, second = self.first.by_category(), self.second.by_category()
        present = [category for category in CATEGORIES if category in first or category in second]
        return {category: (first.get(category, 0), second.get(category, 0)) for category in present}

    def resized(self) -> tuple[Pair, ...]:
        """Of those in one alone, pairs of one module, operator and slot: saved in both, in another shape or dtype
        (micro-batches, lower precision)."""
        pairs, _, _ = _matched(self.only_first, self.only_second, lambda tensor: (tensor.module, tensor.slot))
        return pairs

    def explain(self) -> str:
        """Plain sentences: what the peak does and which categories make it, what is saved in one and not in the
        other."""
        from .views.difference import explain_difference

        return explain_difference(self)

    def to_frame(self, of: Literal["categories", "saved"] = "categories") -> pd.DataFrame:
        """A pandas frame in MiB: a row per category, or per storage held for backward with `of="saved"`."""
        from .views.difference import difference_frame

        return difference_frame(self, of)

    def plot(self, **options: Any) -> Any:
        """Both timelines to one scale, and what is saved in one and not in the other, as a matplotlib figure."""
        from .views.difference import plot_difference

        return plot_difference(self, **options)

    def __str__(self) -> str:
        from .views.difference import difference_text

        return difference_text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from .views.difference import difference_html

        return difference_html(self)


def contrast(first: Trace, second: Trace) -> Difference:
    """What `second` changes against `first`."""
    if not isinstance(second, Trace):
        raise MemlabError(f"diff() takes a Trace, not {type(second).__name__}: trace.diff(memlab.measure(step, other))")
    old, new = (tuple(item for item in held(trace) if item.counted) for trace in (first, second))
    both, only_first, only_second = _matched(old, new, _same)
    return Difference(first, second, only_first, only_second, both)


def _same(tensor: SavedTensor) -> Hashable:
    """Rule 1."""
    return tensor.module, tensor.operator, tensor.slot, tensor.shape, tensor.dtype


def _matched(
    first: Iterable[Held], second: Iterable[Held], key: Callable[[SavedTensor], Hashable]
) -> tuple[tuple[Pair, ...], tuple[Held, ...], tuple[Held, ...]]:
    """Storages paired by equal keys of tensors on them, in order, and those that are left on either side."""
    first, second = tuple(first), tuple(second)
    waiting: dict[Hashable, list[int]] = {}
    for number, item in enumerate(second):
        for found in dict.fromkeys(map(key, item.tensors)):
            waiting.setdefault(found, []).append(number)
    pairs, left, taken = [], [], set()
    for item in first:
        numbers = (number for tensor in item.tensors for number in waiting.get(key(tensor), ()))
        partner = next((number for number in numbers if number not in taken), None)
        if partner is None:
            left.append(item)
        else:
            taken.add(partner)
            pairs.append((item, second[partner]))
    return tuple(pairs), tuple(left), tuple(item for number, item in enumerate(second) if number not in taken)
