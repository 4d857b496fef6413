"""Programs of people who do this job, and what memlab says of each.

`cases/` holds small programs, written afresh from public bug reports (each names its source in its first lines):
`make()` returns model, batch and loss, `check()` shows the phenomenon in plain PyTorch, and `references.json` has the
figures that this gives. The table below has an entry a case: what memlab says, what is right, and the proof of it.
Every run is watched: it must leave all as it was, and nothing alive.

`_ref.measure` counts with plain saved-tensor hooks: the distinct storages that a graph holds, without parameters,
buffers and batch (`act_noinput`).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import memlab
from memlab import Baseline, Checkpoint, LowPrecision, MicroBatch, MixedPrecision, OptimizerInBackward
from tests.test_undisturbed import _installed
from tests.truth import distinct_bytes

FOLDER = Path(__file__).parent / "cases"
REFERENCES = json.loads((FOLDER / "references.json").read_text())
RNG_STATE = torch.get_rng_state().nbytes  # what each checkpointed region keeps besides its inputs
sys.path.append(str(FOLDER))  # for the programs' own `from _ref import *`
import _ref  # noqa: E402


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


class Program:
    """One case: its module, its figures, and ways to run it."""

    def __init__(self, name: str) -> None:
        self.module, self.reference = importlib.import_module(name), REFERENCES[name]
        self.make = self.module.make

    def step(self, made: Any = None, optimizer: Any = sgd, **options: Any) -> memlab.TrainingStep:
        model, batch, loss_fn = made or self.make()

        def loss(model: nn.Module, batch: Any) -> torch.Tensor:
            return loss_fn(_ref.call(model, batch), batch.get("target"))

        return memlab.TrainingStep(model, batch, loss, optimizer, **options)

    def saved(self, *args: Any, **options: Any) -> int:
        """Bytes that autograd saves, by plain hooks, on a fresh model."""
        return _ref.measure(*self.make(*args), **options)["act_noinput"]

    def compare(self, step: memlab.TrainingStep | None = None, **strategies: memlab.Strategy) -> dict[str, memlab.Row]:
        step = step or self.step()
        with undisturbed(step):
            rows = memlab.compare(step, strategies, repeats=0).rows
        return {row.label: row for row in rows}

    def measure(self, step: memlab.TrainingStep | None = None, *args: Any, **options: Any) -> memlab.Trace:
        step = step or self.step()
        with undisturbed(step):
            return memlab.measure(step, *args, **options)

    def gap(self, strategy: memlab.Strategy, **options: Any) -> float:
        """The largest relative distance of a gradient under a strategy from plain PyTorch's, in float32."""
        _, plain = _ref.plain(*self.make())
        return _ref.gdiff(plain, gradients(self.step(**options), strategy))


def gradients(step: memlab.TrainingStep, strategy: memlab.Strategy) -> dict[str, torch.Tensor | None]:
    found: dict[int, torch.Tensor] = {}
    with strategy.applied(step) as runner:
        runner.run(catch=lambda parameter, gradient: found.update({id(parameter): gradient.to_dense().clone()}))
    return {name: found.get(id(parameter)) for name, parameter in step.model.named_parameters()}


def alive() -> int:
    """Bytes of all tensors that Python holds."""
    found = [tensor for tensor in gc.get_objects() if type(tensor) in (torch.Tensor, nn.Parameter)]
    return distinct_bytes(part for tensor in found for part in _ref.dense_parts(tensor))


def state(step: memlab.TrainingStep) -> Any:
    """All that a run could change, without a tensor."""
    model, optimizer = step.model, step.optimizer
    batch = [part for tensor in _ref.leaves([step.batch]) for part in _ref.dense_parts(tensor)]
    hooks = [{k: v for k, v in vars(module).items() if "_hooks" in k and v is not None} for module in model.modules()]
    return (
        [(id(p), p.data_ptr(), p.grad is None) for p in model.parameters()],
        [tensor.detach().numpy().tobytes() for tensor in (*model.parameters(), *model.buffers(), *batch)],
        {} if optimizer is None else {id(p): list(own) for p, own in optimizer.state.items()},
        [(module.training, "forward" in vars(module)) for module in model.modules()],
        [len(registry) for of in hooks for registry in of.values()],
        (torch.get_rng_state().tolist(), repr(np.random.get_state()), random.getstate()),
        torch.is_autocast_enabled("cpu"),
        _installed(),
    )


@contextlib.contextmanager
def undisturbed(step: memlab.TrainingStep) -> Iterator[None]:
    """Whatever runs inside leaves everything as it was, and no tensor alive."""
    gc.collect()
    before, bytes_before = state(step), alive()
    try:
        yield
    except BaseException:  # whose traceback holds the frames below it
        assert state(step) == before
        raise
    gc.collect()
    assert alive() <= bytes_before
    assert state(step) == before


@dataclass(frozen=True)
class Entry:
    says: str
    right: str
    check: Callable[[Program], None]


TABLE: dict[str, Entry] = {}


def case(name: str, *, says: str, right: str) -> Callable[[Callable[[Program], None]], Callable[[Program], None]]:
    def entered(check: Callable[[Program], None]) -> Callable[[Program], None]:
        TABLE[name] = Entry(says, right, check)
        return check

    return entered


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("[0-9]*.py")))
def test_case(name):
    if name.startswith("17"):
        pytest.importorskip("transformers", reason="the case is a model of Hugging Face's")
    TABLE[name].check(Program(name))


# -- what a step changes outside the parameters, and recomputation -----------------------------------------------------


