"""Micro-batches, also called gradient accumulation: one batch's gradient, a part of the batch at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..errors import MemlabError
from ..step import TrainingStep
from .base import Strategy
from .runner import Runner


@dataclass(frozen=True, repr=False, kw_only=True)
class MicroBatch(Strategy):
    """Gradient accumulation: the batch in `count` micro-batches, or in micro-batches of `size` samples, forward and
    backward one after another, then one optimizer step. Shares by `TrainingStep`'s weight make the sum of losses, and
    so the gradient, the full batch's. `size` above the batch is one micro-batch; `count` above it is an error."""

    rank: ClassVar[int] = 2
    count: int | None = None
    size: int | None = None

    def __post_init__(self) -> None:
        if (self.count is None) == (self.size is None):
            raise MemlabError("give MicroBatch either count= or size=, e.g. MicroBatch(count=4)")
        wanted = self.size if self.count is None else self.count
        if not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 1:
            raise MemlabError(f"{self!r}: give a whole number from 1")

    def label(self, step: TrainingStep | None = None) -> str:
        sizes: list[int] = []
        if step is not None and step.split is None:
            with contextlib.suppress(MemlabError):  # a step that cannot be split says so when it is run
                sizes = step.micro_batch_sizes(self.count, self.size)
        count = len(sizes) or self.count
        number = "micro-batches" if count is None else f"{count} micro-batch{'es' * (count != 1)}"
        each = _listed(sizes) if sizes else self.size
        return f"{number} of {each}" if each else number

    @contextlib.contextmanager
    def install(self, runner: Runner) -> Iterator[None]:
        step = runner.step
        parts = runner.micro_batches = step.micro_batches(self.count, self.size)
        if self.size is not None and len(parts) == 1 and parts[0].size is not None and self.size > parts[0].size:
            runner.notes.append(
                f"micro-batches of {self.size} asked, and the batch holds {parts[0].size}: one micro-batch"
            )
        sizes, shares = [part.size for part in parts], [part.share for part in parts]
        if len(set(sizes)) > 1:
            runner.notes.append(f"the batch does not divide evenly: micro-batches of {_listed(sizes)}")
        if step.weight is not None and max(shares) - min(shares) > 1e-9:
            runner.notes.append(f"micro-batches hold {_listed([f'{share:.3g}' for share in shares])} of the loss terms")
        low = {p.dtype for _, p in step.named_parameters() if p.requires_grad and p.dtype.itemsize < 4}
        if low and len(parts) > 1:
            kinds = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in low))
            runner.notes.append(f"gradients are summed up in {kinds}, which rounds at each addition: see their error")
        for number, share in enumerate(shares, start=1):
            if share == 0:
                runner.notes.append(f"micro-batch {number} holds no loss terms (weight 0) and is left out")
        yield


def _listed(values: Sequence[object]) -> str:
    """8 for 8, 8, 8; "4, 4 and 2"; a long list is cut short."""
    words = [str(value) for value in values]
    if len(set(words)) == 1:
        return words[0]
    if len(words) > 8:
        words = [*words[:6], "...", words[-1]]
    return f"{', '.join(words[:-1])} and {words[-1]}"
