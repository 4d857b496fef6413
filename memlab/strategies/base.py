"""What a strategy is, and how strategies add up."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from ..errors import MemlabError
from ..step import TrainingStep
from .runner import Runner

Framework = Literal["pytorch", "transformers", "lightning"]


class Strategy:
    """How a training step runs: one technique, or a sum of them."""

    rank: ClassVar[int] = 0  # its place in a sum

    @property
    def parts(self) -> tuple[Strategy, ...]:
        """The techniques in it, in canonical order; none for the plain step."""
        return (self,)

    def label(self, step: TrainingStep | None = None) -> str:
        """A few words for a table's row; with the step, real sizes: "4 micro-batches of 8"."""
        raise NotImplementedError

    def install(self, runner: Runner) -> contextlib.AbstractContextManager[None]:
        """Change how `runner` runs its step, and undo that when the context ends. Raises MemlabError for a step that
        the technique cannot run."""
        raise NotImplementedError

    def clash(self, other: Strategy) -> str | None:
        """Why this technique cannot go together with the other, and what to do; None where it can, or leaves the answer
        to the other."""
        return None

    @contextlib.contextmanager
    def applied(self, step: TrainingStep) -> Iterator[Runner]:
        """Yields a `Runner`, each call of whose `run()` is one training step run in this way."""
        step.check()
        runner = Runner(step, str(self))
        with contextlib.ExitStack() as undo:
            # Last to first: precision changes before the batch is cut, so that micro-batches are in it too.
            for part in reversed(self.parts):
                undo.enter_context(part.install(runner))
            try:
                yield runner
            finally:
                runner.close()

    def to_code(self, framework: Framework = "pytorch") -> str:
        """What to write in one's own script to the same effect."""
        from ..code import to_code

        return to_code(self, framework)

    def __add__(self, other: Strategy) -> Strategy:
        if not isinstance(other, Strategy):
            return NotImplemented
        parts = sorted(self.parts + other.parts, key=lambda part: part.rank)
        for index, part in enumerate(parts):
            for later in parts[index + 1 :]:
                twice = "that is one technique twice: keep one" if part.rank == later.rank else None
                if reason := twice or part.clash(later) or later.clash(part):
                    raise MemlabError(f"{part!r} + {later!r} cannot be combined: {reason}")
        if len(parts) < 2:
            return parts[0] if parts else Baseline()
        return Sum(tuple(parts))

    def __str__(self) -> str:
        return self.label()

    def __repr__(self) -> str:
        """Can be evaluated, where functions are in scope; arguments at their default are left out."""
        shown = []
        for item in dataclasses.fields(self):  # type: ignore[arg-type]  # every technique is a dataclass
            value = getattr(self, item.name)
            if value != item.default:
                text = getattr(value, "__name__", None) or repr(value)  # a function by its name, not its address
                shown.append(f"{item.name}={text}" if item.kw_only else text)
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, repr=False)
class Sum(Strategy):
    """Several techniques at once; made by `+`."""

    techniques: tuple[Strategy, ...]

    @property
    def parts(self) -> tuple[Strategy, ...]:
        return self.techniques

    def label(self, step: TrainingStep | None = None) -> str:
        return " + ".join(part.label(step) for part in self.techniques)

    def __repr__(self) -> str:
        return " + ".join(repr(part) for part in self.techniques)


@dataclass(frozen=True, repr=False)
class Baseline(Strategy):
    """The plain step."""

    @property
    def parts(self) -> tuple[Strategy, ...]:
        return ()

    def label(self, step: TrainingStep | None = None) -> str:
        return "baseline"