@case(
    "01_bn_running_stats_twice",
    says="not equivalent: the buffers by name, their layers, and that recomputation is one more update",
    right="gradients equal; running statistics of plain PyTorch's checkpointed step end otherwise",
)
def _(program):
    checkpointed = program.compare(ckpt=Checkpoint(("a", "b")))["ckpt"]
    plain, twice = program.make()[0], program.make()[0]
    twice.ckpt = True
    for model in (plain, twice):
        _ref.plain(model, *program.make()[1:])
    apart = {n for n, buffer in plain.named_buffers() if not torch.allclose(buffer, twice.get_buffer(n), rtol=1e-5)}
    assert checkpointed.equivalent is False
    assert checkpointed.gradient_difference == program.reference["gdiff"] == 0
    assert set(checkpointed.buffer_differences) == apart
    assert "a.1 (BatchNorm2d), b.1 (BatchNorm2d): each forward pass updates running statistics" in checkpointed.notes[0]
    assert "recomputation is one more" in checkpointed.notes[0]


@case(
    "03_numpy_rng_droppath",
    says="not equivalent: the forward pass draws from numpy, which no recomputation repeats",
    right="the loss is equal, gradients are not",
)
def _(program):
    rows = program.compare(ckpt=Checkpoint(), micro=MicroBatch(count=2))
    for row in (rows["ckpt"], rows["micro"]):
        assert row.equivalent is False
        assert any("draws random numbers from numpy" in note for note in row.notes)
    assert rows["ckpt"].loss_difference == 0
    assert rows["ckpt"].gradient_difference > 0.05


@case(
    "06_kv_cache_grows",
    says="an error: the recomputation did not repeat the forward pass, the block changes its arguments or its state",
    right="CheckpointError; the other rows stand",
)
def _(program):
    rows = program.compare(ckpt=Checkpoint(), micro=MicroBatch(count=2), both=Checkpoint() + MicroBatch(count=2))
    for row in (rows["ckpt"], rows["both"]):
        assert row.error.startswith("the recomputation of a checkpointed block did not repeat its forward pass")
        assert "changes its arguments or its own state (a cache that grows)" in row.error
        assert "CheckpointError" in row.error
        assert "CheckpointError" in program.reference["ckpt"]
    assert rows["baseline"].saved_bytes == program.saved()
    assert rows["micro"].equivalent


@case(
    "07_frozen_stem_lora",
    says="checkpointing is identical; a reentrant checkpoint of the model's own: pass use_reentrant=False",
    right="the adapters' gradients are the plain ones; reentrant, nothing requires a gradient",
)
def _(program):
    rows = program.compare(ckpt=Checkpoint(), micro=MicroBatch(count=3))
    assert rows["ckpt"].equivalent
    assert program.gap(Checkpoint()) == program.reference["gdiff_nonreentrant"] == 0
    assert rows["baseline"].saved_bytes == program.saved()
    assert rows["micro"].error.startswith("the batch size is ambiguous: first dimensions 3 and 21")

    def split(batch, n):
        ids, targets = batch["args"][0], batch["target"].view(3, 7)
        return [{"args": (ids[i : i + 1],), "target": targets[i]} for i in range(n)]

    assert program.compare(program.step(split=split), micro=MicroBatch(count=3))["micro"].error is not None  # no weight
    weighted = program.step(split=split, weight=lambda batch: len(batch["target"]))
    assert program.compare(weighted, micro=MicroBatch(count=3))["micro"].equivalent
    step = program.step()
    step.model.mode = True
    with pytest.raises(memlab.MemlabError, match=r"does not require grad.*reentrant checkpoint.*use_reentrant=False"):
        program.measure(step)


@case(
    "08_dataclass_output",
    says="checkpointing is identical, through dataclasses and named tuples; their tensors are listed",
    right="the plain gradients",
)
def _(program):
    rows = program.compare(ckpt=Checkpoint(("b1", "b2")), micro=MicroBatch(count=2))
    assert rows["ckpt"].equivalent
    assert rows["micro"].equivalent
    assert program.gap(Checkpoint(("b1", "b2"))) == program.reference["gdiff_nonreentrant"] == 0
    trace = rows["baseline"].trace
    assert trace.saved_bytes == program.saved()
    assert {"TanhBackward0", "SigmoidBackward0"} <= {tensor.operator for tensor in trace.saved if tensor.module == "b2"}


@case(
    "09_preact_inplace_input",
    says="an error that names the block, its in-place layers and inplace=False",
    right="plain PyTorch raises in backward; the other rows and the model are unharmed",
)
def _(program):
    step = program.step()
    rows = program.compare(step, ckpt=Checkpoint("branch"), micro=MicroBatch(count=2))
    assert rows["ckpt"].error == (
        "branch edits its own input, a tensor of shape (4, 8, 8, 8), in place (with inplace=True in it: 0, 2), and "
        "that input is what checkpointing keeps for the second run: use inplace=False there, or checkpoint other blocks"
    )
    assert rows["micro"].equivalent
    assert rows["baseline"].saved_bytes == program.saved()
    assert step.loss().item() == program.reference["loss"]


