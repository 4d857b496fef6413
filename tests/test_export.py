"""What memlab writes for other tools says the same as the trace: to Perfetto in counters and slices, to the viewer of
memory snapshots in allocations and releases, replayed here as that viewer does."""

import gzip
import itertools
import json
import os
import pickle
import pickletools

import pytest
from torch.cuda import _memory_viz
from views_samples import EVIL, IN_BACKWARD, every_trace, step, trace

import memlab
from memlab import Checkpoint, MemlabError, MicroBatch, OptimizerInBackward, Trace
from memlab.trace import Allocation, Operator, Place
from memlab.units import MiB
from memlab.views.words import figure_summary

SIMULATED = trace((10, "parameters", 0, 3), (50, "other", 1, 2), strategy="in thought", source="simulated")
WITHOUT_OPERATORS = Trace(
    (Allocation(8, "batch", Place(), 0, None, -1), Allocation(9, "other", Place(), 2, 3, -1)), (), ()
)
ROUNDED = Trace(  # two are born in one tick, and one dies in the tick in which another is born
    (
        Allocation(1000, "activations", Place("forward", "net.a", "aten::mm"), 1, 3, 0, 0),
        Allocation(24, "rounding", Place("forward", "net.a", "aten::mm"), 1, 3, 0),
        Allocation(500, "gradients", Place("backward", "net.a", "aten::mm"), 3, None, 1, 1),
        Allocation(700, "workspace", Place("backward", "net.a", "aten::mm"), 3, 3, 1),
        Allocation(0, "temporaries", Place("backward", "net.a", "aten::mm"), 3, 4, 1, 2),
    ),
    (Operator(Place("forward", "net.a", "aten::mm"), 2, 0.1), Operator(Place("backward", "net.a", "aten::mm"), 5, 0.1)),
    (),
)
TRACES = {f"{number} {its.strategy}": its for number, its in enumerate(every_trace())} | {
    "simulated": SIMULATED,
    "without operators": WITHOUT_OPERATORS,
    "rounded": ROUNDED,
    "evil": trace((1, "batch", 0, 1), strategy=EVIL),
}
every = pytest.mark.parametrize("its", TRACES.values(), ids=TRACES.keys())


def levels(its):
    """Bytes in use after each tick, by brute force."""
    ticks = 1 + max((max(a.born, a.freed or 0) for a in its.allocations), default=0)
    return [sum(a.nbytes for a in its.alive(tick)) for tick in range(ticks)]


def distinct(values):
    """Without repetitions of the one before; what lasts no time or has no bytes shows in no file."""
    return [value for number, value in enumerate(values) if number == 0 or value != values[number - 1]]


# -- trace events ------------------------------------------------------------------------------------------------------


def events_of(its, tmp_path):
    values = json.loads(its.export(tmp_path / "x.json").read_text())
    return values["traceEvents"], values["otherData"]


@every
def test_counters_sum_to_the_memory_in_use_at_each_instant(its, tmp_path):
    events, _ = events_of(its, tmp_path)
    by_category = [event for event in events if event["ph"] == "C" and event["name"] == "memory"]
    in_all = [event for event in events if event["ph"] == "C" and event["name"] == "memory in all"]
    sums = [sum(event["args"].values()) for event in by_category]
    assert distinct([0, *sums]) == distinct([0, *levels(its)])
    assert max(sums, default=0) == its.peak_bytes
    assert [event["args"]["bytes"] for event in in_all] == sums
    assert len({tuple(event["args"]) for event in by_category}) <= 1, (
        "the same categories each time, or they do not stack"
    )
    times = [event["ts"] for event in by_category]
    assert times == sorted(set(times)), "no two changes at one time"
    at_peak = by_category[sums.index(its.peak_bytes)]["args"] if sums else {}
    assert {category: nbytes for category, nbytes in at_peak.items() if nbytes} == its.by_category()


