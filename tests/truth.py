"""Independent truths that tests compare with: nothing here uses memlab's instruments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks


def allocator_peak(run: Callable[[], Any]) -> int:
    """Peak of the CPU allocator above its level at the start, by a plain profiler run."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        run()
    running = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            running += event.nbytes()
            peak = max(peak, running)
    return peak


def distinct_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind some tensors."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]


def resident_bytes(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Iterable[torch.Tensor]) -> int:
    return distinct_bytes([*model.parameters(), *model.buffers(), *batch, *state_tensors(optimizer)])


HOOK_REGISTRIES: tuple[Any, ...] = (
    module_hooks._global_forward_pre_hooks,
    module_hooks._global_forward_hooks,
    module_hooks._global_forward_hooks_always_called,
    module_hooks._global_forward_hooks_with_kwargs,
    module_hooks._global_backward_hooks,
    module_hooks._global_backward_pre_hooks,
    optimizer_hooks._global_optimizer_pre_hooks,
    optimizer_hooks._global_optimizer_post_hooks,
)