@case(
    "10_sac_autocast_shared_weight",
    says="autocast fails on its own row, for autocast's cache; without the cache it is measured",
    right="both without the cache give 0.029491 and a gradient of norm 0.52374",
)
def _(program):
    rows = program.compare(micro=MicroBatch(count=2), bf16=MixedPrecision("bf16"))
    assert rows["micro"].equivalent
    assert "a weight's cast came from autocast's cache, in the recomputation it is made anew" in rows["bf16"].error
    assert "cache_enabled=False" in rows["bf16"].error
    model, batch, loss_fn = program.make()
    model.sac = False
    ours = Checkpoint("proj", save=["_to_copy", "addmm"])
    rows = program.compare(program.step((model, batch, loss_fn)), sac=ours, both=ours + MixedPrecision("bf16"))
    assert rows["sac"].equivalent
    assert "a weight's cast came from autocast's cache" in rows["both"].error

    def uncached(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            return loss_fn(_ref.call(model, batch), batch["target"])

    model, batch, _ = program.make()
    step = memlab.TrainingStep(model, batch, uncached, sgd)
    loss, norm = program.reference["both_nocache"]
    assert float(step.loss()) == pytest.approx(loss, abs=1e-6)
    found = gradients(step, Baseline()).values()
    assert float(torch.stack([g.square().sum() for g in found]).sum().sqrt()) == pytest.approx(norm, abs=1e-5)
    assert program.measure(step).peak_bytes > 0


@case(
    "11_sequential_segments",
    says="all segments are checkpointed, the last one too; 0 or 7 of 6 blocks is an error with the numbers",
    right="one input and one random state a segment; torch's own checkpoint_sequential saves what its hooks see",
)
def _(program):
    boundary = 32 * 64 * 4
    traces = {}
    for count in (1, 2, 3, 6):
        traces[count] = program.measure(program.step(), Checkpoint(segments=count))
        inputs = boundary * (count - 1)  # the first one's is the batch
        assert traces[count].saved_bytes == inputs + boundary + count * RNG_STATE  # and the output, for the loss
    peaks = [trace.tensor_peak_bytes for trace in traces.values()]
    assert peaks == sorted(peaks, reverse=True)
    rows = program.compare(one=Checkpoint(segments=1), none=Checkpoint(segments=0), seven=Checkpoint(segments=7))
    assert rows["one"].tensor_peak_bytes >= rows["baseline"].tensor_peak_bytes
    assert rows["none"].error == "Sequential has 6 blocks: give 1 to 6 segments, not 0"
    assert rows["seven"].error == "Sequential has 6 blocks: give 1 to 6 segments, not 7"
    model, batch, loss_fn = program.make()
    for count in (1, 2, 3, 6):
        trace = program.measure(program.step((program.module.Seg(model, count), batch, loss_fn)))
        seen = program.reference[f"act_segments_{count}"] - 2 * boundary  # hooks see inputs and targets too
        assert trace.saved_bytes == seen + (count - 1) * RNG_STATE
    assert rows["baseline"].saved_bytes == program.reference["plain_act"] - 2 * boundary
    with pytest.raises(ValueError, match=r"range\(\) arg 3 must not be zero"):  # the user's own, unchanged
        program.measure(program.step((program.module.Seg(model, 7), batch, loss_fn)))


@case(
    "12_packed_sequence_gru",
    says="the packed data is the batch; micro-batches refuse to cut it; checkpointing is identical",
    right="as hooks count; rows of .data are time steps",
)
def _(program):
    rows = program.compare(ckpt=Checkpoint("rnn"), micro=MicroBatch(count=2))
    assert rows["ckpt"].equivalent
    assert rows["micro"].error.startswith("PackedSequence cannot be split: rows of its .data are time steps of several")
    assert "Give the padded batch" in rows["micro"].error
    packed, target = program.make()[1]["args"][0], program.make()[1]["target"]
    trace = rows["baseline"].trace
    assert trace.by_category("forward")["batch"] == packed.data.nbytes + packed.batch_sizes.nbytes + target.nbytes
    assert trace.saved_bytes == program.saved()
    assert program.saved() == program.reference["act"] - packed.data.nbytes - target.nbytes


@case(
    "14_optimizer_in_backward_shared",
    says="one step a parameter, when its gradient is whole; reentrant checkpoints and micro-batches are refused",
    right="weights after the step equal the plain ones",
)
def _(program):
    def half(parameters):
        return torch.optim.SGD(parameters, lr=0.5)

    weights = {}
    for strategy in (Baseline(), OptimizerInBackward(), OptimizerInBackward() + Checkpoint("shared")):
        step = program.step(optimizer=half)
        with strategy.applied(step) as runner:
            runner.run()
        weights[str(strategy)] = [parameter.detach().clone() for parameter in step.model.parameters()]
    model, batch, loss_fn = program.make()
    program.module.fuse_sgd(model)
    loss_fn(_ref.call(model, batch), batch["target"]).backward()
    for found in weights.values():
        assert max(float((a - b).detach().abs().max()) for a, b in zip(found, model.parameters(), strict=True)) < 1e-6
    with pytest.raises(memlab.MemlabError, match="consumes each gradient at once, before the next micro-batch"):
        OptimizerInBackward() + MicroBatch(count=2)
    step = program.step()
    step.model.mode = True
    row = program.compare(step, ib=OptimizerInBackward())["ib"]
    assert row.error.startswith("the gradient of shared.")
    assert "came in two pieces in one step" in row.error
    assert "use_reentrant=False" in row.error
    model, batch, loss_fn = program.make()
    program.module.fuse_sgd(model)  # the user's own optimizer in backward
    rows = program.compare(
        program.step((model, batch, loss_fn), optimizer=None), ckpt=Checkpoint("shared"), micro=MicroBatch(count=2)
    )
    assert rows["ckpt"].equivalent
    assert rows["micro"].equivalent is False
    assert any("your own hooks use each micro-batch's gradient" in note for note in rows["micro"].notes)


@case(
    "15_gradient_penalty",
    says="checkpointing and micro-batches are equivalent; what the double backward saves is counted",
    right="the plain gradients, also with respect to a slice of the batch",
)
def _(program):
    body, micro = Checkpoint("body"), MicroBatch(count=2)
    rows = program.compare(ckpt=body, micro=micro, both=body + micro)
    assert all(row.equivalent for row in rows.values())
    assert program.gap(body) == program.reference["gdiff_nonreentrant"] == 0
    assert program.gap(micro) < 1e-5
    assert all(part.batch["args"][0].requires_grad for part in program.step().micro_batches(count=2))
    assert rows["baseline"].saved_bytes == program.saved()


@case(
    "17_hf_eval_mode_no_checkpoint",
    says="the model's own checkpointing is on but without effect: it is in eval mode; call model.train()",
    right="the same bytes as without; in training a seventh",
)
def _(program):
    model, batch, _ = program.make()
    step = memlab.TrainingStep(model, batch["kwargs"], None, sgd)  # a mapping in, `.loss` out
    plain = program.measure(step)
    assert plain.saved_bytes == program.saved()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    silent = program.measure(step)
    assert silent.saved_bytes == plain.saved_bytes
    (note,) = [note for note in silent.notes if "gradient checkpointing" in note]
    assert "is on but without effect: the model is in eval mode" in note
    assert "Call model.train()" in note
    model.train()
    working = program.measure(step)
    assert any("LlamaDecoderLayer) is on: what is measured has it" in note for note in working.notes)
    inputs = program.reference["plain_act"] - plain.saved_bytes
    hidden = program.reference["train_ckpt_act"] - inputs
    ids = torch.arange(16)[None]  # positions, their cosines and sines: keyword arguments, which hooks see neither
    angles = model.model.rotary_emb(torch.ones(1), ids)
    unseen = len(model.model.layers) * RNG_STATE + ids.nbytes + sum(angle.nbytes for angle in angles)
    assert working.saved_bytes == hidden + unseen


@case(
    "19_keyword_only_block",
    says="checkpointing is identical, the gradient of rel_bias too",
    right="the plain gradients",
)
def _(program):
    rows = program.compare(ckpt=Checkpoint(), micro=MicroBatch(count=2))
    assert rows["ckpt"].equivalent
    assert rows["micro"].equivalent
    assert program.gap(Checkpoint()) == 0
    assert gradients(program.step(), Checkpoint())["rel_bias"].norm() > 0
    assert rows["baseline"].saved_bytes == program.saved()


@case(
    "21_func_grad_in_forward",
    says="an error for the checkpoint row alone: transforms of torch.func do not work in a checkpointed region",
    right="plain PyTorch refuses hooks there; without them the step trains; vmap works with both",
)
def _(program):
    rows = program.compare(ckpt=Checkpoint("TTT"), micro=MicroBatch(count=2), bf16=MixedPrecision("bf16"))
    assert rows["ckpt"].error.startswith("the model uses transforms of torch.func (grad, vjp, ...), which do not work")
    assert rows["baseline"].saved_bytes > 0
    assert rows["micro"].equivalent is False  # the inner loss is a mean over the batch
    assert rows["bf16"].error is None
    rows = program.compare(program.step(program.make("vmap")), ckpt=Checkpoint("VM"), micro=MicroBatch(count=2))
    assert rows["ckpt"].equivalent
    assert rows["micro"].equivalent
    assert rows["baseline"].saved_bytes == program.saved("vmap")
    with torch.autograd.graph.saved_tensors_hooks(pytest.fail, pytest.fail):
        pass
    torch.ones(1, requires_grad=True).square()  # no hook is left that this would meet


# -- storages ----------------------------------------------------------------------------------------------------------


@case(
    "23_expanded_zero_stride",
    says="a table that is expanded counts once, one that is copied as often as it is",
    right="as hooks count distinct storages",
)
def _(program):
    for copy in (False, True):
        trace = program.measure(program.step(program.make(copy)))
        expected = program.reference["copy" if copy else "view"]["act_noinput"]
        assert trace.saved_bytes == program.saved(copy) == expected
        table = program.reference["sixteen_tables" if copy else "one_table"]
        assert any(tensor.storage_bytes == table for tensor in trace.saved)


@case(
    "26_compiled_block",
    says="the block runs compiled and is measured so, as one unit; names without _orig_mod",
    right="what hooks see of the compiled block; gradients of the eager one",
)
def _(program):
    torch._dynamo.reset()
    step = program.step()
    rows = program.compare(step, micro=MicroBatch(count=2))
    trace = rows["baseline"].trace
    assert "0 runs compiled and is measured so, as one unit" in trace.notes
    assert "single operators and modules inside compiled code" in trace.absent
    assert rows["micro"].equivalent
    assert trace.saved_bytes == _ref.measure(step.model, step.batch, nn.functional.mse_loss)["act_noinput"]
    names = {allocation.name for allocation in trace.allocations}
    assert "0.0.weight" in names
    assert not any("_orig_mod" in name for name in names)
    _, eager = _ref.plain(*program.make(False))
    compiled = gradients(step, Baseline())
    assert max(map(_apart, compiled.values(), eager.values())) < 1e-5
    torch._dynamo.reset()


def _apart(one, other):
    return float((one - other).norm() / other.norm())


@case(
    "27_recorder_keeps_activations",
    says="a result holds no tensor",
    right="no storage of the run is alive afterwards; ten runs do not grow",
)
def _(program):
    step, kept = program.step(), []
    memlab.measure(step)
    gc.collect()
    gc.disable()
    try:
        before = alive()
        for _ in range(10):
            kept.append(memlab.measure(step))
            with memlab.record() as trace:
                step.loss().backward()
            step.model.zero_grad()
            kept.append(trace)
        assert alive() <= before
    finally:
        gc.enable()
    assert len({trace.tensor_peak_bytes for trace in kept[::2]}) == 1


# -- micro-batches that are not alike ----------------------------------------------------------------------------------


@case(
    "28_masked_tokens_uneven",
    says="without weight= off by so much, and why; with it, exact",
    right="the full batch's gradient, by valid targets",
)
def _(program):
    micro = MicroBatch(count=4)
    row = program.compare(micro=micro)["micro"]
    assert row.equivalent is False
    assert row.gradient_difference > 0.1
    assert any("targets of -100" in note and "Pass weight=" in note for note in row.notes)
    naive = program.gap(micro)
    assert naive == pytest.approx(program.reference["mean_of_means"]["gdiff"], rel=1e-4)
    weight = {"weight": lambda batch: (batch["target"] != -100).sum()}
    row = program.compare(program.step(**weight), micro=micro)["micro"]
    assert row.equivalent
    assert row.gradient_difference <= 1e-12
    assert program.gap(micro, **weight) < 1e-5
    shares = [part.share for part in program.step(**weight).micro_batches(count=4)]
    assert shares == pytest.approx([valid / 23 for valid in program.reference["valid"]])


@case(
    "31_ragged_last_micro",
    says='"3 micro-batches of 4, 4 and 2", weighted by size; a size above the batch is one micro-batch, with a note',
    right="the full batch's loss and gradient",
)
def _(program):
    step = program.step()
    parts = step.micro_batches(size=4)
    assert [part.size for part in parts] == [4, 4, 2]
    assert [part.share for part in parts] == pytest.approx([0.4, 0.4, 0.2])
    rows = program.compare(step, four=MicroBatch(size=4), large=MicroBatch(size=64), count=MicroBatch(count=4))
    assert all(row.equivalent for row in rows.values())
    assert MicroBatch(size=4).label(step) == "3 micro-batches of 4, 4 and 2"
    assert MicroBatch(count=4).label(step) == "4 micro-batches of 3, 3, 2 and 2"  # torch.tensor_split's, not chunk's
    assert "micro-batches of 64 asked, and the batch holds 10: one micro-batch" in rows["large"].notes
    assert program.gap(MicroBatch(size=4)) < 1e-5
    with MicroBatch(size=4).applied(step) as runner:
        runner.run()
        assert float(runner.loss) == pytest.approx(program.reference["full_loss"], rel=1e-6)


@case(
    "32_bn_remainder_of_one",
    says="9 by 4: an error that names BatchNorm and the micro-batch of one; 8 by 4: not equivalent, for BatchNorm",
    right="PyTorch raises; statistics are per micro-batch",
)
def _(program):
    rows = program.compare(micro=MicroBatch(size=4), five=MicroBatch(size=5))
    assert rows["micro"].error.startswith("a micro-batch holds one sample, and 1 (BatchNorm1d) needs more than one")
    assert "choose a number or size that leaves no rest of one" in rows["micro"].error
    row = program.compare(program.step(program.make(8)), micro=MicroBatch(size=4))["micro"]
    assert row.equivalent is False
    assert any("BatchNorm normalises over each micro-batch, not over the batch" in note for note in row.notes)
    assert "1.num_batches_tracked" in row.buffer_differences


@case(
    "33_in_batch_negatives",
    says="not equivalent: the loss couples samples",
    right="another loss (2.42, not 4.32) and another gradient",
)
def _(program):
    row = program.compare(micro=MicroBatch(count=4))["micro"]
    assert row.equivalent is False
    assert any("the loss is not a mean over independent samples: it couples them" in note for note in row.notes)
    full, split = program.reference["full_loss"], program.reference["naive_micro"]["loss"]
    assert row.loss_difference == pytest.approx((full - split) / full, rel=1e-4)


@case(
    "36_mixed_mapping_batch",
    says="tensors and the list of names are cut, the rest passes; the mapping keeps its type; equivalent",
    right="the full batch's gradient",
)
def _(program):
    rows = program.compare(micro=MicroBatch(size=4), ckpt=Checkpoint("Net"))
    assert all(row.equivalent for row in rows.values())
    assert program.gap(MicroBatch(size=4)) < 1e-5
    first, rest = (part.batch["args"][0] for part in program.step().micro_batches(size=4))
    assert isinstance(first, program.module.Batch)
    assert (first["names"], rest["names"]) == (["a", "bb", "ccc", "dddd"], ["eeeee", "ffffff"])
    assert rest["text"]["ids"].shape == (2, 3)
    assert [view.shape for view in rest["views"]] == [(2, 6), (2, 6)]
    assert (rest["prior"], rest["power"], rest["gain"].shape, rest["text"]["lang"]) == (None, 2, (), "en")
    assert rows["baseline"].saved_bytes == program.saved()


@case(
    "38_scaler_and_clip_per_micro",
    says="one unscaling, one clipping, one step for all micro-batches: equivalent",
    right="the weights of the full batch's clipped step",
)
def _(program):
    calls = []

    def clipped(parameters):
        optimizer = torch.optim.SGD(parameters, lr=0.1)

        def clip(*_):
            calls.append(float(nn.utils.clip_grad_norm_(parameters, 1.0)))

        optimizer.register_step_pre_hook(clip)
        return optimizer

    expected, norms = program.module.step("full")
    for strategy, tolerance in ((MicroBatch(count=4), 1e-5), (MicroBatch(count=4) + MixedPrecision("fp16"), 1e-3)):
        step = program.step(optimizer=clipped)
        calls.clear()
        with strategy.applied(step) as runner:
            runner.run()
            while runner.skipped:  # fp16 begins with too large a scale
                runner.run()
        assert calls == pytest.approx(norms, rel=tolerance)
        weights = torch.cat([parameter.detach().flatten() for parameter in step.model.parameters()])
        assert float((weights - expected).abs().max()) < tolerance
    rows = program.compare(program.step(optimizer=clipped), fp16=MicroBatch(count=4) + MixedPrecision("fp16"))
    assert rows["fp16"].equivalent


@case(
    "39_sparse_embedding_grad",
    says="equivalent; the gradient's bytes are those of indices and values",
    right="3,456 bytes, not 320,000",
)
def _(program):
    rows = program.compare(micro=MicroBatch(count=4), ckpt=Checkpoint("emb"), early=OptimizerInBackward())
    assert all(row.equivalent for row in rows.values())
    dense = sum(parameter.nbytes for parameter in program.make()[0].out.parameters())
    assert rows["baseline"].trace.by_category("backward")["gradients"] == program.reference["sparse_bytes"] + dense
    assert program.gap(MicroBatch(count=4)) < 1e-5


@case(
    "41_dropout_across_split",
    says="micro-batches draw other masks, and agree with each draw replaced by its mean; checkpointing is identical",
    right="3.4 apart with dropout, 6e-7 without; checkpointed 0",
)
def _(program):
    rows = program.compare(micro=MicroBatch(count=2), ckpt=Checkpoint(segments=2))
    assert rows["micro"].equivalent
    assert any("draw other masks" in note and "they agree" in note for note in rows["micro"].notes)
    assert rows["ckpt"].equivalent
    assert rows["ckpt"].gradient_difference == 0
    assert not rows["ckpt"].notes
    model, batch, loss_fn = program.make()
    _, plain = _ref.plain(model.eval(), batch, loss_fn)
    assert _ref.gdiff(plain, gradients(program.step((model, batch, loss_fn)), MicroBatch(count=2))) < 1e-5


# -- precision ---------------------------------------------------------------------------------------------------------


@case(
    "42_autocast_saves_more",
    says="more saved at batch 4, less at 4096; weight copies apart, and the same in every micro-batch",
    right="as hooks count; two bytes a weight",
)
def _(program):
    for size in (4, 4096):
        step = program.step(program.make(size))
        assert program.measure(step, allocator=False).saved_bytes == program.reference[f"fp32_b{size}"]
        trace = program.measure(step, MixedPrecision("bf16"), allocator=False)
        assert trace.saved_bytes == program.reference[f"bf16_b{size}"]
        several = program.measure(step, MixedPrecision("bf16") + MicroBatch(count=2), allocator=False)
        biases = 2 * sum(p.numel() for p in step.model.parameters() if p.dim() == 1)
        for each, number in ((trace, 0), (several, 0), (several, 1)):
            copies = [a for a in each.allocations if a.category == "weight copies" and a.place.micro_batch == number]
            assert sum(copy.nbytes for copy in copies) == program.reference["weight_copies"] + biases


@case(
    "43_autocast_norm_chain_fp32",
    says="each saved tensor in the type that it is kept in",
    right="by type as hooks see it",
)
def _(program):
    for strategy, key in ((Baseline(), "fp32"), (MixedPrecision("bf16"), "autocast")):
        trace = program.measure(program.step(), strategy)
        held = {t.storage: (f"torch.{t.dtype}", t.storage_bytes) for t in trace.saved if t.kind != "parameters"}
        by_type: dict[str, int] = {}
        for dtype, nbytes in held.values():
            by_type[dtype] = by_type.get(dtype, 0) + nbytes
        assert by_type == program.reference[key]


@case(
    "44_bf16_update_vanishes",
    says="pure bf16 is not proven, and 100% of its weights did not move; autocast is another row",
    right="after 100 steps no weight has moved in pure bf16, all have with autocast",
)
def _(program):
    def slow(parameters):
        return torch.optim.SGD(parameters, lr=1e-4)

    rows = program.compare(program.step(optimizer=slow), amp=MixedPrecision("bf16"), pure=LowPrecision("bf16"))
    assert rows["amp"].equivalent
    assert rows["pure"].equivalent is None
    assert any(note.startswith("100% of the weights that have a gradient did not move") for note in rows["pure"].notes)
    assert program.reference["pure_bf16"]["share_of_weights_moved"] == 0


@case(
    "46_scaler_skips_scheduler_runs",
    says="recorded: no optimizer step ran; measured: steps until one is not skipped, or the note that none was",
    right="0 of 3 steps, no state",
)
def _(program):
    model, batch, loss_fn = program.make()
    optimizer, scaler = torch.optim.Adam(model.parameters()), torch.amp.GradScaler("cpu", init_scale=2.0**126)
    with memlab.record(model, optimizer) as trace:
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_fn(_ref.call(model, batch), batch["target"])).backward()
            scaler.step(optimizer)
            scaler.update()
    assert "optimizer state beyond what was there: no optimizer step ran here" in trace.absent
    assert "optimizer" not in trace.by_phase()
    assert "optimizer state" not in trace.by_category()
    fp16 = program.measure(program.step(optimizer=torch.optim.Adam), MixedPrecision("fp16"))
    assert fp16.by_category("optimizer")["optimizer state"] == 2 * 5 * 4 + 2 * 4  # two moments, two counters
    assert not any("skipped" in note for note in fp16.notes)

    def hopeless(model, batch):
        return loss_fn(_ref.call(model, batch), batch["target"]) * 1e30

    step = memlab.TrainingStep(model, batch, hopeless, torch.optim.Adam)
    trace = program.measure(step, MixedPrecision("fp16"))
    assert any("20 steps in a row were skipped" in note and "no update happens" in note for note in trace.notes)


