"""The techniques, as values that add up.

    strategy = Checkpoint("blocks.*") + MicroBatch(count=4) + MixedPrecision("bf16")
    with strategy.applied(step) as runner:
        runner.run()

A strategy says how a step runs. `applied` changes the running step accordingly and undoes everything at its end, also
after an exception; the user's source is never edited. `a + b` is `b + a`; `Baseline()` is the neutral element. Each
part installs itself on a `Runner` and knows nothing of the others, except which it clashes with.
"""

from .base import Baseline, Framework, Strategy, Sum
from .in_backward import OptimizerInBackward
from .micro_batch import MicroBatch
from .precision import LowPrecision, MixedPrecision
from .recompute import Checkpoint
from .runner import Runner
from .words import parse

__all__ = [
    "Baseline",
    "Checkpoint",
    "Framework",
    "LowPrecision",
    "MicroBatch",
    "MixedPrecision",
    "OptimizerInBackward",
    "Runner",
    "Strategy",
    "Sum",
    "parse",
]