@every
def test_slices_lie_in_one_another(its, tmp_path):
    events, _ = events_of(its, tmp_path)
    open_ = []
    for event in events:
        if event["ph"] == "X":
            begin, end = event["ts"], event["ts"] + event["dur"]
            while open_ and open_[-1] <= begin + 1e-6:
                open_.pop()
            assert event["dur"] > 0
            assert not open_ or end <= open_[-1] + 1e-6
            open_.append(end)


@every
def test_each_operator_is_a_slice_in_its_phase_and_module(its, tmp_path):
    events, _ = events_of(its, tmp_path)
    slices = [event for event in events if event["ph"] == "X"]
    found = []
    for number, event in enumerate(slices):
        following = slices[number + 1] if number + 1 < len(slices) else None
        if following is None or following["ts"] >= event["ts"] + event["dur"] - 1e-6:  # a leaf
            around = [s["name"] for s in slices if s["ts"] <= event["ts"] and s["ts"] + s["dur"] >= event["ts"] + 1e-6]
            found.append((around[0], around[-2] if len(around) > 2 else "", event["name"]))
        if len(found) == 60:
            break
    expected = []
    for operator in its.operators[:60]:
        place = operator.place
        phase = place.phase if place.phase == "optimizer" else f"{place.phase} of micro-batch {place.micro_batch + 1}"
        expected.append((phase, place.module, place.operator.removeprefix("aten::") or "operator"))
    assert found == expected


@every
def test_changes_fall_inside_of_their_operators(its, tmp_path):
    events, _ = events_of(its, tmp_path)
    counters = [event for event in events if event["name"] == "memory"]
    peak = next(event for event in events if event["ph"] == "i")
    assert peak["name"] == figure_summary(its)
    assert peak["args"] == {"bytes": its.peak_bytes, **its.by_category()}
    if counters and its.peak_bytes:
        highest = max(counters, key=lambda event: sum(event["args"].values()))
        assert peak["ts"] == highest["ts"]
        if its.operators and its.peak.tick:
            slices = [e for e in events if e["ph"] == "X" and e["ts"] < peak["ts"] < e["ts"] + e["dur"]]
            assert slices[-1]["name"] == (its.peak.operator.removeprefix("aten::") or "operator")
            assert slices[0]["name"].startswith(its.peak.phase)


def test_times_are_the_runs_or_the_operators_numbers(tmp_path):
    events, other = events_of(IN_BACKWARD, tmp_path)
    leaves = [event for event in events if event["name"] == "operator"]
    assert [event["ts"] + event["dur"] for event in leaves] == [2e5, 3e5, 4e5]
    assert "when they ended in the run" in other["time"]
    events, other = events_of(SIMULATED, tmp_path)
    leaves = [event for event in events if event["name"] == "operator"]
    assert [event["ts"] + event["dur"] for event in leaves] == [1, 2, 3]
    assert "an operator takes one microsecond" in other["time"]


def test_several_steps_are_slices_too(tmp_path):
    with memlab.record() as its:
        for _ in range(2):
            step().loss().backward()
            step().optimizer.step()
            step().optimizer.zero_grad()
    events, _ = events_of(its, tmp_path)
    assert [event["name"] for event in events if event["name"].startswith("step ")] == ["step 1", "step 2"]


