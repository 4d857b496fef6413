"""`%%memlab` takes bare code as it is: in process, through IPython's own shell, and once through a real kernel."""

import gc
import io
import sys
import weakref
from contextlib import redirect_stderr, redirect_stdout

import pytest
import torch

import memlab

pytest.importorskip("IPython", reason="the magic needs IPython")

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

PASTED = """\
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters())
x, y = torch.randn(32, 16), torch.randn(32, 4)
for epoch in range(3):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
loss
"""


@pytest.fixture
def shell():
    """A shell of its own, without history on disk; afterwards the streams and hooks are as before."""
    excepthook, last = sys.excepthook, {name: getattr(sys, name, None) for name in ("last_value", "last_traceback")}
    shell = InteractiveShell.instance()  # the one that `display` speaks to
    shell.history_manager.enabled = False
    shell.run_line_magic("colors", "NoColor" if hasattr(shell, "color_info") else "nocolor")
    run(shell, "%load_ext memlab")
    yield shell
    shell.reset(new_session=False)
    InteractiveShell.clear_instance()
    sys.excepthook = excepthook
    for name, value in last.items():
        setattr(sys, name, value)


def run(shell, cell, fails=None):
    """Run a cell and return what it printed; it must succeed, or fail with that type of error."""
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(out):
        result = shell.run_cell(cell, store_history=True)
    if fails is None:
        result.raise_error()
    else:
        assert isinstance(result.error_in_exec or result.error_before_exec, fails)
    return out.getvalue()


def trained():
    """The trace of the pasted loop, by `record` alone."""
    space = {}
    code = compile(PASTED, "pasted", "exec")
    with memlab.record(allocator=True) as trace:
        exec(code, space)
    return trace


# -- what it does ------------------------------------------------------------------------------------------------------


def test_bare_code_is_recorded_as_by_record(shell):
    printed = run(shell, "%%memlab -o trace\n" + PASTED)
    trace, truth = shell.user_ns["trace"], trained()
    assert len(trace.steps) == 3
    assert set(trace.by_phase()) == {"forward", "backward", "optimizer"}
    assert trace.by_category("tensor_peak") == truth.by_category("tensor_peak")
    assert trace.by_phase("tensor_peak") == truth.by_phase("tensor_peak")
    assert trace.saved_bytes == truth.saved_bytes
    assert trace.allocator
    assert str(trace) in printed
    assert trace.explain() in printed
    assert "Memory through one training step" in printed  # the figure, where there are no pictures


def test_variables_stay_and_the_last_value_does_not(shell):
    run(shell, "41 + 1")
    run(shell, "%%memlab\n" + PASTED)
    assert isinstance(shell.user_ns["loss"], torch.Tensor)
    assert shell.user_ns["epoch"] == 2
    assert shell.user_ns["_"] == 42
    assert list(shell.user_ns["Out"].values()) == [42]
    assert not [name for name, value in shell.user_ns.items() if isinstance(value, memlab.Trace)]


def test_options(shell):
    run(shell, "%%memlab --no-allocator --sources -o its\n" + PASTED)
    trace = shell.user_ns["its"]
    assert not trace.allocator
    assert {
        a.place.source.rpartition(":")[2] for a in trace.allocations if a.place.source and "<module>" in a.place.source
    }


def test_magics_and_commands_within_the_cell(shell):
    printed = run(shell, "%%memlab\n%timeit -n1 -r1 1\nnames = !echo hello\n")
    assert shell.user_ns["names"] == ["hello"]
    assert "Nothing was in memory" in printed


def test_a_second_run_gives_the_same_figures(shell):
    for name in ("one", "two", "three"):
        run(shell, f"%%memlab -o {name}\n" + PASTED)
        run(shell, "model(x)")  # held by `Out`
        run(shell, "loss.no_such_thing", fails=AttributeError)  # held by the traceback
    one, two, three = (shell.user_ns[name] for name in ("one", "two", "three"))
    for again in (two, three):
        assert again.by_category("tensor_peak") == one.by_category("tensor_peak")
        assert again.by_phase("tensor_peak") == one.by_phase("tensor_peak")
        assert [a.nbytes for a in again.allocations if a.category != "workspace"] == [
            a.nbytes for a in one.allocations if a.category != "workspace"
        ]


