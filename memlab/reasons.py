"""Why a strategy could not run on a step, as a sentence that names the cause and what to do.

PyTorch's own messages tell what broke inside; `reason` adds what that means for the technique that was tried. What it
does not recognise keeps its type and its first line.
"""

from __future__ import annotations

from torch import nn

from .clock import clean_name, unwrapped
from .errors import MemlabError
from .step import TrainingStep
from .strategies import Checkpoint, MicroBatch, MixedPrecision, Strategy


def reason(error: Exception, step: TrainingStep, strategy: Strategy) -> str:
    """One or two sentences for a comparison's row."""
    if isinstance(error, MemlabError):
        return str(error)
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = f"{type(error).__name__}: {lines[0] if lines else '(no message)'}"
    kinds = {type(part) for part in strategy.parts}
    explained = None
    if Checkpoint in kinds:
        explained = _of_checkpoint(error, text, step, strategy)
    if explained is None and MixedPrecision in kinds and "not found in storage" in text:
        explained = (
            "selective checkpointing in the model cannot repeat autocast's casts: in the forward pass a weight's cast "
            "came from autocast's cache, in the recomputation it is made anew. Use torch.autocast(..., "
            "cache_enabled=False), or keep the casts out of what the policy saves"
        )
    if explained is None and MicroBatch in kinds and "more than 1 value per channel" in text:
        explained = (
            f"a micro-batch holds one sample, and {_named(step, nn.modules.batchnorm._BatchNorm)} needs more than "
            "one in training: choose a number or size that leaves no rest of one"
        )
    return said if explained is None else f"{explained} ({said})"


def _of_checkpoint(error: Exception, text: str, step: TrainingStep, strategy: Strategy) -> str | None:
    if type(error).__name__ == "CheckpointError":
        shapes = [line.strip() for line in text.splitlines() if "metadata:" in line][:2]
        return (
            "the recomputation of a checkpointed block did not repeat its forward pass: the block changes its "
            "arguments or its own state (a cache that grows), or takes decisions by chance or from outside. It cannot "
            f"be recomputed as it is{'; ' + ', '.join(shapes) if shapes else ''}"
        )
    if "modified by an inplace operation" in text:
        edits = _edits_in_place(step)
        who = f" (in place here: {', '.join(edits[:4])})" if edits else ""
        return (
            "a checkpointed block edits its own input in place, and that input is what checkpointing keeps for the "
            f"second run{who}: use inplace=False there, or checkpoint other blocks"
        )
    if "saved tensor hooks" in text or "saved_tensors_hooks" in text:
        return (
            "the model uses transforms of torch.func (grad, vjp, ...), which do not work inside a checkpointed region: "
            "checkpoint blocks that do not contain them"
        )
    return None


def _edits_in_place(step: TrainingStep) -> list[str]:
    return [
        f"{clean_name(name)} ({type(module).__name__})"
        for name, module in unwrapped(step.model).named_modules()
        if getattr(module, "inplace", False)
    ]


def _named(step: TrainingStep, kind: type[nn.Module]) -> str:
    for name, module in unwrapped(step.model).named_modules():
        if isinstance(module, kind) and module.training:
            return f"{clean_name(name) or 'the model'} ({type(module).__name__})"
    return kind.__name__