# -- functions, losses, modules of every kind --------------------------------------------------------------------------


@case(
    "47_custom_fwd_setup_context",
    says="the user's AttributeError as it is, naming the function, with a line on what memlab ran",
    right="the new style fails in plain PyTorch too; the old one trains",
)
def _(program):
    step = program.step()
    with pytest.raises(AttributeError, match="'NewBackward' object has no attribute '_fwd_used_autocast'") as raised:
        program.compare(step, bf16=MixedPrecision("bf16"))
    assert any("memlab was running one training step" in note for note in raised.value.__notes__)
    rows = program.compare(program.step(program.make(program.module.Old)), bf16=MixedPrecision("bf16"))
    assert all(row.error is None for row in rows.values())


@case(
    "48_loss_history_leak",
    says="measuring leaves the history as it was and keeps nothing",
    right="no entry, no byte; what grows over several steps is `record`'s to report",
)
def _(program):
    model, batch, loss_fn = program.make()
    step = program.step((model, batch, loss_fn))
    program.measure(step)
    program.compare(step, micro=MicroBatch(count=2))
    assert loss_fn.history == []


@case(
    "49_mha_need_weights",
    says="the attention matrices where they are asked for, and none where not",
    right="as hooks count",
)
def _(program):
    for length in (64, 128):
        for need in (True, False):
            trace = program.measure(program.step(program.make(need, length)))
            key = f"T{length}_{'weights' if need else 'fused'}"
            assert trace.saved_bytes == program.saved(need, length) == program.reference[key]
            assert any(tensor.shape[-2:] == (length, length) for tensor in trace.saved) is need


