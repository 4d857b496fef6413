"""A memory snapshot becomes a trace with its timeline and places; and no file makes `memlab.load` do anything but read
or refuse."""

import gzip
import os
import pickle
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.cuda import _memory_viz
from views_samples import IN_BACKWARD, every_trace, measured, trace

import memlab
from memlab import Checkpoint, MemlabError, MicroBatch, Trace
from memlab.files.pickles import plain_values
from memlab.trace import Allocation, Operator, Place
from memlab.units import MiB

# -- there and back ----------------------------------------------------------------------------------------------------


def distinct(values):
    return [value for number, value in enumerate(values) if number == 0 or value != values[number - 1]]


def levels(its):
    ticks = 1 + max((max(a.born, a.freed or 0) for a in its.allocations), default=0)
    return distinct([sum(a.nbytes for a in its.alive(tick)) for tick in range(ticks)])


@pytest.mark.parametrize("number", range(len(every_trace())))
def test_a_trace_comes_back_from_its_snapshot(number, tmp_path):
    its = every_trace()[number]
    back = memlab.load(its.export(tmp_path / "x.pickle"))
    assert back.peak_bytes == its.peak_bytes
    assert back.by_category() == its.by_category()
    assert back.by_module() == its.by_module()
    assert (back.strategy, back.source, back.allocator) == (its.strategy, its.source, its.allocator)
    remaining = iter(levels(back))
    assert all(level in remaining for level in levels(its))
    if its.operators and number > 2:  # each tick of a measured one is one event
        assert levels(back) == levels(its)
        assert back.by_phase() == its.by_phase()
        assert back.peak.place == its.peak.place
    assert [(a.nbytes, a.category, a.place, a.name) for a in sorted_(back)] == [
        (a.nbytes, a.category, a.place, a.name) for a in sorted_(its)
    ]


def sorted_(its):
    lasting = [a for a in its.allocations if a.nbytes and a.born != a.freed]
    return sorted(lasting, key=lambda a: (a.born, a.nbytes, a.name, a.category))


def test_lines_of_the_source_come_back(tmp_path):
    with memlab.record() as its:
        kept = torch.ones(1000)
        kept = kept * 2
    sources = {
        "train.py:12 in step",
        "no line at all",
        "a b.py:7 in <module>",
        "x:99999999999 in f",
        "torch/x.py:3 in f",
    }
    places = [Place("forward", source=source) for source in sorted(sources)]
    lives = tuple(Allocation(8, "other", place, tick, None, 0) for tick, place in enumerate(places, 1))
    by_hand = Trace(lives, tuple(Operator(a.place, a.born + 1, 0.1) for a in lives), ())
    for one in (its, by_hand):
        back = memlab.load(one.export(tmp_path / "x.pkl"))
        assert {a.place.source for a in back.allocations} == {a.place.source for a in one.allocations}


def test_a_simulated_trace_comes_back_as_one(tmp_path):
    told = {"source": "simulated", "provenance": {"device": "cuda"}, "absent": ("the context",), "notes": ("a note",)}
    its = trace((10, "parameters", 0, 3), strategy="in thought", **told)
    back = memlab.load(its.export(tmp_path / "x.pickle"))
    assert (back.source, back.strategy, back.provenance) == ("simulated", "in thought", {"device": "cuda"})
    assert (back.absent[0], back.notes) == ("the context", ("a note",))
    assert "what autograd saved" in back.absent[1]


def test_what_was_loaded_can_be_saved_and_seen(tmp_path):
    loaded = load(real(), tmp_path)
    assert memlab.load(loaded.save(tmp_path / "x")) == loaded
    assert "CUDA memory snapshot" in str(loaded)
    assert "backward" in loaded.explain()
    assert loaded.export(tmp_path / "x.json").stat().st_size > 100


def test_a_compressed_snapshot_is_read_too(tmp_path):
    path = tmp_path / "x.pickle.gz"
    path.write_bytes(gzip.compress(pickle.dumps(real())))
    assert memlab.load(path) == load(real(), tmp_path)


