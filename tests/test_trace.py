"""Questions to a `Trace`: against sums made by hand and by brute force over random lives."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import memlab
from memlab.trace import CATEGORIES, PHASES, Allocation, Operator, Place, SavedTensor, Trace

NOT_TENSORS = ("workspace", "rounding")


def _life(nbytes, category, born, freed, module="", phase="forward"):
    return Allocation(nbytes, category, Place(phase, module), born, freed, operator_number=born - 1)


# Three operators: ticks 1 and 2 are the forward's, 3 and 4 the backward's, 5 the optimizer's.
OPERATORS = (
    Operator(Place("forward", "net.a", "aten::mm"), tick=3, seconds=0.1),
    Operator(Place("backward", "net.b", "aten::mm_backward", micro_batch=1), tick=5, seconds=0.2),
    Operator(Place("optimizer"), tick=6, seconds=0.3),
)
BY_HAND = Trace(
    (
        _life(100, "parameters", 0, None, "net.a", "start"),
        _life(40, "activations", 1, 4, "net.a"),
        _life(7, "workspace", 2, 3, "net.b"),
        _life(50, "gradients", 3, None, "net.a"),
        _life(5, "temporaries", 5, None, "other"),
    ),
    OPERATORS,
    (),
)


def test_the_peak_by_hand():
    peak = BY_HAND.peak
    assert (peak.nbytes, peak.tick) == (190, 3)
    assert (peak.phase, peak.module, peak.operator, peak.micro_batch) == ("backward", "net.b", "aten::mm_backward", 1)
    assert [a.nbytes for a in peak.allocations] == [100, 50, 40]
    assert BY_HAND.peak_bytes == BY_HAND.tensor_peak_bytes == 190
    assert str(peak.place) == "backward of micro-batch 2 in net.b, aten::mm_backward"


def test_sums_by_hand():
    assert BY_HAND.by_category() == {"parameters": 100, "gradients": 50, "activations": 40}
    assert list(BY_HAND.by_category()) == ["parameters", "gradients", "activations"]  # in the order of CATEGORIES
    assert BY_HAND.by_category("forward") == {"parameters": 100, "activations": 40, "workspace": 7}
    assert BY_HAND.by_category("optimizer") == {"parameters": 100, "gradients": 50, "temporaries": 5}
    assert BY_HAND.by_module() == {"net.a": 190}
    assert BY_HAND.by_module("forward") == {"net.a": 140, "net.b": 7}
    assert BY_HAND.by_module("optimizer", depth=1) == {"net": 150, "other": 5}
    assert BY_HAND.by_phase() == {"forward": 147, "backward": 190, "optimizer": 155}
    assert BY_HAND.by_phase("tensor_peak") == {"forward": 140, "backward": 190, "optimizer": 155}


def test_the_timeline_by_hand():
    assert [(p.operator_number, p.nbytes, p.seconds) for p in BY_HAND.timeline()] == [
        (0, 147, 0.1), (1, 190, 0.2), (2, 155, 0.3)
    ]  # fmt: skip
    assert [p.nbytes for p in BY_HAND.timeline("activations")] == [40, 40, 0]


def test_what_belongs_to_no_module_is_named_by_its_category():
    trace = dataclasses.replace(BY_HAND, allocations=(_life(8, "batch", 0, None),))
    assert trace.by_module() == {"(batch)": 8}


def test_a_phase_without_any_allocation_has_its_bytes():
    trace = Trace(
        (_life(100, "parameters", 0, None), _life(40, "activations", 1, None)),
        (
            Operator(Place("forward"), tick=2, seconds=0.1),
            Operator(Place("optimizer"), tick=2, seconds=0.2),  # in place
            Operator(Place("forward"), tick=2, seconds=0.3),
        ),
        (),
    )
    assert [point.nbytes for point in trace.timeline()] == [140, 140, 140]
    assert trace.by_phase() == {"forward": 140, "optimizer": 140}
    assert trace.by_category("optimizer") == {"parameters": 100, "activations": 40}


def test_operators_that_allocate_elsewhere_are_on_the_timeline():
    with memlab.record() as trace:
        kept = torch.ones(3)
        for _ in range(3):
            torch.ones(3, device="meta")
    assert [point.nbytes for point in trace.timeline()] == [12, 12, 12, 12]
    del kept


def test_an_instant_that_is_none_lists_those_that_are():
    with pytest.raises(
        memlab.MemlabError, match=r"at='recompute': choose \"peak\", \"tensor_peak\" or a phase that ran"
    ):
        BY_HAND.by_category("recompute")
    with pytest.raises(memlab.MemlabError, match='"forward", "backward", "optimizer"'):
        BY_HAND.by_module("top")
    with pytest.raises(memlab.MemlabError, match='there are "allocations", "saved" and "timeline"'):
        BY_HAND.to_frame("rows")


# -- saved tensors -----------------------------------------------------------------------------------------------------


def _saved(storage, nbytes, kind="activations", entry=0, **options):
    return SavedTensor("", "Mul", "Mul.self", (1,), "float32", nbytes, storage, nbytes, kind, entry=entry, **options)


def test_saved_bytes_are_those_of_the_largest_entry_each_storage_once():
    saved = (
        _saved(0, 10), _saved(0, 10), _saved(1, 5, "weight copies"),
        _saved(2, 100, "parameters"), _saved(3, 100, "batch"), _saved(None, 0, state="recomputed"),
        _saved(0, 10, entry=1), _saved(4, 7, "checkpoint inputs", entry=1),
        _saved(5, 90, "offloaded", entry=1),
    )  # fmt: skip
    assert dataclasses.replace(BY_HAND, saved=saved).saved_bytes == 17
    assert BY_HAND.saved_bytes == 0


# -- any trace ---------------------------------------------------------------------------------------------------------


@st.composite
def traces(draw):
    """Lives as they are noted: one allocation or release a tick, releases after the allocations of their operator."""
    lives, operators, tick = [[draw(st.integers(1, 50)), 0, None]], [], 1
    for number in range(draw(st.integers(1, 6))):
        allocated = draw(st.integers(number == 0, 3))
        for _ in range(allocated):
            lives.append([draw(st.integers(1, 50)), tick, None])
            tick += 1
        for life in lives if allocated else ():
            if life[2] is None and draw(st.booleans()):
                life[2] = tick
                tick += 1
        operators.append(Operator(Place(draw(st.sampled_from(PHASES)), draw(st.sampled_from("ab"))), tick, number / 10))
    names = st.sampled_from(["a", "b", "a.c", ""])
    return Trace(
        tuple(_life(size, draw(st.sampled_from(CATEGORIES)), born, freed, draw(names)) for size, born, freed in lives),
        tuple(operators),
        (),
    )


@hypothesis.settings(max_examples=50)
@hypothesis.given(traces())
def test_every_sum_is_over_the_same_allocations(trace):
    def alive(tick, tensors=False):
        return [
            a
            for a in trace.allocations
            if a.born <= tick and (a.freed is None or tick < a.freed) and not (tensors and a.category in NOT_TENSORS)
        ]

    last = max(max(a.born, a.freed or 0) for a in trace.allocations)
    everywhere = [sum(a.nbytes for a in alive(tick)) for tick in range(last + 1)]
    assert trace.peak_bytes == max(everywhere)
    assert trace.tensor_peak_bytes == max(sum(a.nbytes for a in alive(tick, True)) for tick in range(last + 1))
    assert sorted(map(id, trace.peak.allocations)) == sorted(map(id, alive(trace.peak.tick)))
    assert sum(trace.by_category().values()) == sum(trace.by_module().values()) == trace.peak_bytes
    assert sum(trace.by_module(depth=1).values()) == trace.peak_bytes
    assert sum(trace.by_category("tensor_peak").values()) == trace.tensor_peak_bytes
    assert max(point.nbytes for point in trace.timeline()) == trace.peak_bytes
    assert max(trace.by_phase().values()) == trace.peak_bytes
    for phase, top in trace.by_phase().items():
        assert sum(trace.by_category(phase).values()) == top


@hypothesis.settings(max_examples=50)
@hypothesis.given(traces(), st.data())
def test_steps_cover_the_trace(trace, data):
    count = len(trace.operators)
    ends = data.draw(st.sets(st.integers(1, count), min_size=1))
    whole = dataclasses.replace(trace, step_ends=(*sorted(ends),))
    if len(ends) == 1:
        assert whole.steps == (whole,)
        return
    assert len(whole.steps) == len(ends)
    assert sum(len(part.operators) for part in whole.steps) == max(ends)
    if max(ends) == count:
        assert max(part.peak_bytes for part in whole.steps) == whole.peak_bytes
    first = 0
    for part, end in zip(whole.steps, sorted(ends), strict=True):
        assert [point.nbytes for point in part.timeline()] == [p.nbytes for p in whole.timeline()[first:end]]
        first = end


# -- frames ------------------------------------------------------------------------------------------------------------


def test_frames_hold_every_row():
    trace = dataclasses.replace(BY_HAND, saved=(_saved(0, 10),))
    allocations = trace.to_frame()
    assert allocations.nbytes.tolist() == [a.nbytes for a in trace.allocations]
    assert {"category", "phase", "module", "operator", "micro_batch", "born", "freed", "name"} <= set(
        allocations.columns
    )
    assert trace.to_frame("saved").slot.tolist() == ["Mul.self"]
    assert trace.to_frame("timeline").nbytes.tolist() == [point.nbytes for point in trace.timeline()]


def test_a_trace_is_a_value():
    with pytest.raises(dataclasses.FrozenInstanceError):
        BY_HAND.source = "simulated"
    assert dataclasses.replace(BY_HAND) == BY_HAND