@case(
    "50_activation_function_cost",
    says="what each activation function saves, a shared buffer once",
    right="as hooks count",
)
def _(program):
    for act in program.module.ACTS:
        for drop in (False, True):
            trace = memlab.measure(program.step(program.make(act, drop)), allocator=False)
            key = f"{act}+dropout" if drop else act
            assert trace.saved_bytes == program.reference[key], key


@case(
    "53_adam_state_appears_late",
    says="state in a training run under way, none in the first step; the optimizer is left as it was",
    right="8 bytes a trained parameter and two counters",
)
def _(program):
    step = program.step(optimizer=torch.optim.Adam)
    trace = program.measure(step)
    held = trace.by_category("optimizer")
    assert held["parameters"] == program.reference["param_bytes"]
    assert held["optimizer state"] == program.reference["state_after_step1"]
    assert held["gradients"] == program.reference["used_bytes"]
    first = program.measure(step, steady=False)
    assert "optimizer state" not in first.by_category("forward")
    assert "optimizer state" not in first.by_category("backward")
    assert first.by_category("optimizer")["optimizer state"] == program.reference["state_after_step1"]
    assert not step.optimizer.state


@case(
    "54_tied_and_reused_modules",
    says="tied bytes once; three calls of act, two of fc",
    right="3,648 bytes; the tied weight's gradient is the sum, and it stays tied",
)
def _(program):
    step = program.step()
    rows = program.compare(step, micro=MicroBatch(count=3), early=OptimizerInBackward())
    assert all(row.equivalent for row in rows.values())
    trace = rows["baseline"].trace
    assert trace.by_category()["parameters"] == program.reference["param_bytes"]
    calls = [(o.place.module, o.place.operator) for o in trace.operators if o.place.phase == "forward"]
    assert calls.count(("act", "aten::relu")) == program.reference["calls"]["act"]
    assert calls.count(("fc", "aten::addmm")) == program.reference["calls"]["fc"]
    assert trace.saved_bytes == program.saved() == program.reference["act_noinput"]
    assert step.model.head.weight is step.model.emb.weight
    assert program.gap(Baseline()) == 0


