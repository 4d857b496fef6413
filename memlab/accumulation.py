"""Where autograd's engine would have added two gradients in place, had nobody watched.

A tensor that is used several times gets several gradients, which the engine adds up. Alone, it adds in place when it
holds the last reference to the first; under any dispatch mode it never does, so that one gradient more exists for a
moment. `would_be_in_place` recognises such an addition, and the trace then lets the first gradient's memory live on as
the sum's.

Only bookkeeping is changed, never what runs: an addition inside a derivative formula cannot be told from the engine's
with certainty, and to write into its operand could make gradients wrong.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from .modes import LightMode

_ADD = torch.ops.aten.add.Tensor
_storage_uses: Any = getattr(torch._C, "_storage_Use_Count", None)


def would_be_in_place(tensor: torch.Tensor) -> bool:
    """Whether `tensor`, the first operand of an addition that runs now, is a gradient that the engine alone holds."""
    return (
        torch._C._current_graph_task_id() != -1
        and not torch.is_grad_enabled()
        and _uses(tensor) == uses_by_engine()
        and torch._debug_has_internal_overlap(tensor) == 0  # dense
    )


def _uses(tensor: torch.Tensor) -> tuple[int, int] | None:
    """How many hold the tensor, and its storage, or None where this version of PyTorch does not say."""
    count: Any = getattr(tensor, "_use_count", None)
    if count is None or _storage_uses is None:
        return None
    return int(count()), int(_storage_uses(tensor.untyped_storage()._cdata))


@functools.cache
def uses_by_engine() -> tuple[int, int] | None:
    """The counts that a mode sees for a gradient that the engine alone holds: looked up once, on the smallest graph
    that has one. To be called before anything is recorded."""

    class Look(LightMode):
        counts: tuple[int, int] | None = None

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is _ADD:
                self.counts = _uses(args[0])
            return func(*args, **(kwargs or {}))

    with torch.enable_grad():
        leaf = torch.ones(2, requires_grad=True)
        used_twice = leaf * 2
        total = (used_twice * 3).sum() + (used_twice * 4).sum()
    with Look() as look:
        total.backward()
    counts: tuple[int, int] | None = look.counts
    return counts
