"""Which storages the tracker sees live and die, against counts made by hand."""

import gc
import itertools

import pytest
import torch

from memlab.clock import Clock
from memlab.tracker import Tracker, parts
from tests.truth import distinct_bytes


def _tracked(run):
    """The tracker after `run`, and what `run` returned, which keeps its tensors alive."""
    tracker = Tracker(Clock())
    with tracker:
        kept = run()
    return tracker, kept


def _lives(run):
    """(bytes, operator number, died?) of each storage."""
    tracker, kept = _tracked(run)
    lives = [(s.nbytes, s.operator, s.died is not None) for s in tracker.storages]
    del kept
    return lives


def _running(tracker):
    """Bytes alive after each entry of the log."""
    sizes = [s.nbytes for s in tracker.storages]
    return list(itertools.accumulate(sizes[n - 1] if n > 0 else -sizes[-n - 1] for n in tracker.log))


def test_births_and_deaths_in_order():
    def run():
        a = torch.ones(100)
        b = a + a
        del a
        return b * b

    tracker, result = _tracked(run)
    assert _running(tracker) == [400, 800, 400, 800, 400]
    assert [s.operator for s in tracker.storages] == [0, 1, 2]
    assert [s.died is None for s in tracker.storages] == [False, False, True]
    del result
    assert tracker.storages[2].died == 5


def test_a_storage_dies_when_its_last_view_goes():
    def run():
        view = torch.ones(10, 10).t()[3:5].unsqueeze(0)
        return view[..., :1]

    assert _lives(run) == [(400, 0, False)]


def test_views_are_no_operators_and_own_nothing():
    tracker, _ = _tracked(lambda: torch.ones(4, 4).view(16).unsqueeze(0).expand(3, 16).detach())
    assert [row[0].name() for row in tracker.operators] == ["aten::ones"]
    assert [s.nbytes for s in tracker.storages] == [64]


def test_autograd_alone_keeps_a_storage_alive():
    x = torch.ones(100, requires_grad=True)
    tracker, y = _tracked(lambda: (x.exp() * 2).sum())
    assert [s.died is None for s in tracker.storages] == [True, False, True]  # exp's result, product, sum
    y.backward()
    del y
    assert all(s.died is not None for s in tracker.storages)


@pytest.mark.parametrize(
    "write",
    [
        lambda old: old.add_(1),
        lambda old: torch.add(old, 1, out=old),
        lambda old: torch._foreach_mul_([old], 2.0),
        lambda old: torch.nn.functional.relu(old, inplace=True),
        lambda old: old[2:4].zero_(),
    ],
)
def test_what_is_written_into_was_there_before(write):
    old = torch.ones(100)
    assert _lives(lambda: write(old)) == [(400, -1, False)]


def test_a_storage_that_grows_is_released_and_made_anew():
    def run():
        out = torch.empty(0)
        torch.add(torch.ones(100), 1, out=out)
        out.resize_(300)
        return out

    tracker, _ = _tracked(run)
    assert [s.nbytes for s in tracker.storages if s.died is None] == [1200]
    assert sorted(s.nbytes for s in tracker.storages) == [0, 400, 400, 1200]


def test_resizing_keeps_what_a_storage_is_known_as():
    old = torch.ones(10)
    tracker = Tracker(Clock())
    tracker.meet_outside(old)[0].role = "batch"
    with tracker:
        old.resize_(1000)
    assert [(s.nbytes, s.role) for s in tracker.storages] == [(40, "batch"), (4000, "batch")]


def test_what_python_makes_of_numbers_is_seen():
    assert _lives(lambda: torch.tensor([1.0, 2.0, 3.0])) == [(12, 0, False)]


def test_a_cast_knows_what_it_is_a_cast_of():
    weight = torch.ones(10)
    tracker = Tracker(Clock())
    (known,) = tracker.meet_outside(weight)
    with tracker:
        low = weight.bfloat16()
    assert [s.cast_of for s in tracker.storages] == [None, known.number]
    del low


def _compressed(make, *entry):
    return make(torch.tensor([0, 1, 3]), torch.tensor([0, 0, 1]), torch.ones(3, *entry), check_invariants=True)


LAYOUTS = {
    "coo": lambda: torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 0]]), torch.ones(2), check_invariants=True),
    "csr": lambda: _compressed(torch.sparse_csr_tensor),
    "csc": lambda: _compressed(torch.sparse_csc_tensor),
    "bsr": lambda: _compressed(torch.sparse_bsr_tensor, 2, 2),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged),
}
BYTES = {
    "coo": 2 * (2 * 8 + 4),  # two int64 indices and a float32 value each
    "csr": 3 * 8 + 3 * 8 + 3 * 4,
    "csc": 3 * 8 + 3 * 8 + 3 * 4,
    "bsr": 3 * 8 + 3 * 8 + 3 * 16,
    "nested": 5 * 4 * 4,
    "jagged": 5 * 4 * 4 + 3 * 8,  # and the offsets
}


@pytest.mark.filterwarnings("ignore:(Sparse [BC]S|The PyTorch API of nested)")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_of_every_layout(layout):
    assert distinct_bytes(parts(LAYOUTS[layout]())) == BYTES[layout]
    tracker, tensor = _tracked(LAYOUTS[layout])
    gc.collect()
    assert sum(s.nbytes for s in tracker.storages if s.died is None) == BYTES[layout]
    del tensor
    gc.collect()
    assert all(s.died is not None for s in tracker.storages)


def test_inside_transforms_the_wrapped_tensor_counts():
    weight = torch.ones(5)
    lives = _lives(lambda: torch.func.grad(lambda w: (w * w).sum())(weight))
    assert all(nbytes <= 20 for nbytes, _, _ in lives)
    assert [nbytes for nbytes, _, died in lives if not died] == [20]


def test_a_forgotten_tracker_holds_and_hears_nothing():
    tracker, kept = _tracked(lambda: torch.ones(10))
    tracker.forget()
    del kept
    assert tracker.storages[0].died is None