# -- errors ------------------------------------------------------------------------------------------------------------

FAILING = """\
import torch
def deep(x):
    kept = x * 2
    return kept @ torch.ones(3)
deep(torch.ones(5))
"""


def test_an_error_is_shown_as_usual_after_the_summary_of_what_ran(shell):
    plain = run(shell, FAILING, fails=RuntimeError)
    printed = run(shell, "%%memlab -o trace\n" + FAILING, fails=RuntimeError)
    summary, _, shown = printed.partition("Memory through one training step")
    assert "ended early, by RuntimeError: the trace covers what ran" in summary
    assert shell.user_ns["trace"].peak_bytes >= 2 * 5 * 4
    assert "in deep(x)" in shown
    assert "magic.py" not in printed
    assert "run_cell_magic" not in printed
    assert shown.count("--->") == plain.count("--->") == 2
    assert shown.splitlines()[-1] == plain.splitlines()[-1]


def test_an_interrupt_too(shell):
    printed = run(shell, "%%memlab\nraise KeyboardInterrupt", fails=KeyboardInterrupt)
    assert "ended early, by KeyboardInterrupt" in printed


def test_what_the_last_error_held_is_let_go_of_by_the_next_run(shell):
    held = []
    shell.user_ns["watch"] = lambda tensor: held.append(weakref.ref(tensor))
    run(shell, "%%memlab\n" + FAILING.replace("    return", "    watch(kept)\n    return"), fails=RuntimeError)
    assert held[0]() is not None  # for `%debug`
    run(shell, "%%memlab\n1 + 1")
    gc.collect()
    assert held[0]() is None


@pytest.mark.parametrize(
    ("cell", "why"),
    [
        ("%%memlab\n  \n", "records the cell below it, and that is empty"),
        ("%%memlab\nimport asyncio\nawait asyncio.sleep(0)", "waits for other code with a top-level `await`"),
        ("%%memlab -o 3\n1", "-o 3: the trace is kept in a variable, and this is no name for one"),
        ("%%memlab --fast\n1", "unrecognized arguments: --fast"),
    ],
)
def test_what_it_cannot_do_is_said_in_one_line(shell, cell, why):
    printed = run(shell, cell, fails=UsageError)
    assert why in printed
    assert printed.count("\n") == 1


def test_a_running_profiler_is_said_in_one_line(shell):
    with torch.profiler.profile():
        printed = run(shell, "%%memlab\n1", fails=UsageError)
    assert "a profiler is already running" in printed
    assert "magic.py" not in printed


def test_a_syntax_error_is_shown_as_usual(shell):
    printed = run(shell, "%%memlab\nx = 1\nif x\n    y = 2\n", fails=memlab.MemlabError)
    assert "SyntaxError" in printed
    assert "if x" in printed
    assert "magic.py" not in printed
    assert "x" not in shell.user_ns


# -- a real kernel -----------------------------------------------------------------------------------------------------


def test_a_stored_notebook(tmp_path):
    nbformat = pytest.importorskip("nbformat", reason="a notebook is run by nbclient")
    nbclient = pytest.importorskip("nbclient", reason="a notebook is run by nbclient")
    cells = ["%load_ext memlab", "%%memlab\n" + PASTED, "loss.shape", "%%memlab\n" + FAILING]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", allow_errors=True, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    load, recorded, after, failed = (cell.outputs for cell in notebook.cells)
    assert load == []
    assert [output.output_type for output in recorded] == ["stream", "display_data"]
    assert "3 steps" in recorded[0].text
    assert recorded[1].data["image/png"].startswith("iVBOR")  # a PNG's first bytes
    assert recorded[1].data["text/plain"].startswith("Memory through one training step")
    assert after[0].data["text/plain"] == "torch.Size([])"
    assert failed[-1].output_type == "error"
    assert failed[-1].ename == "RuntimeError"
    assert "magic.py" not in "".join(failed[-1].traceback)