@case(
    "55_tracemalloc_and_rss",
    says="bytes of tensors, whatever ran before; nothing about CUDA where there is none",
    right="as hooks count, in either order",
)
def _(program):
    blocks, micro = Checkpoint(), MicroBatch(count=4)
    one = program.compare(blocks=blocks, micro=micro)
    other = program.compare(micro=micro, blocks=blocks)
    for label in ("baseline", "blocks", "micro"):
        assert one[label].peak_bytes == other[label].peak_bytes
    assert one["baseline"].saved_bytes == program.saved()
    assert one["baseline"].trace.provenance["device"] == "cpu"
    assert not any("cuda" in key for key in one["baseline"].trace.provenance)


@case(
    "57_exception_leaves_hooks",
    says="the user's ValueError as it is, with one line on what memlab ran",
    right="no hook, no patch, no mode, no gradient is left; the next call works",
)
def _(program):
    step = program.step()
    fingerprint = program.module.fingerprint(step.model)
    for run in (program.measure, lambda step: program.compare(step, ckpt=Checkpoint("b"))):
        with pytest.raises(ValueError, match="user bug") as raised:
            run(step)
        assert str(raised.value) == program.reference["message"]
        (note,) = raised.value.__notes__
        assert note.startswith("memlab was running one training step of TrainingStep(Net")
        assert program.module.fingerprint(step.model) == fingerprint
    good = program.step((step.model, *program.make(4)[1:]))
    assert float(good.loss()) == program.reference["ok_loss"]
    assert program.measure(good).peak_bytes > 0


