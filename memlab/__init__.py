"""memlab: see every byte of a training step, before and after each memory-saving technique, with proof that the
technique trains the same model.

>>> import torch, memlab
>>> step = memlab.TrainingStep(
...     torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 10)),
...     (torch.randn(32, 64), torch.arange(32) % 10),
...     torch.nn.CrossEntropyLoss(),
...     torch.optim.AdamW,
... )
>>> trace = memlab.measure(step)
>>> trace.peak.phase
'optimizer'
"""

from typing import Any

from .compare import Comparison, Row, compare
from .contrast import Difference
from .errors import MemlabError
from .files.store import load
from .limit import OutOfMemoryError, limit
from .measure import measure
from .record import record
from .simulate import simulate
from .step import TrainingStep
from .strategies import Baseline, Checkpoint, LowPrecision, MicroBatch, MixedPrecision, OptimizerInBackward
from .trace import Allocation, Growth, SavedTensor, Trace

__version__ = "0.1.0"

__all__ = [
    "Allocation",
    "Baseline",
    "Checkpoint",
    "Comparison",
    "Difference",
    "Growth",
    "LowPrecision",
    "MemlabError",
    "MicroBatch",
    "MixedPrecision",
    "OptimizerInBackward",
    "OutOfMemoryError",
    "Row",
    "SavedTensor",
    "Trace",
    "TrainingStep",
    "compare",
    "explore",
    "explore_checkpointing",
    "limit",
    "load",
    "measure",
    "record",
    "simulate",
]


def __getattr__(name: str) -> Any:
    """The explorers are looked up when they are asked for: they need ipywidgets and matplotlib."""
    if name == "explore":
        from .notebook.explorer import explore

        return explore
    if name == "explore_checkpointing":
        from .notebook.schedule import explore_checkpointing

        return explore_checkpointing
    raise AttributeError(f"module 'memlab' has no attribute {name!r}")


def load_ipython_extension(shell):  # type: ignore[no-untyped-def]
    """`%load_ext memlab`: from here on, a cell that begins with `%%memlab` is recorded."""
    from .notebook.magic import MemlabMagics

    shell.register_magics(MemlabMagics)
