"""The allocator's own events, against a plain profiler run and against arithmetic."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import memlab
from memlab.allocator import Listener, mark
from tests.truth import allocator_peak

CPU = torch.device("cpu")


def _heard(run):
    listener = Listener(CPU)
    listener.start()
    try:
        run()
    finally:
        events = listener.stop()
    return [event for event in events if event.nbytes], events


def test_the_running_sum_peaks_where_a_plain_profile_does():
    conv, images = nn.Conv2d(3, 8, 3), torch.ones(4, 3, 16, 16)  # with workspace inside the operator

    def run():
        conv(images).sum().backward()
        conv.zero_grad()

    run()
    sizes = [event.nbytes for event in _heard(run)[0]]
    assert max(sum(sizes[: n + 1]) for n in range(len(sizes))) == allocator_peak(run)


def test_every_release_is_of_a_block_that_was_handed_out():
    def run():
        torch.ones(1000).add(1).exp()

    open_blocks = {}
    for event in _heard(run)[0]:
        if event.nbytes > 0:
            open_blocks[event.ptr] = event.nbytes
        else:
            assert open_blocks.pop(event.ptr) == -event.nbytes
    assert not open_blocks


def test_markers_fall_where_they_were_left():
    def run():
        held.append(torch.empty(1000))
        mark()
        held.append(torch.empty(2000))
        mark()
        mark()
        held.clear()

    held = []
    _, events = _heard(run)
    assert [event.nbytes for event in events[:5]] == [4000, 0, 8000, 0, 0]
    assert sorted(event.nbytes for event in events[5:]) == [-8000, -4000]


def test_blocks_older_than_the_listener_die_unheard():
    older = [torch.empty(1000)]
    assert _heard(older.clear)[1] == []


def test_a_running_profiler_is_refused_and_left_running():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        with pytest.raises(memlab.MemlabError, match=r"a profiler is already running here.*pass allocator=False"):
            Listener(CPU).start()
        torch.empty(1000).exp()
    assert any(event.name() == "[memory]" for event in profile.profiler.kineto_results.events())


def test_nothing_is_printed_on_stderr():
    code = (
        "import torch, memlab\n"
        "older = torch.ones(10)\n"
        "with memlab.record(allocator=True) as trace:\n"
        "    newer = older.exp()\n"
        "    del older\n"
        "print(trace.peak_bytes)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout == "40\n"
