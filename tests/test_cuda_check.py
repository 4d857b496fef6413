"""The check against a real GPU: its arithmetic on made-up numbers; its script, and both its halves, without one."""

import dataclasses
import pathlib
import sys
import time

import pytest
import torch

import memlab
from memlab import cuda_check
from memlab.cuda_check import Check, Peaks, Real, Row

ROOT = pathlib.Path(__file__).parent.parent
MIB = 2**20
ABOUT = {
    "device": "NVIDIA Made-Up",
    "capability": "8.0",
    "torch": "2.13.0",
    "cuda": "13.0",
    "date": "2030-01-02",
    "cublas_workspace": 16 * MIB,
}


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.delitem(sys.modules, "cuda_check", raising=False)
    import cuda_check as found

    yield found
    for name in ("cuda_check", "_timing"):
        sys.modules.pop(name, None)


def row(strategy="Baseline()", simulated=1000 * MIB, allocated=1016 * MIB, kept=16 * MIB):
    measured = Peaks(peak=1000 * MIB, tensor_peak=999 * MIB, saved=500 * MIB, attention="flash")
    real = Real(allocated, allocated - MIB, kept_workspace=kept, operator_workspace=0, measured=measured)
    return Row("GPT", strategy, Peaks(simulated, 998 * MIB, 500 * MIB, "flash"), real)


# -- the arithmetic ----------------------------------------------------------------------------------------------------


def test_what_libraries_keep_is_left_out_of_the_one_difference_and_not_of_the_other():
    assert row().difference == 0
    assert row().whole_difference == pytest.approx(-16 / 1016)
    assert row(simulated=1100 * MIB).difference == pytest.approx(0.1)
    assert row(simulated=950 * MIB).difference == pytest.approx(-0.05)


@pytest.mark.parametrize(("simulated", "near"), [(980, True), (979, False), (1020, True), (1021, False)])
def test_near_is_within_two_percent_on_either_side(simulated, near):
    assert row(simulated=simulated * MIB).is_near is near


def test_the_outcome_names_the_device_and_the_farthest_row():
    check = Check(ABOUT, (row(), row("Checkpoint()", simulated=1015 * MIB), row("MicroBatch(count=4)", 930 * MIB)))
    assert check.said() == (
        "Checked on NVIDIA Made-Up (compute capability 8.0, torch 2.13.0, CUDA 13.0, 2030-01-02): 2 of 3 simulated "
        "peaks are within 2% of the real ones; the farthest, GPT with MicroBatch(count=4), is -7.0% off. Left out on "
        "both sides is the workspace that cuBLAS keeps (16.0 MiB there)."
    )


def test_a_check_is_read_as_it_was_written():
    check = Check(ABOUT, (row(), row("Checkpoint()", kept=0)))
    assert cuda_check.from_json(check.to_json()) == check


def test_the_table_has_each_difference_and_marks_what_is_far(script):
    lines = script.comparison([row(), row("Checkpoint()", simulated=1100 * MIB)]).splitlines()
    near, far = (next(line for line in lines if name in line) for name in ("Baseline()", "Checkpoint()"))
    cells = [cell.strip() for cell in near.strip("|").split("|")]
    assert cells == [
        "GPT",
        "Baseline()",
        "1016 MiB",
        "16.0 MiB",
        "1000 MiB",
        "+0.00%",
        "-1.57%",
        "-1,048,576 B",
        "+0 B",
        "0 B",
        "flash, flash",
        "",
    ]
    assert "FAR" in far
    assert "+10.00%" in far


# -- what is shipped ---------------------------------------------------------------------------------------------------


def test_the_documentation_quotes_what_is_shipped():
    assert cuda_check.said() in " ".join((ROOT / "benchmarks" / "README.md").read_text().split())
    if cuda_check.stored() is None:
        assert cuda_check.said().startswith("No GPU was at hand")


# -- the script --------------------------------------------------------------------------------------------------------


def test_a_dry_run_foretells_every_row(script, capsys):
    assert script.main(["--dry-run", "--small"]) == 0
    _, _, *lines = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    wanted = [(name, repr(strategy)) for name in script.networks(small=True) for strategy in script.STRATEGIES]
    assert [tuple(row[:2]) for row in cells] == wanted
    assert len(wanted) == 32
    assert all(row[2].endswith("iB") for row in cells)  # a size, and no sentence of an error


def test_without_a_gpu_it_says_so(script, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert script.main([]) == 0
    assert capsys.readouterr().out.startswith("There is no CUDA device here, so nothing was compared.")


def test_both_halves_meet(script, monkeypatch):
    """The real half on the CPU, the allocator's counters being made up."""
    network = script.networks(small=True)["Llama-shaped"]
    own = script.own_bytes(step := network.on("cpu"), step.batch)
    assert own == sum(t.nbytes for t in (*step.model.parameters(), *step.model.buffers(), *step.batch))
    counters = {"requested_bytes.all.current": 100 * MIB, "requested_bytes.all.peak": 150 * MIB}
    for name, value in {
        "synchronize": None,
        "reset_peak_memory_stats": None,
        "max_memory_allocated": 160 * MIB,
        "memory_stats": counters,
        "is_bf16_supported": True,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value, **__: value)
    monkeypatch.setattr(script, "STRATEGIES", script.STRATEGIES[:4])

    left_out = []
    found = list(script.rows("Llama-shaped", network, "cpu", time.monotonic() + 600, left_out))
    assert [row.strategy for row in found] == [repr(strategy) for strategy in script.STRATEGIES]
    assert not left_out
    states = 2 * sum(p.nbytes for p in step.model.parameters())
    counts = 4 * sum(1 for _ in step.model.parameters())  # AdamW's `step`, of which a CPU's optimizer has one each
    for row in found:
        assert (row.real.allocated_peak, row.real.requested_peak) == (160 * MIB, 150 * MIB)
        assert row.real.kept_workspace == 100 * MIB - own - states - counts
        expected = memlab.measure(step, eval(row.strategy, vars(memlab)))
        assert dataclasses.astuple(row.real.measured)[:3] == (
            expected.peak_bytes,
            expected.tensor_peak_bytes,
            expected.saved_bytes,
        )
        assert row.simulated.attention == "efficient"

    assert list(script.rows("Llama-shaped", network, "cpu", time.monotonic() - 1, left_out)) == []
    assert left_out == [f"Llama-shaped, {strategy!r}: the time was over" for strategy in script.STRATEGIES]
