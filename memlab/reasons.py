"""Why a strategy could not run on a step, as a sentence that names the cause and what to do.

PyTorch's own messages tell what broke inside; `reason` adds what that means for the technique that was tried. What it
does not recognise keeps its type and its first line.
"""

from __future__ import annotations

import re

from torch import nn

from .clock import clean_name, unwrapped
from .errors import MemlabError
from .step import TrainingStep
from .strategies import Checkpoint, LowPrecision, MicroBatch, MixedPrecision, OptimizerInBackward, Strategy


def reason(error: Exception, step: TrainingStep, strategy: Strategy) -> str:
    """One or two sentences for a comparison's row."""
    if isinstance(error, MemlabError):
        return str(error)
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = f"{type(error).__name__}: {lines[0] if lines else '(no message)'}"
    kinds = {type(part) for part in strategy.parts}
    explained = (
        (Checkpoint in kinds and _of_checkpoint(error, text, step))
        or (kinds & {MixedPrecision, LowPrecision} and _of_precision(text, step, strategy))
        or (MicroBatch in kinds and _of_micro_batches(text, step))
        or (OptimizerInBackward in kinds and _of_early_updates(text))
    )
    return f"{explained} ({said})" if explained else said


def _of_precision(text: str, step: TrainingStep, strategy: Strategy) -> str | None:
    (part,) = (part for part in strategy.parts if isinstance(part, MixedPrecision | LowPrecision))
    if "not found in storage" in text:
        return (
            "selective checkpointing cannot repeat autocast's casts: in the forward pass a weight's cast came from "
            "autocast's cache, in the recomputation it is made anew. Use torch.autocast(..., cache_enabled=False), or "
            "keep the casts out of what the policy saves"
        )
    if "unscale FP16 gradients" in text:
        return (
            "loss scaling needs float32 parameters, and the model's are in float16 already: build it in float32, or "
            "take MixedPrecision('bf16')"
        )
    if isinstance(part, LowPrecision) and re.search(r"dtype|BFloat16|Half|ScalarType", text):
        tensors = [*unwrapped(step.model).named_parameters(), *unwrapped(step.model).named_buffers()]
        complexes = [clean_name(name) for name, tensor in tensors if tensor.is_complex()]
        stay = f"; complex tensors stay complex: {', '.join(complexes[:4])}" if complexes else ""
        return (
            f"something in the model does not run in {part.dtype}, or makes or holds tensors of its own in another "
            f"type (from numpy, or an attribute that is no buffer){stay}. MixedPrecision({part.dtype!r}) leaves such "
            "operators and tensors as they are"
        )
    return None


def _of_micro_batches(text: str, step: TrainingStep) -> str | None:
    if "more than 1 value per channel" in text:
        return (
            f"a micro-batch holds one sample, and {_named(step, nn.modules.batchnorm._BatchNorm)} needs more than "
            "one in training: choose a number or size that leaves no rest of one"
        )
    return None


def _of_early_updates(text: str) -> str | None:
    if "modified by an inplace operation" in text:
        return (
            "a parameter was stepped as soon as its gradient was there, and backward still needed its old value: the "
            "loss uses it again without a gradient (.detach(), .data), or calls backward itself"
        )
    return None


def _of_checkpoint(error: Exception, text: str, step: TrainingStep) -> str | None:
    if type(error).__name__ == "CheckpointError":
        shapes = [line.strip() for line in text.splitlines() if "metadata:" in line][:2]
        return (
            "the recomputation of a checkpointed block did not repeat its forward pass: the block changes its "
            "arguments or its own state (a cache that grows), or takes decisions by chance or from outside. It cannot "
            f"be recomputed as it is{_of_cache(step)}{'; ' + ', '.join(shapes) if shapes else ''}"
        )
    if "modified by an inplace operation" in text:
        edits = _edits_in_place(step)
        who = f" (in place here: {', '.join(edits[:4])})" if edits else ""
        return (
            "the input of a checkpointed block is edited in place after it ran, and that input is what checkpointing "
            f"keeps for the second run{who}: write x = x + y for x += y there, or checkpoint other blocks"
        )
    if "saved tensor hooks" in text or "saved_tensors_hooks" in text:
        return (
            "the model uses transforms of torch.func (grad, vjp, ...), which do not work inside a checkpointed region: "
            "checkpoint blocks that do not contain them"
        )
    return None


def _of_cache(step: TrainingStep) -> str:
    """Hugging Face's models keep keys and values for generation unless told otherwise."""
    keeps = any(getattr(getattr(module, "config", None), "use_cache", False) is True for module in step.model.modules())
    return " (the model caches keys and values: build it with use_cache=False in its configuration)" if keeps else ""


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
