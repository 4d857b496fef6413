"""Strategies from words, for the command line."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from ..errors import MemlabError
from .base import Baseline, Strategy
from .in_backward import OptimizerInBackward
from .micro_batch import MicroBatch
from .precision import LowPrecision, MixedPrecision
from .recompute import Checkpoint

_WORDS: dict[str, Callable[..., Strategy]] = {
    "baseline": Baseline,
    "checkpoint": Checkpoint,
    "micro-batch": MicroBatch,
    "bf16": functools.partial(MixedPrecision, "bf16"),
    "fp16": functools.partial(MixedPrecision, "fp16"),
    "pure-bf16": functools.partial(LowPrecision, "bf16"),
    "pure-fp16": functools.partial(LowPrecision, "fp16"),
    "optimizer-in-backward": OptimizerInBackward,
}
_HELP = (
    "baseline, checkpoint, checkpoint(blocks.*), checkpoint(segments=3), checkpoint(save=mm), micro-batch(4), "
    "micro-batch(size=8), bf16, fp16 (autocast), pure-bf16, pure-fp16, optimizer-in-backward; joined by +"
)


def parse(text: str) -> Strategy:
    """The strategy that words name: `"checkpoint + micro-batch(4) + bf16"`. The error for others lists the words."""
    total: Strategy = Baseline()
    for term in text.split("+"):
        match = re.fullmatch(r"\s*([\w-]+)\s*(?:\((.*)\))?\s*", term)
        if match is None or match[1].lower() not in _WORDS:
            raise MemlabError(f"{term.strip()!r} is no strategy; the words are: {_HELP}")
        word = match[1].lower()
        total += _built(word, match[2] or "")
    return total


def _built(word: str, arguments: str) -> Strategy:
    plain: list[str] = []
    named: dict[str, Any] = {}
    for argument in filter(None, (argument.strip() for argument in arguments.split(","))):
        name, equals, value = argument.rpartition("=")
        if equals:
            named[name.strip()] = int(value) if value.strip().isdigit() else value.strip()
        else:
            plain.append(argument)
    if word == "micro-batch" and len(plain) == 1 and plain[0].isdigit():
        named["count"] = int(plain.pop())
    try:
        return _WORDS[word](*([plain] if plain else []), **named)
    except TypeError:
        raise MemlabError(f"{word}({arguments}) cannot be read; the words are: {_HELP}") from None