@case(
    "60_lazy_linear",
    says="one initialisation for all strategies, random stream put back",
    right="972 bytes of parameters; strategies that change nothing agree to the bit",
)
def _(program):
    made = program.make()
    before = torch.get_rng_state()
    step = program.step(made)
    assert torch.equal(before, torch.get_rng_state())
    assert int(step.model[1].num_batches_tracked) == 0
    rows = program.compare(step, bf16=MixedPrecision("bf16"), early=OptimizerInBackward())
    assert all(row.equivalent for row in rows.values())
    assert rows["baseline"].trace.by_category()["parameters"] == program.reference["param_bytes"]


@case(
    "63_encoder_fast_path",
    says="measured in the mode the user set, with gradients; recorded without them: the fused operator by name",
    right="as hooks count; watching does not switch the fast path off",
)
def _(program):
    step = program.step()
    assert program.measure(step).saved_bytes == program.saved() == program.reference["act"]
    step.model.eval()
    assert program.measure(step).saved_bytes == program.reference["act"]  # it has no dropout
    with torch.no_grad(), memlab.record(step.model) as trace:
        _ref.call(step.model, step.batch)
    assert sum("_transformer_encoder_layer_fwd" in operator.place.operator for operator in trace.operators) == 2


@case(
    "64_inference_tensor_batch",
    says="the batch holds inference tensors: clone() them outside inference_mode",
    right="PyTorch cannot save them; a clone trains",
)
def _(program):
    model, batch, loss_fn = program.make()
    step = program.step((model, batch, loss_fn))
    for run in (memlab.measure, lambda step: memlab.compare(step, [Checkpoint(segments=2)], repeats=0)):
        with pytest.raises(memlab.MemlabError, match=r"the batch holds inference tensors.*clone\(\) them outside"):
            run(step)
    good = program.step((model, {"args": (batch["args"][0].clone(),), "target": batch["target"]}, loss_fn))
    assert good.loss().item() == pytest.approx(program.reference["loss_after_clone"])
    assert all(row.equivalent for row in program.compare(good, micro=MicroBatch(count=2)).values())
    assert not any(tensor.is_inference() for tensor in (*model.parameters(), *good.batch["args"]))