def test_the_file_says_what_it_shows(tmp_path):
    its = Trace((), (), (), "a", provenance={"device": "cpu", "x": os.path})
    events, other = events_of(its, tmp_path)
    assert other["provenance"] == {"device": "cpu", "x": str(os.path)}
    names = {event["name"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {"process_name": "memlab: a, measured", "thread_name": "phases, modules, operators"}
    packed = its.export(tmp_path / "x.json.gz").read_bytes()
    assert gzip.decompress(packed) == its.export(tmp_path / "x.json").read_bytes()


def test_a_module_of_a_thousand_parts_does_no_harm(tmp_path):
    place = Place("forward", ".".join("a" * 1000), "aten::mm")
    its = Trace((Allocation(1, "other", place, 1, None, 0),), (Operator(place, 2, 0.1),), ())
    events, _ = events_of(its, tmp_path)
    assert sum(event["ph"] == "X" for event in events) < 40


# -- memory snapshots --------------------------------------------------------------------------------------------------

# What the viewer's own reader of pickles knows.
VIEWER_READS = {
    "APPEND", "APPENDS", "BINFLOAT", "BINGET", "BININT", "BININT1", "BININT2", "BINPUT", "BINUNICODE", "DICT",
    "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "FRAME", "LIST", "LONG1", "LONG_BINGET", "LONG_BINPUT", "MARK",
    "MEMOIZE", "NEWFALSE", "NEWTRUE", "NONE", "PROTO", "SETITEM", "SETITEMS", "SHORT_BINUNICODE", "STOP", "TUPLE",
    "TUPLE1", "TUPLE2", "TUPLE3",
}  # fmt: skip


def snapshot_of(its, tmp_path):
    return pickle.loads(its.export(tmp_path / "x.pickle").read_bytes())


@every
def test_replayed_the_snapshot_has_the_traces_levels(its, tmp_path):
    snapshot = snapshot_of(its, tmp_path)
    (segment,) = snapshot["segments"]
    (history,) = snapshot["device_traces"]
    alive, sums = {}, [0]
    for event in history:
        if event["action"] == "alloc":
            start, end = event["addr"], event["addr"] + event["size"]
            assert segment["address"] <= start < end <= segment["address"] + segment["total_size"] < 2**53
            assert not any(start < other + nbytes and other < end for other, nbytes in alive.items()), "they overlap"
            alive[start] = event["size"]
        elif event["action"] == "free_completed":
            assert alive.pop(event["addr"]) == event["size"]
        sums.append(sum(alive.values()))
    assert max(sums) == its.peak_bytes
    remaining = iter(distinct(sums))
    assert all(level in remaining for level in distinct(levels(its))), "each level of the trace is there, in order"
    in_use = {b["address"]: b["requested_size"] for b in segment["blocks"] if b["state"] == "active_allocated"}
    assert in_use == alive


@every
def test_blocks_tile_the_segment(its, tmp_path):
    (segment,) = snapshot_of(its, tmp_path)["segments"]
    at = segment["address"]
    for block in segment["blocks"]:
        assert block["address"] == at
        assert 0 <= block["requested_size"] <= block["size"] > 0
        at += block["size"]
    assert at == segment["address"] + segment["total_size"]
    states = [block["state"] for block in segment["blocks"]]
    assert ("inactive", "inactive") not in itertools.pairwise(states)


@every
def test_pytorchs_own_tools_read_it(its, tmp_path):
    snapshot = snapshot_of(its, tmp_path)
    alive_at_end = levels(its)[-1]
    assert "segments: 1\n" in _memory_viz.segsum(snapshot)
    assert f"total_allocated: {_memory_viz.Bytes(alive_at_end)}\n" in _memory_viz.segsum(snapshot)
    assert f"{len(snapshot['device_traces'][0])} entries" in _memory_viz.trace(snapshot)
    for view in (_memory_viz.memory, _memory_viz.segments):
        lines = view(snapshot, format_flamegraph=lambda lines: lines).splitlines()
        assert sum(int(line.rpartition(" ")[2]) for line in lines) == snapshot["segments"][0]["total_size"]
    assert "Active Memory Timeline" in _memory_viz.trace_plot(snapshot)
    assert "Allocator State History" in _memory_viz.segment_plot(snapshot)


@every
def test_the_web_viewer_can_read_it(its, tmp_path):
    content = its.export(tmp_path / "x.pkl").read_bytes()
    assert {opcode.name for opcode, _, _ in pickletools.genops(content)} <= VIEWER_READS
    (history,) = pickle.loads(content)["device_traces"]
    assert "unknown" in {event.get("category") for event in history}, "where any has a category, one must be unknown"
    times = [event["time_us"] for event in history]
    assert times == sorted(times)
    for event in history:
        assert all(frame.keys() == {"filename", "line", "name"} for frame in event["frames"])


def test_frames_tell_what_a_snapshot_has_no_field_for(tmp_path):
    place = Place("backward", "net.a", "aten::mm", 1, 2, "train.py:12 in step")
    weight = Allocation(4096, "parameters", Place(), 0, None, -1, 0, "net.a.weight", "float32", (32, 32))
    its = Trace((weight, Allocation(8, "other", place, 1, None, 0)), (Operator(place, 2, 0.1),), ())
    _, resident, made, _ = snapshot_of(its, tmp_path)["device_traces"][0]
    assert [(frame["filename"], frame["name"]) for frame in resident["frames"]] == [
        ("memlab/category", "parameters"),
        ("memlab/tensor", "float32 32x32"),
        ("memlab/phase", "start"),
        ("memlab/resident", "there before the step"),
    ]
    assert (resident["category"], resident["user_metadata"]) == ("parameters", "net.a.weight")
    assert [f"{frame['filename']}:{frame['line']}:{frame['name']}" for frame in made["frames"]] == [
        "memlab/category:0:other",
        "memlab/operator:0:aten::mm",
        "memlab/module:0:net.a",
        "memlab/micro_batch:0:2",
        "memlab/phase:0:backward",
        "memlab/step:0:3",
        "train.py:12:step",
    ]
    assert made["category"] == "unknown"


def test_addresses_are_used_again(tmp_path):
    lives = [(4, "activations", tick % 3 + 1, tick % 3 + 1) for tick in range(3)]
    (segment,) = snapshot_of(trace(*lives), tmp_path)["segments"]
    assert segment["total_size"] == 4 * MiB


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x.json", "x.json.gz", "x.pickle", "x.pkl", "X.JSON"])
def test_the_suffix_decides_and_the_file_is_whole(name, tmp_path):
    path = IN_BACKWARD.export(str(tmp_path / name))
    assert path == tmp_path / name
    assert os.listdir(tmp_path) == [name]
    assert IN_BACKWARD.export(path).read_bytes() == path.read_bytes(), "the same trace is the same file"


@pytest.mark.parametrize("name", ["x", "x.txt", "x.gz", "json", "x.json.zip"])
def test_another_suffix_is_refused(name, tmp_path):
    with pytest.raises(
        MemlabError, match=r"no tool is known for .*: \.json, \.json\.gz, \.pickle, \.pkl\. .*Trace\.save"
    ):
        IN_BACKWARD.export(tmp_path / name)
    assert not os.listdir(tmp_path)


def test_exporting_where_no_folder_is_says_so(tmp_path):
    with pytest.raises(MemlabError, match=r"cannot be saved to .*Make the folder first"):
        IN_BACKWARD.export(tmp_path / "nowhere" / "x.json")


def test_provenance_that_is_no_number_is_refused(tmp_path):
    with pytest.raises(MemlabError, match="provenance is no JSON"):
        Trace((), (), (), provenance={"x": float("nan")}).export(tmp_path / "x.json")


@pytest.mark.parametrize("strategy", [Checkpoint("blocks.*"), MicroBatch(count=2), OptimizerInBackward()], ids=str)
def test_a_strategys_recomputation_and_passes_are_slices(strategy, tmp_path):
    events, _ = events_of(memlab.measure(step(), strategy), tmp_path)
    names = {event["name"] for event in events if event["ph"] == "X"}
    phases = {name for name in names if name.partition(" ")[0] in ("forward", "backward", "recompute", "optimizer")}
    expected = {"forward of micro-batch 1", "backward of micro-batch 1", "optimizer"}
    if isinstance(strategy, Checkpoint):
        expected |= {"recompute of micro-batch 1"}
    if isinstance(strategy, MicroBatch):
        expected |= {"forward of micro-batch 2", "backward of micro-batch 2"}
    assert phases == expected
