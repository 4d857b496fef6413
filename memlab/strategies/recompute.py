"""Activation checkpointing: keep a block's inputs, and run it again when backward gets there."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ..errors import MemlabError
from ..step import TrainingStep
from . import regions
from .base import Strategy
from .runner import Runner


@dataclass(frozen=True, repr=False)
class Checkpoint(Strategy):
    """*Activation* checkpointing, also called gradient checkpointing; it has nothing to do with saving files. Of each
    matched module only the inputs are kept for backward, and its forward runs again when backward gets there.

    - modules: which, by one name or several. `*` stays within one name, `**` crosses dots: `"blocks.*"`,
      `("encoder.*", "decoder.*")`; the model's class name is the whole model. "auto": the outermost repeated children
      of one class in a ModuleList or Sequential. To match nothing, or a module within another, is an error.
    - segments: run the matched children of one plain nn.Sequential (auto where nothing repeats: the longest) as so
      many regions of near-equal length. *All* are checkpointed, unlike in
      `torch.utils.checkpoint.checkpoint_sequential`, which leaves the last one out.
    - save: operators whose outputs are kept all the same (selective activation checkpointing): names such as "mm" or
      "aten.mm.default", `torch.ops` operators, or a predicate of the operator.

    Always non-reentrant; torch's random state is the first run's in the second.
    """

    rank: ClassVar[int] = 1
    modules: str | Sequence[str] = regions.AUTO
    segments: int | None = field(default=None, kw_only=True)
    save: Any = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        names = (self.modules,) if isinstance(self.modules, str) else tuple(self.modules)
        if not names or not all(isinstance(name, str) for name in names):
            raise MemlabError(f"Checkpoint modules are {self.modules!r}: give names or patterns, e.g. 'blocks.*'")
        object.__setattr__(self, "modules", names[0] if len(names) == 1 else names)
        object.__setattr__(self, "save", _operators(self.save))

    def label(self, step: TrainingStep | None = None) -> str:
        words = ["checkpoint" if self.save is None else "selective checkpoint"]
        if self.modules != regions.AUTO:
            words.append(self.modules if isinstance(self.modules, str) else ", ".join(self.modules))
        if self.segments is not None:
            words.append(f"in {self.segments} segment{'s' * (self.segments != 1)}")
        return " ".join(words)

    @contextlib.contextmanager
    def install(self, runner: Runner) -> Iterator[None]:
        model, options, called = runner.step.model, _selective(self.save), set[str]()
        forwards: dict[str, tuple[nn.Module, regions.Forward]]
        if self.segments is not None:
            name, container, groups = regions.segments(model, self.modules, self.segments)
            forwards = {name: (container, regions.checkpointed_segments(container, name, groups, options, called.add))}
        else:
            forwards = {
                name: (module, regions.checkpointed(module, name, options, called.add))
                for name, module in regions.chosen(model, self.modules).items()
            }
        runner.afterwards.append(
            lambda: [
                f"Checkpoint matched {name}, but the forward pass never called it"
                for name in forwards
                if name not in called
            ]
        )
        with contextlib.ExitStack() as undo:
            for module, forward in forwards.values():
                undo.enter_context(regions.patched(module, forward))
            yield


def _operators(save: Any) -> Any:
    """`save` as a tuple of names (comparable, printable), or the predicate."""
    operators = torch._ops.OpOverload | torch._ops.OpOverloadPacket
    if save is None or (callable(save) and not isinstance(save, operators)):
        return save
    names = []
    for entry in [save] if isinstance(save, str | operators) else save:
        name = str(entry) if "." in str(entry) else f"aten.{entry}"
        try:
            functools.reduce(getattr, name.split("."), torch.ops)
        except AttributeError:
            raise MemlabError(f"save={entry!r}: torch has no operator {name}; e.g. save=['mm', 'addmm']") from None
        names.append(name)
    if not names:
        raise MemlabError("save=[] keeps nothing: leave it out for plain checkpointing")
    return tuple(names)


def _selective(save: Any) -> dict[str, Any]:
    """The arguments of torch's checkpoint for selective checkpointing."""
    if save is None:
        return {}

    def keeps(operator: Any) -> bool:
        if callable(save):
            return bool(save(operator))
        return str(operator) in save or str(getattr(operator, "overloadpacket", "")) in save

    def policy(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if keeps(operator) else CheckpointPolicy.PREFER_RECOMPUTE

    return {"context_fn": functools.partial(create_selective_checkpoint_contexts, policy)}
