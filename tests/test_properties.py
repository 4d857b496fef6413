"""What holds for every graph and every sum of strategies, on random ones."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import torch
import torch.nn.functional as F
from torch import nn

import memlab
from memlab import ledger
from memlab.clock import Clock
from memlab.tracker import Tracker
from tests.truth import allocator_peak, distinct_bytes, resident_bytes

SAMPLES, WIDTH = 4, 8
WRAPPED_SCALAR = 8  # a dispatch mode keeps a Python number's tensor alive a moment longer

# -- random graphs -----------------------------------------------------------------------------------------------------

OPERATORS = (
    "linear",
    "shared linear",
    "gelu",
    "layer norm",
    "dropout",
    "tanh",
    "view",
    "transpose",
    "relu in place",
    "expand",
    "add",
    "multiply",
    "concatenate",
)
Plan = list[tuple[str, int, int]]  # operator, and which of the earlier tensors it is applied to


class Graph(nn.Module):
    """The operators of a plan, one after another; each takes any of the tensors before it, some two of them."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.first, self.shared, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleDict()
        for number, (operator, _, _) in enumerate(plan):
            if operator in ("linear", "concatenate"):
                self.layers[str(number)] = nn.Linear(WIDTH * (1 + (operator == "concatenate")), WIDTH)
            elif operator == "layer norm":
                self.layers[str(number)] = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [self.first(x)]
        for number, (operator, one, two) in enumerate(self.plan):
            a, b = values[one % len(values)], values[two % len(values)]
            values.append(self._applied(number, operator, a, b))
        return self.last(sum(values))  # type: ignore[no-any-return]  # none is left unused

    def _applied(self, number: int, operator: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        layer = dict(self.layers.named_children()).get(str(number))
        if operator == "concatenate":
            assert layer is not None
            return layer(torch.cat([a, b], dim=1))  # type: ignore[no-any-return]
        if layer is not None:
            return layer(a)  # type: ignore[no-any-return]
        operators: dict[str, Callable[[], torch.Tensor]] = {
            "shared linear": lambda: self.shared(a),
            "gelu": lambda: F.gelu(a),
            "dropout": lambda: F.dropout(a, 0.5, self.training),
            "tanh": lambda: a.tanh(),
            "view": lambda: a.view(-1, 2, WIDTH // 2).flatten(1),
            "transpose": lambda: a.t().contiguous().t(),
            "relu in place": lambda: (a + b).relu_(),
            "expand": lambda: a.mean(1, keepdim=True).expand(-1, WIDTH) * b,
            "add": lambda: a + b,
            "multiply": lambda: a * b,
        }
        return operators[operator]()


places = st.integers(0, 6)
plans = st.lists(st.tuples(st.sampled_from(OPERATORS), places, places), min_size=1, max_size=8)


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, 1)


def _kinds(tensors: list[torch.Tensor], without: set[int]) -> list[tuple[Any, ...]]:
    """Distinct storages among some tensors, as far as two runs can be compared."""
    found = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sorted(nbytes for cdata, nbytes in found.items() if cdata not in without)


@hypothesis.settings(max_examples=40)
@hypothesis.given(plans)
def test_ledger_hooks_and_live_bytes_agree(plan: Plan) -> None:
    torch.manual_seed(0)
    model, batch = Graph(plan), _batch()
    older = [*model.parameters(), *batch]
    before = {t.untyped_storage()._cdata for t in older}

    with ledger.hooks() as packed:
        F.mse_loss(model(batch[0]), batch[1])
    tracker = Tracker(Clock())
    with tracker:
        loss = F.mse_loss(model(batch[0]), batch[1])
        gc.collect()
    alive = [record for record in tracker.storages if record.died is None and record.operator >= 0]
    walked = [entry.tensor for entry in ledger.walk([loss]).entries if entry.tensor is not None]
    assert _kinds(walked, before) == _kinds(packed, before)
    assert distinct_bytes([*walked, loss, *older]) - distinct_bytes(older) == sum(record.nbytes for record in alive)


@hypothesis.settings(max_examples=25)
@hypothesis.given(plans, st.booleans())
def test_the_peak_is_the_allocators(plan: Plan, training: bool) -> None:
    torch.manual_seed(0)
    model, batch = Graph(plan).train(training), _batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = memlab.TrainingStep(model, batch, nn.MSELoss(), optimizer)
    trace, tensors_only = memlab.measure(step), memlab.measure(step, allocator=False)

    def run() -> None:
        loss = F.mse_loss(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    run()
    assert trace.peak_bytes - resident_bytes(model, optimizer, batch) - allocator_peak(run) in (0, WRAPPED_SCALAR)
    assert tensors_only.tensor_peak_bytes == trace.tensor_peak_bytes
    assert "other" not in trace.by_category()


# -- random sums of strategies -----------------------------------------------------------------------------------------


class Stack(nn.Module):
    """Two blocks from one plan, for checkpoints; a batch norm where asked, which micro-batches change."""

    def __init__(self, plan: Plan, norm: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(Graph(plan), nn.Linear(1, WIDTH)) for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.last(self.norm(x))  # type: ignore[no-any-return]


def _optional(*choices: memlab.Strategy) -> st.SearchStrategy[memlab.Strategy]:
    return st.sampled_from([memlab.Baseline(), *choices])


@st.composite
def sums(draw: st.DrawFn) -> memlab.Strategy:
    """Techniques that can go together, added in a random order."""
    parts = [
        draw(_optional(memlab.Checkpoint(), memlab.Checkpoint("blocks.1"), memlab.Checkpoint(save=["mm", "addmm"]))),
        draw(_optional(memlab.MicroBatch(count=2), memlab.MicroBatch(count=3), memlab.MicroBatch(size=3))),
        draw(_optional(memlab.MixedPrecision("bf16"), memlab.LowPrecision("bf16"))),
        draw(_optional(memlab.OptimizerInBackward())),
    ]
    if parts[1] != memlab.Baseline():
        parts[3] = memlab.Baseline()  # it would consume each micro-batch's gradient
    return sum(draw(st.permutations(parts)), start=memlab.Baseline())


def _truth(model: nn.Module, batch: Any, counts: list[int]) -> dict[str, torch.Tensor]:
    """Gradients in float64 by a plain loop over micro-batches of these sizes."""
    model = copy.deepcopy(model).double()
    inputs, targets = (tensor.double() for tensor in batch)
    for x, y in zip(inputs.split(counts), targets.split(counts), strict=True):
        (F.mse_loss(model(x), y) * (len(x) / len(inputs))).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _apart(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> float:
    usual = float(torch.cat([g.flatten() for g in truth.values()]).norm())
    return max(float((found[name] - g).norm()) for name, g in truth.items()) / usual


@hypothesis.settings(max_examples=20)
@hypothesis.given(plans, st.booleans(), sums())
def test_gradients_are_equal_or_the_difference_is_reported(plan: Plan, norm: bool, strategy: memlab.Strategy) -> None:
    torch.manual_seed(0)
    calm = [(operator, one, two) for operator, one, two in plan if operator != "dropout"] or [("tanh", 0, 0)]
    model, batch = Stack(calm, norm), (torch.randn(6, WIDTH), torch.randn(6, 1))
    step = memlab.TrainingStep(model, batch, nn.MSELoss(), lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    row = memlab.compare(step, [strategy], repeats=0).rows[-1]
    assert row.error is None
    cut = [part for part in strategy.parts if isinstance(part, memlab.MicroBatch)]
    sizes = step.micro_batch_sizes(cut[0].count, cut[0].size) if cut else [6]
    apart = _apart(_truth(model, batch, sizes), _truth(model, batch, [6]))
    if apart > 1e-7:  # the batch norm sees other batches
        assert row.equivalent is not True
        assert row.gradient_difference is None or row.gradient_difference > 1e-9
        assert row.notes
    else:
        buffers = norm and bool(cut)
        low = any(isinstance(part, memlab.LowPrecision) for part in strategy.parts)
        assert row.gradient_difference is None or row.gradient_difference <= 1e-9
        assert row.equivalent is (False if buffers else None if low else True)
        assert row.equivalent or row.notes


@hypothesis.settings(max_examples=10)
@hypothesis.given(plans, sums())
def test_with_dropout_equal_or_reported(plan: Plan, strategy: memlab.Strategy) -> None:
    model = Stack([*plan, ("dropout", 0, 0)], norm=False)
    step = memlab.TrainingStep(model, (torch.randn(6, WIDTH), torch.randn(6, 1)), nn.MSELoss())
    strategy = sum(
        (part for part in strategy.parts if not isinstance(part, memlab.OptimizerInBackward)), start=memlab.Baseline()
    )
    row = memlab.compare(step, [strategy], repeats=0).rows[-1]
    assert row.error is None
    draws_others = any(isinstance(part, memlab.MicroBatch) for part in strategy.parts)
    if row.gradient_difference is not None:
        assert row.gradient_difference <= 1e-9  # with each draw replaced by its mean, where they differ
        assert any("other masks" in note for note in row.notes) == draws_others
    assert row.equivalent is not False


# -- values ------------------------------------------------------------------------------------------------------------


@hypothesis.given(sums())
def test_a_sum_is_what_its_repr_says(strategy: memlab.Strategy) -> None:
    again = eval(repr(strategy), {name: getattr(memlab, name) for name in memlab.__all__})
    assert again == strategy
    assert hash(again) == hash(strategy)
    assert again.label() == strategy.label()
    assert sum(reversed(strategy.parts), start=memlab.Baseline()) == strategy


def test_different_strategies_have_different_labels_in_a_comparison() -> None:
    @hypothesis.settings(max_examples=5)
    @hypothesis.given(st.lists(sums(), min_size=2, max_size=4, unique_by=repr))
    def check(strategies: list[memlab.Strategy]) -> None:
        rows = memlab.compare(step, strategies, repeats=0).rows
        labels = [row.label for row in rows]
        assert len(set(labels)) == len(labels)
        assert {repr(row.strategy) for row in rows} == {repr(s) for s in [memlab.Baseline(), *strategies]}

    model = Stack([("tanh", 0, 0)], norm=False)
    batch = torch.randn(6, WIDTH), torch.randn(6, 1)
    step = memlab.TrainingStep(model, batch, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    check()