# -- what PyTorch writes -----------------------------------------------------------------------------------------------
# The fields, their order and their types are those of torch/csrc/cuda/Module.cpp in PyTorch 2.11 to 2.13.

BASE = 0x7F1200000000
TORCH = "/usr/local/lib/python3.12/dist-packages/torch"


def frame(filename, line, name):
    return {"name": name, "filename": filename, "line": line}


MAIN = frame("/content/train.py", 40, "<module>")
LINEAR = [
    frame(f"{TORCH}/nn/modules/linear.py", 134, "forward"),
    frame(f"{TORCH}/nn/modules/module.py", 1780, "_call_impl"),
    frame("/content/model.py", 7, "forward"),
    frame(f"{TORCH}/nn/modules/module.py", 1780, "_call_impl"),
]
STEP = [frame(f"{TORCH}/optim/adamw.py", 90, "step"), frame(f"{TORCH}/optim/optimizer.py", 517, "wrapper")]
ENGINE = [
    frame("??", 0, "torch::CapturedTraceback::gather(bool, bool, bool)"),
    frame("??", 0, "at::_ops::empty_strided::call(c10::ArrayRef<c10::SymInt>)"),
    frame("/pytorch/aten/src/ATen/ops.cpp", 0, "at::_ops::mm::redispatch(c10::DispatchKeySet, at::Tensor const&)"),
    frame("/pytorch/torch/csrc/autograd/engine.cpp", 0, "torch::autograd::Engine::evaluate_function(...)"),
]


def event(action, offset, size, frames=None, time=0, **more):
    found = {} if frames is None else {"frames": frames}
    where = "device_free" if action == "oom" else "addr"
    found |= {"action": action, where: offset if action == "oom" else BASE + offset, "size": size, "stream": 0}
    return found | {"time_us": 1_700_000_000_000_000 + time, "compile_context": "N/A", "user_metadata": ""} | more


def block(offset, size, asked, state="active_allocated", frames=()):
    shown = {"address": BASE + offset, "size": size, "requested_size": asked, "state": state}
    return shown | {"frames": list(frames)}


def segment(blocks, device=0, address=BASE, **more):
    total = sum(block["size"] for block in blocks)
    active = sum(block["size"] for block in blocks if block["state"] == "active_allocated")
    found = {"device": device, "address": address, "total_size": total, "allocated_size": active}
    found |= {"active_size": active, "requested_size": active, "stream": 0, "segment_type": "large"}
    found |= {"segment_pool_id": (0, 0), "is_expandable": False, "frames": [], "blocks": blocks}
    return found | more


def snapshot(history, segments, devices=1, device=0):
    traces = [[] for _ in range(devices)]
    traces[device] = history
    settings = {
        "PYTORCH_CUDA_ALLOC_CONF": "",
        "max_split_size": -1,
        "garbage_collection_threshold": 0.0,
        "expandable_segments": False,
        "roundup_power2_divisions": {"1": 0, "2": 0},
    }
    made = {"segments": segments, "device_traces": traces, "allocator_settings": settings}
    return made | {"external_annotations": []}


def real():
    """A weight from before the history; an activation, a gradient, an update; one failure; what is left in the end."""
    step = [*STEP, frame("/content/train.py", 30, "train"), MAIN]
    history = [
        event("free_completed", 8192, 100),
        event("segment_alloc", 4096, 20480, [MAIN]),
        event("alloc", 4096, 4000, [*LINEAR, frame("/content/train.py", 20, "train"), MAIN], 10),
        event("alloc", 8192, 3000, ENGINE, 20, user_metadata="layer 1"),
        event("free_requested", 4096, 4000, ENGINE, 30),
        event("free_completed", 4096, 4000, ENGINE, 31),
        event("free_requested", 2048, 700, [], 40),
        event("alloc", 4096, 1000, step, 50),
        event("oom", 12345, 50 * MiB, step, 60),
        event("free_requested", 4096, 1000, step, 70),
        event("free_completed", 4096, 1000, step, 71),
        event("segment_free", 2**20, 4096, [MAIN], 75),
        event("snapshot", 0, 0, None, 80),
    ]
    blocks = [block(0, 2048, 2000), block(2048, 2048, 700, "active_pending_free"), block(4096, 4096, 1, "inactive")]
    blocks += [block(8192, 3072, 3000, frames=ENGINE), block(11264, 512, 0, "inactive")]
    return snapshot(history, [segment(blocks)])


