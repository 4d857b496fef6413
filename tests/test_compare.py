"""`compare`: one start for all, rows that fail alone, labels, times and the progress bar."""

import io
import itertools
import sys
import types

import pytest
import torch
from torch import nn

import memlab
from memlab.progress import progress
from memlab.strategies import Runner

SAMPLES = 8


def _step(loss_fn=None, **options):
    blocks = (nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
    batch = torch.randn(SAMPLES, 8), torch.randn(SAMPLES, 1)
    model = nn.Sequential(*blocks, nn.Linear(8, 1))
    return memlab.TrainingStep(model, batch, loss_fn or nn.MSELoss(), torch.optim.AdamW, **options)


def _figures(row):
    """All of a row that does not vary from run to run."""
    return (
        row.label, row.flops_ratio, row.equivalent, row.proof, row.loss_difference, row.gradient_difference,
        row.gradient_error, row.buffer_differences, row.notes, row.trace.allocations, row.trace.saved,
    )  # fmt: skip


def test_the_order_of_strategies_changes_no_figure():
    step = _step()
    strategies = [memlab.LowPrecision("bf16"), memlab.OptimizerInBackward(), memlab.MicroBatch(count=3)]
    there = memlab.compare(step, strategies, repeats=0).rows
    back = memlab.compare(step, strategies[::-1], repeats=0).rows
    assert [_figures(row) for row in there] == [_figures(row) for row in (back[0], *back[:0:-1])]


def test_rows_hold_what_measuring_finds():
    step = _step()
    plain, row = memlab.compare(step, memlab.Checkpoint(), repeats=0).rows
    assert row.trace.allocations == memlab.measure(step, memlab.Checkpoint()).allocations
    assert (row.peak_bytes, row.tensor_peak_bytes, row.saved_bytes) == (
        row.trace.peak_bytes, row.trace.tensor_peak_bytes, row.trace.saved_bytes
    )  # fmt: skip
    assert plain.strategy == memlab.Baseline()
    assert plain.time_ratio is row.time_ratio is None  # repeats=0
    assert (plain.equivalent, plain.gradient_difference, plain.flops_ratio) == (True, 0.0, 1.0)


def test_the_plain_step_is_always_first_and_once():
    labels = ["baseline", "checkpoint", "2 micro-batches of 4"]
    strategies = [memlab.Checkpoint(), memlab.Baseline(), memlab.MicroBatch(count=2), memlab.Baseline()]
    assert [row.label for row in memlab.compare(_step(), iter(strategies), repeats=0).rows] == labels
    assert [row.label for row in memlab.compare(_step(), [], repeats=0).rows] == labels[:1]


def test_labels_of_ones_own_and_labels_that_clash():
    named = {"half": memlab.MicroBatch(count=2), "as it is": memlab.Baseline(), "baseline": memlab.MicroBatch(size=4)}
    rows = memlab.compare(_step(), named, repeats=0).rows
    assert [row.label for row in rows] == ["as it is", "half", "baseline"]
    twice = [memlab.MicroBatch(count=2), memlab.MicroBatch(size=4), memlab.MicroBatch(count=2)]
    rows = memlab.compare(_step(), twice, repeats=0).rows
    assert len({row.label for row in rows}) == len(rows)
    assert [row.strategy for row in rows[1:3]] == twice[:2]
    assert rows[2].label == "2 micro-batches of 4 (MicroBatch(size=4))"


def test_a_strategy_that_fails_is_a_row_that_says_why():
    def small(model, batch):
        if len(batch[0]) < SAMPLES:
            raise ValueError("too small\nfor anything")
        return model(batch[0]).square().mean()

    strategies = [
        memlab.MicroBatch(count=99),
        memlab.MicroBatch(count=2),
        memlab.Checkpoint("blocks.*"),
        memlab.Checkpoint(),
    ]
    rows = memlab.compare(_step(small), strategies, repeats=1).rows
    assert [row.error is None for row in rows] == [True, False, False, False, True]
    assert rows[1].error == "99 micro-batches asked, but the batch holds 8 sample(s): give 1 to 8"
    assert rows[2].error == "ValueError: too small"
    assert rows[3].error.startswith("'blocks.*' matches no module of Sequential; near it are")
    for row in rows[1:4]:
        assert (row.trace, row.peak_bytes, row.time_ratio, row.equivalent, row.proof) == (
            None,
            None,
            None,
            None,
            "none",
        )
    assert rows[4].equivalent
    assert rows[4].time_ratio > 0


def test_a_plain_step_that_fails_raises():
    def fails(model, batch):
        raise ZeroDivisionError("in the loss")

    with pytest.raises(ZeroDivisionError, match="in the loss"):
        memlab.compare(_step(fails), [memlab.Checkpoint()])


def test_an_interrupt_ends_the_comparison():
    calls = []

    def interrupted(model, batch):
        calls.append(1)
        if len(batch[0]) < SAMPLES:
            raise KeyboardInterrupt
        return model(batch[0]).square().mean()

    with pytest.raises(KeyboardInterrupt):
        memlab.compare(_step(interrupted), [memlab.MicroBatch(count=2)])


def test_times_are_ratios_of_medians_taken_in_turns(monkeypatch):
    """On a clock that only a step moves: a plain one by 2, a checkpointed one by 3, each third of them by 100."""
    now, ran, run = [0], [], Runner.run
    seconds = {"baseline": itertools.cycle((2, 2, 100)), "checkpoint": itertools.cycle((100, 3, 3))}

    def timed(self, **options):
        run(self, **options)
        ran.append("checkpoint" if "forward" in vars(self.step.model[0]) else "baseline")
        now[0] += next(seconds[ran[-1]])

    monkeypatch.setattr(Runner, "run", timed)
    monkeypatch.setattr(sys.modules["memlab.compare"], "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    rows = memlab.compare(_step(), [memlab.Checkpoint()], repeats=3).rows
    assert ran[-6:] == ["baseline", "checkpoint"] * 3
    assert [row.time_ratio for row in rows] == [1.0, 1.5]


def test_what_cannot_be_compared():
    step = _step()
    for call, message in (
        (lambda: memlab.compare(step.model, []), r"compare\(\) takes a TrainingStep, not Sequential"),
        (
            lambda: memlab.compare(step, ["checkpoint"]),
            r"'checkpoint' is no strategy: give values such as memlab\.Check",
        ),
        (lambda: memlab.compare(step, "checkpoint"), "'c' is no strategy"),
        (lambda: memlab.compare(step, [memlab.Checkpoint]), "is no strategy: give values"),
        (lambda: memlab.compare(step, {"a": None}), "None is no strategy"),
        (lambda: memlab.compare(step, None), "strategies are None: give them in a list or a dict"),
        (lambda: memlab.compare(step, [], repeats=-1), "repeats is -1: give how often"),
        (lambda: memlab.compare(step, [], repeats=0.5), "repeats is 0.5: give how often"),
    ):
        with pytest.raises(memlab.MemlabError, match=message):
            call()


# -- the progress bar --------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def __init__(self, watched):
        super().__init__()
        self.watched = watched

    def isatty(self):
        return self.watched


def _shown(monkeypatch, watched):
    stderr = Terminal(watched)
    monkeypatch.setattr(sys, "stderr", stderr)
    with progress(2) as tell:
        tell("one")
        tell("two")
    return stderr.getvalue()


@pytest.fixture
def no_kernel(monkeypatch):
    for name in ("ipykernel", "google.colab"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)


def test_nothing_is_shown_where_nobody_watches(no_kernel, monkeypatch):
    assert _shown(monkeypatch, watched=False) == ""


def test_a_bar_in_a_terminal_is_gone_afterwards(no_kernel, monkeypatch):
    shown = _shown(monkeypatch, watched=True)
    assert "one" in shown
    assert "two" in shown
    assert shown.rpartition("\r")[0].rpartition("\r")[2].strip() == ""  # the line is blank in the end
    assert "\n" not in shown


def test_a_notebook_that_is_run_to_be_stored_keeps_no_bar(no_kernel, monkeypatch):
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    assert _shown(monkeypatch, watched=True) == ""


def test_a_bar_goes_also_after_an_error(no_kernel, monkeypatch):
    stderr = Terminal(watched=True)
    monkeypatch.setattr(sys, "stderr", stderr)
    with pytest.raises(KeyError), progress(2) as tell:
        tell(str({}["one"]))
    assert stderr.getvalue().rpartition("\r")[0].rpartition("\r")[2].strip() == ""


def test_without_tqdm_it_works_in_silence(no_kernel, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert _shown(monkeypatch, watched=True) == ""
