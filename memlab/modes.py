"""The base of our dispatch modes: cheap, and harmless to compiled code; and what instruments are not to see."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.utils._python_dispatch import TorchDispatchMode


class LightMode(TorchDispatchMode):
    """A dispatch mode under which compiled modules stay compiled (from PyTorch 2.10 on)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else every operator passes through a wrapper that costs as much as all of our own work

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


_level = 0


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Memlab's own work (back-ups, proofs, simulations): instruments that were on before do not see it."""
    global _level
    _level += 1
    try:
        yield
    finally:
        _level -= 1


def level() -> int:
    """How many blocks of memlab's own work are open: an instrument sees what happens at the level it was made at."""
    return _level