def load(values, tmp_path, protocol=4):
    path = tmp_path / "dump.pickle"
    path.write_bytes(pickle.dumps(values, protocol))
    return memlab.load(path)


def test_pytorchs_own_tools_read_what_the_tests_take_for_real():
    assert "Summary" in _memory_viz.segsum(real())
    assert "cudaMalloc" in _memory_viz.trace(real())


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_a_snapshot_of_cuda(protocol, tmp_path):
    its = load(real(), tmp_path, protocol)
    assert (its.source, its.allocator, its.provenance["device"]) == ("measured", True, "cuda")
    assert its.peak_bytes == 2000 + 700 + 4000 + 3000
    assert str(its.peak.place) == "backward, aten::mm"
    assert its.by_category() == {"other": its.peak_bytes}
    assert its.by_phase() == {"forward": 6700, "backward": 9700, "optimizer": 6000}
    assert levels(its) == [2700, 6700, 9700, 5700, 5000, 6000, 5000]
    lived = [(a.nbytes, a.place.phase, a.place.source, a.born, a.freed, a.name) for a in its.allocations]
    assert sorted(lived) == sorted(
        [
            (2000, "start", None, 0, None, ""),
            (700, "start", None, 0, 4, ""),
            (4000, "forward", "model.py:7 in forward", 1, 3, ""),
            (3000, "backward", None, 2, None, "layer 1"),
            (1000, "optimizer", "train.py:30 in train", 5, 6, ""),
        ]
    )
    assert [operator.seconds for operator in its.operators] == pytest.approx([0, 30e-6, 60e-6])
    absent, notes = " ".join(its.absent), " ".join(its.notes)
    assert "categories: the snapshot has none" in absent
    assert "the beginning: of 1 released blocks the history lacks the allocation" in absent
    assert "out of memory at train.py:30 in train: 50.0 MiB requested, 12.1 KiB free" in notes
    assert "reserved from the device: 11.5 KiB in the end" in notes


def stacks(kind):
    """Stacks of PyTorch's, innermost first, with the phase they show."""
    user = [frame("/content/train.py", 3, "train"), MAIN]
    checkpoint = f"{TORCH}/utils/checkpoint.py"
    engine_call = [
        frame(f"{TORCH}/autograd/graph.py", 841, "_engine_run_backward"),
        frame(f"{TORCH}/autograd/__init__.py", 364, "backward"),
        frame(f"{TORCH}/_tensor.py", 648, "backward"),
    ]
    return {
        "a module": ("forward", [*LINEAR, *user]),
        "bare code": ("forward", user),
        "the CPU's engine, called from the user's thread": ("backward", [*engine_call, *user]),
        "an engine's thread without Python": ("backward", []),
        "C++ frames of the engine": ("backward", ENGINE),
        "a function of the user's in an engine's thread": (
            "backward",
            [frame("/content/ops.py", 9, "backward"), frame(f"{TORCH}/autograd/function.py", 311, "apply")],
        ),
        "a checkpoint in an engine's thread": (
            "recompute",
            [*LINEAR, frame(checkpoint, 1124, "unpack_hook")],
        ),
        "modules in backward": ("recompute", [*LINEAR, *engine_call, *user]),
        "the backward inside a reentrant checkpoint": ("backward", [*engine_call, frame(checkpoint, 320, "backward")]),
        "an optimizer": ("optimizer", [*STEP, *user]),
        "a scheduler": ("forward", [frame(f"{TORCH}/optim/lr_scheduler.py", 1, "step"), *user]),
        "a closure of an optimizer's": ("forward", [*LINEAR, *user[:1], *STEP, *user]),
        "Windows": ("optimizer", [frame(r"C:\Python312\Lib\site-packages\torch\optim\sgd.py", 1, "step"), *user]),
    }[kind]


