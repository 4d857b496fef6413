"""What cannot be measured or compared says what, where, with which values, and what to do: at the public edge.

(Mistakes in building a step, a strategy or a sum of them are in `test_step.py` and `test_strategies.py`; those of the
command line in `test_main.py`.)
"""

import contextlib

import pytest
import torch
from torch import nn

import memlab

X, Y = torch.randn(6, 8), torch.randn(6, 1)


def _model():
    return nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 1))


def _step(loss_fn=None, model=None, batch=(X, Y), optimizer=torch.optim.SGD):
    return memlab.TrainingStep(model or _model(), batch, loss_fn or nn.MSELoss(), optimizer)


def _of_output(function):
    return lambda model, batch: function(model(batch[0]))


RUNS = {"measure": memlab.measure, "compare": lambda step: memlab.compare(step, [memlab.Checkpoint()], repeats=0)}

PLAIN = {
    "not a scalar": (
        lambda: _step(_of_output(lambda out: out)),
        r"the loss has shape \(6, 1\), it is not a scalar: call \.mean\(\) or \.sum\(\) on it",
    ),
    "no grad": (
        lambda: _step(_of_output(lambda out: out.sum().detach())),
        r"the loss does not require grad: something between the model's output and the loss cuts the graph",
    ),
    "frozen": (
        lambda: _step(model=_model().requires_grad_(False)),
        r"the loss does not require grad: no parameter of the model does; call requires_grad_\(\) on those to train",
    ),
    "a number": (
        lambda: _step(_of_output(lambda out: out.sum().item())),
        r"loss_fn returned a float, not a tensor: return the loss itself, not its \.item\(\)",
    ),
    "no pair": (
        lambda: _step(batch=X),
        r"MSELoss is a criterion and needs a batch \(inputs, target\), but the batch is a Tensor: give such a pair, or "
        r"loss_fn=lambda model, batch",
    ),
    "a triple": (lambda: _step(batch=(X, Y, Y)), "but the batch is a tuple of 3"),
    "NaN": (
        lambda: _step(_of_output(lambda out: out.sum() * float("nan"))),
        r"the loss is NaN.*an empty selection.*set_detect_anomaly\(True\) names the operator",
    ),
    "two devices": (
        lambda: _step(model=nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1, device="meta"))),
        r"the model is on two devices, 0\.weight on cpu and 1\.weight on meta: move it to one, e\.g\. model\.to\(",
    ),
    "no numbers": (
        lambda: _step(model=_model().to("meta"), batch=(X.to("meta"), Y.to("meta"))),
        r"on the meta device, which holds shapes and no numbers.*model\.to_empty\(device='cpu'\)",
    ),
}


@pytest.mark.parametrize("case", PLAIN)
@pytest.mark.parametrize("run", RUNS)
def test_a_step_that_cannot_be_trained(run, case):
    make, message = PLAIN[case]
    with pytest.raises(memlab.MemlabError, match=f"(?s){message}"):
        RUNS[run](make())


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    ("block", "message"),
    [
        (torch.inference_mode, r"inference_mode is on, and nothing can be trained under it: leave that block"),
        (torch.no_grad, r"gradients are switched off \(torch\.no_grad\): leave that block"),
        (torch.profiler.profile, r"a profiler is already running here.*Leave the profiler's block first, or pass"),
        (torch.autograd.profiler.profile, "a profiler is already running here"),
    ],
)
def test_a_block_in_which_nothing_can_be_measured(run, block, message):
    step = _step()
    with block(), pytest.raises(memlab.MemlabError, match=message):
        RUNS[run](step)


def test_inside_a_profiler_tensors_alone_can_be_measured():
    step = _step()
    with torch.profiler.profile():
        assert memlab.measure(step, allocator=False).peak_bytes > 0


def test_tensors_of_inference_mode():
    with torch.inference_mode():
        model, batch = _model(), (torch.ones(6, 8), torch.ones(6, 1))
    with pytest.raises(memlab.MemlabError, match=r"0\.0\.weight was made under torch\.inference_mode\(\): build"):
        _step(model=model)
    for run in RUNS.values():
        with pytest.raises(memlab.MemlabError, match=r"the batch holds inference tensors.*clone\(\) them outside"):
            run(_step(batch=batch))


def test_a_loss_that_leaves_the_model_out_is_no_comparison():
    other = _model()
    with pytest.raises(memlab.MemlabError, match="no parameter gets a gradient: does loss_fn use the model"):
        RUNS["compare"](_step(lambda model, batch: other(batch[0]).sum()))


ROWS = [
    (memlab.MicroBatch(count=7), r"^7 micro-batches asked, but the batch holds 6 sample\(s\): give 1 to 6$"),
    (memlab.Checkpoint("layers.*"), r"^'layers\.\*' matches no module of Sequential; near it are "),
    (memlab.Checkpoint(("0", "0.*")), r"^0\.0 lies within 0 and both are matched: checkpoint one of them"),
    (memlab.Checkpoint(segments=9), r"^Sequential has 2 blocks: give 1 to 2 segments, not 9$"),
    (memlab.OptimizerInBackward(), r"^OptimizerInBackward cannot run this step: it has no optimizer; pass optimizer="),
]


def test_a_strategy_that_cannot_run_is_refused_or_a_row_with_the_same_words():
    step = _step(optimizer=None)
    rows = memlab.compare(step, [strategy for strategy, _ in ROWS], repeats=0).rows
    for (strategy, message), row in zip(ROWS, rows[1:], strict=True):
        with pytest.raises(memlab.MemlabError, match=message) as refused:
            memlab.measure(step, strategy)
        assert row.error == str(refused.value)


def test_a_batch_that_does_not_split():
    ragged = X, torch.randn(3)
    row = memlab.compare(_step(_of_output(torch.sum), batch=ragged), [memlab.MicroBatch(count=2)], repeats=0).rows[1]
    assert row.error.startswith("the batch size is ambiguous: first dimensions 6 and 3")
    assert "pass `split=` to TrainingStep: a function of (batch, n) that returns the n micro-batches" in row.error


def test_a_micro_batch_whose_loss_is_no_number():
    targets = torch.full((6,), -100)
    targets[:2] = 1
    step = memlab.TrainingStep(nn.Linear(8, 4), (X, targets), nn.CrossEntropyLoss())
    row = memlab.compare(step, [memlab.MicroBatch(count=3)], repeats=0).rows[1]
    assert row.error.startswith("the loss is NaN in micro-batch 2, 3 of 3")


def test_errors_of_ones_own_pass_unchanged_with_a_note_on_what_was_run():
    class Mine(Exception):
        pass

    def fails(model, batch):
        raise Mine("in the middle")

    for run in RUNS.values():
        with pytest.raises(Mine) as raised:
            run(_step(fails))
        assert str(raised.value) == "in the middle"
        assert any("strategy: baseline" in note for note in raised.value.__notes__)


def test_every_refusal_leaves_nothing_on():
    from tests.test_undisturbed import _installed

    before = _installed()
    for make, _ in PLAIN.values():
        for run in RUNS.values():
            with contextlib.suppress(memlab.MemlabError):
                run(make())
    assert _installed() == before


def test_the_type_is_public():
    assert memlab.MemlabError.__module__ == "memlab"
    assert repr(memlab.MemlabError) == "<class 'memlab.MemlabError'>"
