"""Values for the tests of views: traces made by hand, small ones that were measured, and comparisons of them."""

from functools import cache

import memlab
from memlab import Baseline, Checkpoint, Comparison, MicroBatch, MixedPrecision, OptimizerInBackward, Row, Trace, zoo
from memlab.trace import Allocation, Operator, Place, SavedTensor
from memlab.units import MiB

EVIL = '<b onclick="x()">&amp; $\\frac{'  # HTML to a page, and broken mathematics to a figure


def trace(*lives, strategy="by hand", saved=0, **options):
    """A trace of an operator in each of forward, backward and optimizer (ticks 1, 2 and 3).

    A life is (MiB, category, first tick, last tick), and belongs to the phase of its first tick.
    """
    phases = ("start", "forward", "backward", "optimizer")
    allocations = tuple(
        Allocation(int(size * MiB), category, Place(phases[first]), first, last + 1, first - 1, storage=number)
        for number, (size, category, first, last) in enumerate(lives)
    )
    operators = tuple(Operator(Place(phase), tick, tick / 10) for tick, phase in enumerate(phases[1:], 2))
    kept = SavedTensor("", "AddBackward0", "x", (1,), "float32", 4, 0, int(saved * MiB), "activations")
    return Trace(allocations, operators, (kept,) if saved else (), strategy=strategy, **options)


IN_BACKWARD = trace((10, "parameters", 0, 3), (50, "activations", 1, 2), (5, "gradients", 2, 3), saved=50)
IN_OPTIMIZER = trace((10, "parameters", 0, 3), (2, "activations", 1, 1), (20, "temporaries", 3, 3), saved=2)
EMPTY = Trace((), (), ())


@cache
def step():
    return zoo.gpt_step(batch=4, context=32, width=32, depth=2)


@cache
def measured(strategy=Baseline()):  # noqa: B008 - a frozen value
    return memlab.measure(step(), strategy)


def every_trace():
    checkpoint, micro_batches = Checkpoint("blocks.*"), MicroBatch(count=2)
    strategies = (checkpoint, micro_batches, checkpoint + micro_batches + MixedPrecision("bf16"), OptimizerInBackward())
    return [IN_BACKWARD, IN_OPTIMIZER, EMPTY, measured(), *map(measured, strategies)]


def row(strategy, its=None, label=None, **options):
    proven = {"equivalent": True, "proof": "float64", "gradient_difference": 0.0, "gradient_error": 1e-7}
    if its is None:
        proven = {}
    return Row(strategy, label or strategy.label(), its, **(proven | options))


def comparison(*rows):
    """Rows after that of a plain step that peaks at 65 MiB in backward."""
    return Comparison((row(Baseline(), IN_BACKWARD, time_ratio=1.0, flops_ratio=1.0), *rows))


FAILED = row(MicroBatch(count=999), error="999 micro-batches asked, but the batch holds 32")
EVIL_ROWS = comparison(
    row(Checkpoint(), IN_OPTIMIZER, label=EVIL, time_ratio=1.25, flops_ratio=1.3, notes=(EVIL,), equivalent=False),
    row(MicroBatch(count=2), label=EVIL + "2", error=EVIL),
)