@pytest.mark.parametrize(
    "kind",
    [
        "a module",
        "bare code",
        "the CPU's engine, called from the user's thread",
        "an engine's thread without Python",
        "C++ frames of the engine",
        "a function of the user's in an engine's thread",
        "a checkpoint in an engine's thread",
        "modules in backward",
        "the backward inside a reentrant checkpoint",
        "an optimizer",
        "a scheduler",
        "a closure of an optimizer's",
        "Windows",
    ],
)
def test_the_stack_tells_the_phase(kind, tmp_path):
    phase, frames = stacks(kind)
    history = [event("alloc", 0, 512, [MAIN]), event("alloc", 512, 512, frames)]
    assert load(snapshot(history, []), tmp_path).allocations[1].place.phase == phase


@pytest.mark.parametrize(
    ("filename", "mine"),
    [
        ("/content/train.py", True),
        ("/tmp/ipykernel_1/123.py", True),
        ("<ipython-input-3-abc>", True),
        (r"C:\Users\me\train.py", True),
        ("/home/me/torchbench/train.py", True),
        (f"{TORCH}/functional.py", False),
        ("/home/me/pytorch/torch/functional.py", False),
        ("/opt/conda/lib/python3.11/site-packages/transformers/trainer.py", False),
        ("/opt/conda/lib/python3.13t/threading.py", False),
        ("<frozen runpy>", False),
        ("<eval_with_key>.3", False),
        ("/pytorch/aten/src/ATen/core.cpp", False),
        ("??", False),
    ],
)
def test_the_line_is_the_users(filename, mine, tmp_path):
    history = [event("alloc", 0, 512, [frame(filename, 5, "f"), MAIN])]
    source = load(snapshot(history, []), tmp_path).allocations[0].place.source
    assert source == (
        f"{filename.replace(chr(92), '/').rpartition('/')[2]}:5 in f" if mine else "train.py:40 in <module>"
    )


def test_without_stacks_nothing_is_guessed(tmp_path):
    for frames in (None, []):
        history = [event("alloc", 0, 512, frames)]
        its = load(snapshot(history, [segment([block(0, 512, 512)])]), tmp_path)
        assert its.by_phase() == {"forward": 512}
        assert "places: the snapshot has no stacks" in " ".join(its.absent)


def test_without_a_history_what_is_in_memory_is_there(tmp_path):
    its = load(snapshot([], [segment([block(0, 1024, 1000), block(1024, 1024, 0, "inactive")])]), tmp_path)
    assert its.peak_bytes == 1000
    assert its.operators == ()
    assert "1000 B" in str(its)


def test_an_old_snapshot_has_its_frames_in_the_blocks_history(tmp_path):
    old = {"size": 1024, "state": "active_allocated", "history": [{"addr": BASE, "real_size": 1000, "frames": [MAIN]}]}
    its = load(snapshot([event("alloc", 4096, 512, [MAIN])], [segment([old])]), tmp_path)
    assert [(a.nbytes, a.place.source) for a in its.allocations] == [
        (512, "train.py:40 in <module>"),
        (1000, "train.py:40 in <module>"),
    ]


def test_of_several_devices_the_busiest_is_read(tmp_path):
    two = snapshot([event("alloc", 0, 512, [MAIN])] * 2, [segment([block(0, 512, 512)], 2)], devices=4, device=2)
    two["device_traces"][1] = [event("alloc", 0, 999, [MAIN])]
    two["segments"].append(segment([block(0, 999 * 512, 999)], 1))
    its = load(two, tmp_path)
    assert its.peak_bytes == 512
    assert its.notes[0] == "this is device 2, which has the most events; there are events of 1 too"
    assert its.provenance["device_index"] == 2


def test_a_release_that_the_history_lacks_is_made_up_for(tmp_path):
    history = [event("alloc", 0, 512, [MAIN]), event("alloc", 0, 700, [MAIN])]
    its = load(snapshot(history, []), tmp_path)
    assert [(a.born, a.freed) for a in its.allocations] == [(1, 2), (2, None)]
    assert "the release of 1 blocks: something else was allocated in their place" in its.absent


