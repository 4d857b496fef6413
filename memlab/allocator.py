"""The truth: what the device's allocator handed out, byte by byte, in order.

With a `Listener` around some code one gets the allocator's own events (CPU and CUDA alike: both report to
PyTorch's profiler), with *markers* among them that say where in the program they fell.

Rule 1. Only memory events and our markers are recorded: the profiler is restricted to user scopes, which no operator
        belongs to. That makes it about five times cheaper than a full profile.
Rule 2. Releases of blocks older than the listener are not reported (the profiler drops them).
Rule 3. Two profilers cannot run at once; the second would silently steal the first one's events. We refuse.
"""

from __future__ import annotations

import functools
import operator
import os
import sys
from typing import Any, NamedTuple

import torch

from .errors import MemlabError

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler's chatter on stderr; read at its first start

_MARKER, _MEMORY = "memlab.marker", "[memory]"
autograd: Any = torch.autograd  # its profiler is private, and without types
_begin, _end = autograd._record_function_with_args_enter, autograd._record_function_with_args_exit


class Event(NamedTuple):
    """One thing the allocator did: `nbytes` > 0 an allocation at address `ptr`, < 0 a release, 0 a marker."""

    nbytes: int
    ptr: int


_MARK = Event(0, 0)


def mark() -> None:
    """Leave a marker among the allocator's events; the k-th call is the k-th marker."""
    _end(_begin(_MARKER))


class Listener:
    """Listens to one device's allocator between `start` and `stop`."""

    def __init__(self, device: torch.device) -> None:
        self._device_type = "cuda" if device.type == "cuda" else "cpu"

    def start(self) -> None:
        refuse_running_profiler()
        _quiet_first_release()
        self._enable()

    def _enable(self) -> None:
        from torch._C import _profiler

        config = _profiler.ProfilerConfig(
            _profiler.ProfilerState.KINETO,
            False,  # record_shapes
            True,  # profile_memory
            False,  # with_stack
            False,  # with_flops
            False,  # with_modules
            _profiler._ExperimentalConfig(),
        )
        activities = {autograd.ProfilerActivity.CPU}
        autograd._prepare_profiler(config, activities)
        autograd._enable_profiler(config, activities, {_profiler.RecordScope.USER_SCOPE})

    def stop(self) -> list[Event]:
        """The events in the order in which they happened, markers included."""
        found = []
        pending = list(autograd._disable_profiler().experimental_event_tree())
        pending.reverse()
        while pending:  # depth first, in order
            node = pending.pop()
            name = node.name
            if name == _MEMORY:
                details = node.extra_fields
                if details.device.type == self._device_type and details.alloc_size:
                    found.append((node.start_time_ns, Event(details.alloc_size, details.ptr)))
            elif name == _MARKER:
                found.append((node.start_time_ns, _MARK))
            else:
                pending.extend(reversed(node.children))
        # Each thread's events come in order; backward on CUDA has a thread of its own, so threads merge by time. The
        # sort is stable: within a thread, equal times change nothing.
        found.sort(key=operator.itemgetter(0))
        return [event for _, event in found]


@functools.cache
def _quiet_first_release() -> None:
    """The allocator prints a warning at the first release (and each thousandth) of a block older than the profiler.
    Have that first one here, once, with the process's stderr shut."""
    older = torch.empty(1)
    listener = Listener(older.device)
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        try:
            listener._enable()
            del older
            listener.stop()
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def refuse_running_profiler() -> None:
    """Raise where another profiler runs: ours would take its events away."""
    if torch._C._autograd._profiler_enabled():
        raise MemlabError(
            "a profiler is already running here; memlab listens to the allocator through PyTorch's profiler, and two "
            "cannot run at once. Leave the profiler's block first, or pass allocator=False."
        )