@case(
    "65_empty_selection",
    says="the loss is NaN in micro-batch 2 of 2: look for a mean over an empty selection; the plain row stands",
    right="NaN in the second; tensors of no bytes divide nothing",
)
def _(program):
    rows = program.compare(micro=MicroBatch(count=2))
    assert rows["micro"].error.startswith("the loss is NaN in micro-batch 2 of 2")
    assert "a mean over an empty selection" in rows["micro"].error
    assert rows["baseline"].saved_bytes == program.saved()
    (model, batch, _), first = program.make(), slice(0, 4)
    x, chosen = batch["args"]

    def loss(out, _):
        return (out - 1.0).square().sum()  # of nothing: zero

    empty = program.step((model, {"args": (x[4:], chosen[4:]), "target": None}, loss))
    trace = program.measure(empty)
    assert any(tensor.nbytes == 0 for tensor in trace.saved)
    assert trace.explain()
    none = program.step((model, {"args": (x[:0], chosen[:0]), "target": None}, program.make()[2]))
    none.batch["target"] = 1.0
    with pytest.raises(memlab.MemlabError, match="the loss is NaN"):
        program.measure(none)
    assert program.reference["micro"][1]["loss"] == "nan"
    assert chosen[first].any()


@case(
    "66_data_dependent_depth",
    says="micro-batches: not equivalent; a parameter that no step uses has no gradient in any",
    right="other depths (5 and 0 calls), other experts",
)
def _(program):
    row = program.compare(micro=MicroBatch(count=2))["micro"]
    assert row.equivalent is False
    assert row.gradient_difference > 0.1
    for strategy in (Baseline(), MicroBatch(count=2), Checkpoint("step")):
        found = gradients(program.step(), strategy)
        assert [name for name, gradient in found.items() if gradient is None] == program.reference["full_none"]
    trace = program.measure(program.step(), MicroBatch(count=2))
    calls = [o.place.micro_batch for o in trace.operators if o.place.module == "step" and "addmm" in o.place.operator]
    assert [calls.count(0), calls.count(1)] == program.reference["step_calls_per_micro"]


@case(
    "68_complex_spectral_layer",
    says="complex64 at 8 bytes, conjugates of parameters as parameters; pure bf16 cannot run, and which stay complex",
    right="as hooks count",
)
def _(program):
    rows = program.compare(amp=MixedPrecision("bf16"), pure=LowPrecision("bf16"), micro=MicroBatch(count=2))
    trace = rows["baseline"].trace
    assert trace.saved_bytes == program.saved() == program.reference["act_noinput"]
    assert rows["amp"].equivalent
    assert rows["amp"].notes == ("complex tensors stay complex: 0.w, 1.w",)
    assert rows["micro"].equivalent
    assert "complex tensors stay complex: 0.w, 1.w" in rows["pure"].error
    assert "MixedPrecision('bf16')" in rows["pure"].error
    complexes = [tensor for tensor in trace.saved if tensor.dtype == "complex64"]
    assert sum(tensor.nbytes for tensor in complexes) == program.reference["complex_bytes_naive"]
    assert any(tensor.kind == "parameters" for tensor in complexes)
    assert trace.by_category()["parameters"] == program.reference["param_bytes"]


@case(
    "69_ddp_reentrant_twice",
    says='names without "module."; checkpointing is equivalent; the optimizer in backward is refused',
    right="the plain gradients; reentrant, DDP's own error",
)
def _(program):
    try:
        step = program.step()
        before = state(step)  # not what is alive: DDP's buckets are C++'s, until a dispatch mode shows them to Python
        strategies = {"ckpt": Checkpoint("shared"), "micro": MicroBatch(count=2), "early": OptimizerInBackward()}
        rows = {row.label: row for row in memlab.compare(step, strategies, repeats=0).rows}
        assert state(step) == before
        assert rows["ckpt"].equivalent
        assert rows["micro"].equivalent
        assert "would step before gradients are reduced" in rows["early"].error
        names = {allocation.name for allocation in rows["baseline"].trace.allocations}
        assert "inp.weight" in names
        assert not any(name.startswith("module.") for name in names)
        assert rows["baseline"].saved_bytes == program.saved()
        with pytest.raises(RuntimeError, match="Expected to mark a variable ready only once"):
            memlab.measure(program.step(program.make(True)))
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def test_every_program_has_an_entry_and_its_figures():
    programs = {path.stem for path in FOLDER.glob("[0-9]*.py")}
    assert programs == TABLE.keys() == REFERENCES.keys()
    assert len(programs) == 44