def test_an_unknown_action_is_named(tmp_path):
    its = load(snapshot([event("defragment", 0, 512), event("alloc", 0, 512)], []), tmp_path)
    assert "events of kinds that memlab does not know: defragment" in its.absent


def test_categories_of_the_profilers_timeline_are_ours(tmp_path):
    names = ["parameter", "gradient", "optimizer_state", "input", "activation", "temporary", "autograd_detail"]
    history = [event("alloc", 512 * n, 512, [MAIN], category=name) for n, name in enumerate([*names, "unknown"])]
    its = load(snapshot(history, []), tmp_path)
    assert [a.category for a in its.allocations] == [
        "parameters", "gradients", "optimizer state", "batch", "activations", "temporaries", "other", "other",
    ]  # fmt: skip
    assert not any(sentence.startswith("categories") for sentence in its.absent)


def test_a_timeline_that_pytorchs_profiler_made_is_read(tmp_path):
    """`_memory_viz.profile_plot` makes a snapshot of a run on any device; this is a file that memlab did not shape."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(
        activities=activities, profile_memory=True, record_shapes=True, with_stack=True
    ) as profile:
        model(torch.randn(32, 64)).sum().backward()
    made = _memory_viz._profile_to_snapshot(profile)
    its = load(made, tmp_path)
    alive, highest = 0, 0
    older = sum(b["size"] for s in made["segments"] for b in s["blocks"] if b["state"] == "active_allocated")
    (history,) = [history for history in made["device_traces"] if history]
    for one in history:
        alive += {"alloc": one["size"], "free_requested": -one["size"]}.get(one["action"], 0)
        highest = max(highest, alive)
    assert its.peak_bytes == older - alive + highest  # what was there before: there in the end and not by these events


# -- what strangers write ----------------------------------------------------------------------------------------------


def refused(content, tmp_path):
    path = tmp_path / "stranger.pickle"
    path.write_bytes(content)
    with pytest.raises(MemlabError) as caught:
        memlab.load(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 400
    return str(caught.value)


class Trap:
    def __init__(self, function, *arguments):
        self.made = function, arguments

    def __reduce__(self):
        return self.made


class Persistent(pickle.Pickler):
    def persistent_id(self, its):
        return "x" if its == 1 else None


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("function", [os.system, eval, os.mkdir], ids=["system", "eval", "mkdir"])
def test_nothing_is_run(function, protocol, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argument = {os.system: "touch sprung", eval: "open('sprung', 'w')", os.mkdir: "sprung"}[function]
    hidden = real() | {"external_annotations": [Trap(function, argument)]}
    for values in (Trap(function, argument), hidden):
        assert "no memory snapshot needs" in refused(pickle.dumps(values, protocol), tmp_path)
    assert os.listdir(tmp_path) == ["stranger.pickle"]


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"\x80\x02cos\nsystem\n.", id="GLOBAL"),
        pytest.param(b"\x80\x04\x8c\x02os\x8c\x06system\x93.", id="STACK_GLOBAL"),
        pytest.param(b"\x80\x02(S'x'\nios\nsystem\n.", id="INST"),
        pytest.param(b"\x80\x02(cos\nsystem\nS'x'\no.", id="OBJ"),
        pytest.param(b"\x80\x02Px\n.", id="PERSID"),
        pytest.param(b"\x80\x02\x82\x01.", id="EXT1"),
        pytest.param(b"\x80\x02}}b.", id="BUILD"),
        pytest.param(b"\x80\x05\x96" + b"\xff" * 8 + b".", id="BYTEARRAY8"),
        pytest.param(b"\x80\x02\x8b\xff\xff\xff\x7f.", id="LONG4"),
        pytest.param(b"\x80\x02I" + b"9" * 100_000 + b"\n.", id="INT"),
        pytest.param(b"\x80\x04\x8f.", id="EMPTY_SET"),
    ],
)
def test_an_instruction_that_no_snapshot_needs_ends_the_reading(content, tmp_path):
    assert "is an instruction (0x" in refused(content, tmp_path)


def nested(opening, closing, depth):
    return b"\x80\x04" + opening * depth + closing * (depth - 1) + b"."


@pytest.mark.parametrize(
    ("content", "why"),
    [
        pytest.param(nested(b"]", b"a", 100_000), "a list, where a dict", id="lists in lists"),
        pytest.param(b"\x80\x04)" + b"\x85" * 100_000 + b".", "a tuple, where a dict", id="tuples in tuples"),
        pytest.param(b"\x80\x04})" + b"\x85" * 100_000 + b"Ns.", "the key a tuple", id="a key that hashes for ever"),
        pytest.param(b"\x80\x04)" + b"\x94h\x00\x86" * 60 + b".", "a tuple, where a dict", id="billions of laughs"),
        pytest.param(b"\x80\x04]\x94h\x00a.", "a list, where a dict", id="a list in itself"),
        pytest.param(b"\x80\x04}r\xff\xff\xff\xff.", 'has no "device_traces"', id="a note under a high number"),
        pytest.param(b"\x80\x04X\xff\xff\xff\xff.", "cut short", id="text of 4 GB"),
        pytest.param(b"\x80\x04\x95" + b"\xff" * 8 + b"}.", 'has no "device_traces"', id="a frame without end"),
        pytest.param(b"\x80\x04\x8a\xff" + b"\xff" * 255 + b".", "a number of 255 bytes", id="a number of 2,040 bits"),
        pytest.param(b"\x80\x04" + b"}" * 310_000 + b".", "more than 300,000 lists", id="many dicts"),
        pytest.param(b"\x80\x04" + b"(" * 310_000 + b".", "more than 300,000", id="many marks"),
        pytest.param(b"\x80\x04N" + b"\x94" * 310_000 + b".", "more than 300,000", id="many notes"),
        pytest.param(b"\x80\x04e.", "cut short", id="an append to nothing"),
        pytest.param(b"\x80\x04}(Nu.", "cut short", id="a key without a value"),
        pytest.param(b"\x80\x04h\x07.", "cut short", id="a note that was never made"),
        pytest.param(b"\x80", "cut short", id="one byte"),
        pytest.param(b"\x80\x04.", "cut short", id="nothing"),
        pytest.param(b"\x80\x04}Na.", "appends to a dict", id="a list that is none"),
        pytest.param(b"\x80\x04]NNs.", "sets items of a list", id="a dict that is none"),
    ],
)
def test_a_bomb_does_not_go_off(content, why, tmp_path, monkeypatch):
    monkeypatch.setattr("memlab.files.pickles._MOST", 300_000)
    assert why in refused(content, tmp_path)


def test_a_pickle_that_is_too_long_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr("memlab.files.store.LONGEST", 1000)
    assert "longer than 1,000 bytes" in refused(b"\x80" + b"\x00" * 2000, tmp_path)


def test_a_persistent_reference_is_refused(tmp_path):
    with (tmp_path / "x").open("wb") as file:
        Persistent(file, 4).dump([1])
    assert "no memory snapshot needs" in refused((tmp_path / "x").read_bytes(), tmp_path)


@pytest.mark.parametrize("kept", [1, 2, 10, 100, -1, -50])
def test_a_snapshot_cut_short(kept, tmp_path):
    assert "cut short" in refused(pickle.dumps(real(), 4)[:kept], tmp_path)


CYCLE: list = []
CYCLE.append(CYCLE)
SAID = {"source": "measured", "strategy": "", "device": "", "allocator": True, "absent": [], "notes": []}
HISTORY, SEGMENT = ("device_traces", 0), ("segments", 0)


@pytest.mark.parametrize(
    ("where", "value", "why"),
    [
        (("segments",), ..., 'has no "segments"'),
        (("segments",), {}, '["segments"] is a dict, where list'),
        (("device_traces",), 3, '["device_traces"] is 3, where list'),
        (HISTORY, "x", '"device_traces"[0] is \'x\''),
        ((*HISTORY, 2), None, "device_traces[0][2] is None, where a dict"),
        ((*HISTORY, 2), CYCLE, "device_traces[0][2] is a list"),
        ((*HISTORY, 2, "action"), ..., 'device_traces[0][2] has no "action"'),
        ((*HISTORY, 2, "action"), 7, '["action"] is 7, where str'),
        ((*HISTORY, 2, "size"), -1, '["size"] is -1, where a number from 0'),
        ((*HISTORY, 2, "size"), 2**70, '["size"] is a number of 71 bits'),
        ((*HISTORY, 2, "size"), 1.5, '["size"] is 1.5, where int'),
        ((*HISTORY, 2, "size"), True, '["size"] is True, where int'),
        ((*HISTORY, 2, "addr"), "0", "[\"addr\"] is '0', where int"),
        ((*HISTORY, 2, "addr"), -5, '["addr"] is -5'),
        ((*HISTORY, 2, "time_us"), None, '["time_us"] is None'),
        ((*HISTORY, 2, "frames"), {}, '["frames"] is a dict'),
        ((*HISTORY, 2, "frames"), CYCLE, '["frames"][0] is a list'),
        ((*HISTORY, 2, "frames", 0, "line"), -1, '["frames"][0]["line"] is -1'),
        ((*HISTORY, 2, "frames", 0, "name"), None, '["frames"][0]["name"] is None'),
        ((*HISTORY, 2, "frames", 0, "filename"), ..., '["frames"][0] has no "filename"'),
        ((*HISTORY, 2, "frames", 0), frame("memlab/phase", 0, "sideways"), "memlab/phase says 'sideways'"),
        ((*HISTORY, 2, "frames", 0), frame("memlab/step", 0, "0"), "a frame of memlab counts '0'"),
        ((*HISTORY, 2, "category"), 3, '["category"] is 3'),
        ((*HISTORY, 3, "user_metadata"), [], '["user_metadata"] is a list'),
        ((*HISTORY, 8, "device_free"), ..., 'has no "device_free"'),
        ((*SEGMENT, "device"), -1, 'segments[0]["device"] is -1'),
        ((*SEGMENT, "device"), 2**40, 'segments[0]["device"] is 1099511627776'),
        ((*SEGMENT, "total_size"), 11777, "add up to 11,776 bytes of 11,777"),
        ((*SEGMENT, "blocks"), CYCLE, "segments[0].blocks[0] is a list"),
        ((*SEGMENT, "blocks", 1, "size"), 0, "segments[0].blocks[1] does not begin where"),
        ((*SEGMENT, "blocks", 1, "size"), -2048, 'segments[0].blocks[1]["size"] is -2048'),
        ((*SEGMENT, "blocks", 1, "address"), BASE, "segments[0].blocks[1] does not begin where"),
        ((*SEGMENT, "blocks", 0, "requested_size"), 2049, '["requested_size"] is 2049'),
        ((*SEGMENT, "blocks", 0, "state"), 1, '["state"] is 1'),
        (("memlab",), {}, '"memlab" has no "source"'),
        (("memlab",), {"source": "guessed"}, "is 'guessed', neither"),
        (("memlab",), SAID | {"absent": [3]}, '"memlab"["absent"] holds 3'),
        (("memlab",), SAID | {"allocator": 1}, '"memlab"["allocator"] is 1'),
    ],
)  # fmt: skip
def test_a_value_out_of_order_is_named(where, value, why, tmp_path):
    values = pickle.loads(pickle.dumps(real()))
    *outer, last = where
    inner = values
    for key in outer:
        inner = inner[key]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    assert why in refused(pickle.dumps(values, 4), tmp_path)


def test_segments_that_overlap_are_refused(tmp_path):
    one, two = segment([block(0, 2048, 2048)]), segment([block(1024, 2048, 2048)], address=BASE + 1024)
    assert "segments[0] and segments[1] overlap" in refused(pickle.dumps(snapshot([], [one, two]), 4), tmp_path)
    assert load(snapshot([], [one, two | {"device": 1}]), tmp_path).peak_bytes == 2048


def test_segments_that_share_their_blocks_are_refused(tmp_path):
    """A hundred thousand segments of one list with as many blocks would take hours to walk through."""
    blocks = [{"size": 512, "state": "inactive"}] * 8
    many = [segment(blocks, address=BASE + 4096 * number) for number in range(8)]
    assert "shares its blocks" in refused(pickle.dumps(snapshot([], many), 4), tmp_path)


def test_frames_that_are_shared_are_read_once(tmp_path):
    """Ten thousand events with one stack of a hundred thousand frames: 10**9 frames if each was read."""
    frames = [dict(MAIN) for _ in range(100_000)]
    history = [event("alloc", 512 * number, 512, frames) for number in range(10_000)]
    its = load(snapshot(history, []), tmp_path)
    assert its.peak_bytes == 512 * 10_000
    assert len(its.operators) == 1


def test_more_events_than_a_trace_may_have_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("memlab.files.snapshot_reader._MOST_EVENTS", 5)
    assert "it has 13 events, and this memlab reads 5" in refused(pickle.dumps(real(), 4), tmp_path)


GOOD = [pickle.dumps(real(), 4), pickle.dumps(real(), 2), gzip.compress(pickle.dumps(real(), 4))]


def read_or_refused(content, path):
    path.write_bytes(content)
    try:
        its = memlab.load(path)
    except MemlabError:
        return
    assert its.peak_bytes >= 0
    str(its)


changes = st.lists(
    st.tuples(st.integers(0, 2**16), st.sampled_from(["set", "delete", "insert", "repeat"]), st.integers(0, 255)),
    min_size=1,
    max_size=6,
)


@given(which=st.integers(0, 2), changes=changes)
def test_a_good_file_with_bytes_changed_is_read_or_refused(which, changes, tmp_path_factory):
    content = bytearray(GOOD[which])
    for at, how, byte in changes:
        at %= len(content)
        if how == "set":
            content[at] = byte
        elif how == "delete":
            del content[at : at + byte % 4 + 1]
        elif how == "insert":
            content.insert(at, byte)
        else:
            content[at:at] = content[max(at - byte, 0) : at]
    read_or_refused(bytes(content), tmp_path_factory.getbasetemp() / "mutated")


@given(content=st.binary(max_size=200))
def test_any_bytes_after_the_first_are_read_or_refused(content, tmp_path_factory):
    read_or_refused(b"\x80\x04" + content, tmp_path_factory.getbasetemp() / "bytes")


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**66), 2**66) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


@given(values=plain)
def test_plain_values_come_as_they_are(values):
    """The small machine reads what `pickle` does."""
    for protocol in (2, 3, 4):
        content = pickle.dumps(values, protocol)
        assert pickle.dumps(plain_values(content), protocol) == content


@given(values=st.dictionaries(st.sampled_from(["segments", "device_traces", "memlab"]), plain, min_size=2))
def test_any_plain_values_are_read_or_refused(values, tmp_path_factory):
    read_or_refused(pickle.dumps(values, 4), tmp_path_factory.getbasetemp() / "plain")


def test_the_whole_file_is_checked_by_its_first_bytes(tmp_path):
    assert "neither compressed" in refused(b"PK\x03\x04", tmp_path)
    assert "neither compressed" in refused(struct.pack("<I", 7), tmp_path)
    assert IN_BACKWARD.save(tmp_path / "x.pickle").read_bytes()[:2] == b"\x1f\x8b", "a saved trace, whatever its suffix"
    assert memlab.load(tmp_path / "x.pickle") == IN_BACKWARD


@pytest.mark.parametrize("strategy", [Checkpoint("blocks.*"), MicroBatch(count=2)], ids=str)
def test_memlab_reads_its_snapshot_as_it_reads_pytorchs(strategy, tmp_path):
    """Without what memlab says of itself there is the peak, and the events' categories."""
    its = measured(strategy)
    values = pickle.loads(its.export(tmp_path / "x.pickle").read_bytes())
    del values["memlab"]
    back = load(values, tmp_path)
    assert back.peak_bytes == its.peak_bytes
    assert back.by_category() == its.by_category()
    assert back.strategy == "CUDA memory snapshot"
