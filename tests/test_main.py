"""The command line: what it prints, writes and refuses; and what `import memlab` costs."""

import functools
import json
import pickle
import re
import shlex
import subprocess
import sys
import textwrap

import pytest

import memlab
from memlab.__main__ import main
from memlab.roofline import DEVICES

STEP = """
    import torch
    import memlab

    def make(loss_fn=torch.nn.MSELoss()):
        blocks = (torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(2))
        batch = torch.ones(4, 8), torch.ones(4, 1)
        return memlab.TrainingStep(torch.nn.Sequential(*blocks, torch.nn.Linear(8, 1)), batch, loss_fn, torch.optim.SGD)

    step = make()

    def wrong(model, batch):
        raise ValueError("shapes do not fit")

    failing = make(wrong)
    nan = make(lambda model, batch: model(batch[0]).sum() * float("nan"))

    def breaks():
        raise KeyError("path")

    number = 3

    def by_its_data(model, batch):
        loss = model(batch[0]).square().mean()
        return loss * 2 if loss > 1 else loss

    steers = make(by_its_data)
    huge = memlab.TrainingStep(
        lambda: torch.nn.Linear(500_000, 100_000, bias=False), torch.ones(2, 500_000), lambda m, x: m(x).sum()
    )
"""


@pytest.fixture
def cli(tmp_path, capsys, monkeypatch):
    """The command line in a folder with the file above; exit status, stdout, stderr."""
    (tmp_path / "mine.py").write_text(textwrap.dedent(STEP))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delitem(sys.modules, "mine", raising=False)

    def cli(*arguments):
        try:
            status = main(arguments)
        except SystemExit as stop:  # argparse's
            status = stop.code
        return status, *capsys.readouterr()

    return cli


@pytest.fixture
def run(cli):
    """`compare`."""
    return functools.partial(cli, "compare")


def test_a_step_of_ones_own_from_file_to_files(run, tmp_path):
    status, out, err = run(
        "mine.py:step", "--strategy", "checkpoint", "--strategy", "micro-batch(2) + bf16", "--repeats", "1",
        "--output", "report/of today",
    )  # fmt: skip
    assert (status, err) == (0, "")
    for words in ("TrainingStep(Sequential of 153 parameters", "baseline", "2 micro-batches of 2 + bf16 autocast"):
        assert words in out
    folder = tmp_path / "report/of today"
    assert sorted(path.name for path in folder.iterdir()) == ["comparison.csv", "comparison.html", "comparison.png"]
    assert all(path.stat().st_size > 200 for path in folder.iterdir())
    for name in ("comparison.csv", "comparison.html", "comparison.png"):
        assert str(folder.relative_to(tmp_path) / name) in out


@pytest.mark.parametrize("name", ["mine.py:make", "mine:make", "mine:step"])
def test_functions_and_importable_names(run, name):
    status, out, err = run(name, "--strategy", "checkpoint", "--repeats", "0")
    assert (status, err) == (0, "")
    assert "checkpoint" in out


def test_memlabs_own_networks(run):
    status, out, _ = run("mlp", "--batch", "3", "--strategy", "micro-batch(3)", "--repeats", "0")
    assert status == 0
    assert "3 micro-batches of 1" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["what"], "'what' is none of gpt, resnet, lstm, mlp, and names no step of yours: write FILE.py:NAME or"),
        (["none.py:step"], "there is no file none.py"),
        (["mine.py:nothing"], "mine.py has no 'nothing'"),
        (["mine.py:number"], "mine.py:number is an int: it must be a memlab.TrainingStep, or return one"),
        (
            ["mine.py:step", "--batch", "8"],
            "--batch is for memlab's own networks: your step brings its own sizes and its own batch",
        ),
        (["mine.py:step", "--set", "depth=2"], "--set is for memlab's own networks: your step brings its own sizes"),
        (["mine.py:step", "--device", "cuda"], "--device is for --simulated: what is measured is measured where your"),
        (["mine.py:step", "--strategy", "fast"], "'fast' is no strategy; the words are: baseline, checkpoint"),
        (["mine.py:step", "--strategy", "checkpoint + checkpoint"], "one technique twice"),
        (["mine.py:step", "--strategy", "micro-batch(2) + optimizer-in-backward"], "leave one of them out"),
        (["mine.py:step", "--repeats", "-1"], "--repeats -1: give 0 or more"),
        (["mine.py:step", "--output", "mine.py"], "cannot write into mine.py: File exists"),
        (["mine.py:step", "--output", "mine.py/inside"], "cannot write into mine.py/inside: Not a directory"),
        (["mine.py:nan"], "the loss is NaN"),
    ],
)
def test_mistakes_are_one_line_and_status_1(run, arguments, message):
    status, _, err = run(*arguments)
    assert status == 1
    assert err.startswith("memlab: ")
    assert message in err
    assert "Traceback" not in err
    assert err.count("\n") == 1


def test_a_folder_that_may_not_be_written_is_told_before_anything_runs(run, tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)  # the tests may run as root, who may write anywhere
    status, out, err = run("mine.py:step", "--output", str(tmp_path))
    assert (status, out) == (1, "")
    assert err == f"memlab: cannot write into {tmp_path}: permission denied\n"


@pytest.mark.parametrize(
    "arguments", [["mine.py:step", "--repeats", "few"], ["gpt", "--batch", "0"], ["gpt", "--batch", "-1"]]
)
def test_wrong_words_are_status_2_with_the_usage(run, arguments):
    status, _, err = run(*arguments)
    assert status == 2
    assert err.startswith("usage: memlab compare")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("code", "name", "error"),
    [
        ("raise RuntimeError('no data')", "bad.py:step", "the import of bad.py failed: RuntimeError: no data"),
        ("import sys\nsys.exit(3)", "bad.py:step", "the import of bad.py failed: SystemExit: 3"),
        ("def step(:", "bad.py:step", "the import of bad.py failed: SyntaxError: invalid syntax"),
        ("import nowhere", "bad:step", "the import of bad failed: ModuleNotFoundError: No module named 'nowhere'"),
        ("", "nowhere.at.all:step", "the import of nowhere.at.all failed: ModuleNotFoundError"),
        ("", "mine.py:breaks", "mine.py:breaks failed: KeyError: 'path'"),
        ("", "mine.py:failing", "the plain step failed: ValueError: shapes do not fit"),
    ],
)
def test_an_error_of_ones_own_code_is_shown_from_there_on(run, tmp_path, code, name, error):
    (tmp_path / "bad.py").write_text(code)
    sys.modules.pop("bad", None)
    status, _, err = run(name)
    assert status == 1
    *traceback, last = err.strip().splitlines()
    assert last.startswith(f"memlab: {error}")
    files = [line.split('"')[1] for line in traceback if line.lstrip().startswith("File ")]
    assert not any("/memlab/" in file or "importlib" in file for file in files)
    assert code == "" or any(file.endswith("bad.py") for file in files)


def test_an_interrupt_is_status_130(run, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("memlab.commands.compare", interrupted)
    status, _, err = run("mine.py:step")
    assert (status, err) == (130, "memlab: interrupted\n")


# -- sizes of memlab's own networks ------------------------------------------------------------------------------------


def test_sizes_are_set_by_name(run):
    status, out, err = run(
        "gpt", "--set", "width=8", "--set", "heads=2", "--set", "depth=1", "--set", "context=4", "--set", "tied=true",
        "--set", "dropout=0.5", "--batch", "2", "--strategy", "micro-batch(2)", "--repeats", "0",
    )  # fmt: skip
    assert (status, err) == (0, "")
    model = memlab.zoo.GPT(context=4, width=8, depth=1, heads=2, tied=True)
    assert f"TrainingStep(GPT of {sum(p.numel() for p in model.parameters()):,} parameters" in out


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "layers=3",
            "--set layers=3: write SIZE=VALUE, where the sizes of gpt are batch, context, vocab, width, depth,",
        ),
        ("depth", "--set depth: write SIZE=VALUE"),
        ("depth=0", "--set depth=0: give a whole number from 1, such as depth=4"),
        ("depth=two", "--set depth=two: give a whole number from 1, such as depth=4"),
        ("dropout=2", "--set dropout=2: give a number from 0 to 1, such as dropout=0.0"),
        ("dropout=half", "--set dropout=half: give a number from 0 to 1"),
        ("tied=1", "--set tied=1: give true or false, such as tied=False"),
        ("optimizer=SGD", "--set optimizer=SGD: write SIZE=VALUE, where the sizes of gpt are"),
        ("heads=3", "a width of 128 does not divide into 3 heads"),
    ],
)
@pytest.mark.parametrize("command", ["compare", "simulate", "explain"])
def test_sizes_that_are_none(cli, command, setting, message):
    status, _, err = cli(command, "gpt", "--set", setting)
    assert status == 1
    assert err.startswith("memlab: ")
    assert message in err
    assert err.count("\n") == 1


# -- simulate ----------------------------------------------------------------------------------------------------------

SMALL = ("gpt", "--set", "width=16", "--set", "heads=2", "--set", "depth=2", "--set", "context=16", "--batch", "4")


def _rows(out):
    """The cells of the first table that was printed, by the row's first cell."""
    lines = out.split("\n\n")[1].splitlines()
    return {cells[0]: cells[1:] for line in lines if len(cells := re.split(r"  +", line.strip())) > 3}


def test_simulate_says_what_each_technique_would_do(cli):
    status, out, err = cli(
        "simulate", *SMALL, "--strategy", "checkpoint", "--strategy", "micro-batch(2) + bf16", "--on", "t4",
        "--on", "A100-80GB", "--budget", "200 KiB",
    )  # fmt: skip
    assert (status, err) == (0, "")
    assert "gpt with width=16, heads=2, depth=2, context=16, batch=4, simulated on cuda: nothing is computed" in out
    rows = _rows(out)
    assert list(rows) == [
        "peak KiB", "baseline", "checkpoint", "2 micro-batches of 2 + bf16 autocast",
    ]  # fmt: skip
    step = memlab.zoo.gpt_step(width=16, heads=2, depth=2, context=16, batch=4)
    for label, strategy in (("baseline", None), ("checkpoint", memlab.Checkpoint())):
        trace = memlab.simulate(step, strategy)
        fits = "fits" if trace.peak_bytes <= 200 * 2**10 else "does not fit"
        peak, saved, phase, budget, on_t4, on_t4_at_least, on_a100, _ = rows[label]
        assert (peak, saved) == (f"{trace.peak_bytes / 2**10:.2f}", f"{trace.saved_bytes / 2**10:.2f}")
        assert (phase, budget, on_t4, on_a100) == (trace.peak.phase, fits, "fits", "fits")
        assert on_t4_at_least.startswith("at least ")
    assert "time (estimate)" in out
    assert "Times are estimates by a roofline: at least that long" in out
    assert f"baseline, in words:\n{memlab.simulate(step).explain()}" in out
    assert "An estimate for T4: at least " in out
    assert "An estimate for A100 80GB: at least " in out


def test_what_is_simulated_may_have_any_size(cli):
    """100 GiB of parameters and as much of gradients; nothing of it exists."""
    for name, size in (("gpt", ["--set", "width=32768", "--set", "depth=2", "--batch", "1"]), ("mine.py:huge", [])):
        status, out, err = cli("simulate", name, *size, "--strategy", "micro-batch(1)", "--on", "H200", "--on", "L4")
        assert (status, err) == (0, "")
        assert "does not fit" in _rows(out)["baseline"]
        assert "GiB" in out


def test_memory_that_is_nearly_full_is_called_tight():
    from memlab.commands import _fits

    device = DEVICES["T4"]
    for share, verdict in ((0.89, "fits"), (0.91, "tight"), (1.0, "tight"), (1.01, "does not fit")):
        nbytes = int(share * device.memory)
        one = memlab.Allocation(nbytes, "parameters", memlab.trace.Place(), 0, None, -1)
        assert _fits(memlab.Trace((one,), (), ()), device.memory) == verdict


def test_on_a_cpu_there_is_no_estimate_unless_asked_for(cli):
    status, out, _ = cli("simulate", *SMALL, "--strategy", "checkpoint", "--device", "cpu")
    assert status == 0
    assert "simulated on cpu" in out
    assert "estimate" not in out
    assert "workspace inside operators, which varies with the processor" in out


def test_a_technique_that_cannot_be_simulated_is_a_row_that_says_why(cli):
    status, out, _ = cli("simulate", *SMALL, "--strategy", "micro-batch(99)", "--strategy", "checkpoint")
    assert status == 0
    assert set(_rows(out)["99 micro-batches"]) == {"–"}
    assert "99 micro-batches could not run: 99 micro-batches asked, but the batch holds 4 sample(s)" in out
    assert "at least" in _rows(out)["checkpoint"][-1]


def test_simulate_writes_files_that_the_other_commands_read(cli, tmp_path):
    status, out, err = cli("simulate", *SMALL, "--strategy", "checkpoint", "--output", "here")
    assert (status, err) == (0, "")
    names = sorted(path.name for path in (tmp_path / "here").iterdir())
    assert names == [
        "0-baseline.trace.json.gz", "1-checkpoint.trace.json.gz", "comparison.csv", "comparison.html", "comparison.png",
    ]  # fmt: skip
    assert all(f"here/{name}" in out for name in names)
    status, out, err = cli("explain", "here/1-checkpoint.trace.json.gz")
    assert (status, err) == (0, "")
    assert out.startswith("checkpoint, simulated on cuda\n\nThe peak, ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mine.py:steers"], "mine.py"),  # the line that steers
        (["gpt", "--on", "abacus"], "'abacus' is no device that memlab knows: T4, V100"),
        (["gpt", "--budget", "lots"], "'lots' is no number of bytes"),
        (["gpt", "--strategy", "fast"], "'fast' is no strategy"),
        (["gpt", "--output", "mine.py"], "cannot write into mine.py: File exists"),
        (["what"], "'what' is none of gpt, resnet, lstm, mlp"),
    ],
)
def test_mistakes_in_a_simulation_are_one_line(cli, arguments, message):
    status, _, err = cli("simulate", *arguments)
    assert status == 1
    assert err.startswith("memlab: ")
    assert message in err
    assert err.count("\n") == 1


def test_compare_simulated(run, cli):
    status, out, err = run("gpt", *SMALL[1:], "--simulated", "--device", "cpu", "--strategy", "checkpoint")
    assert (status, err) == (0, "")
    assert "simulated on cpu: nothing is computed" in out
    assert "not proven" in out
    assert cli("simulate", "gpt", "--device", "abacus")[0] == 2


# -- explain and export ------------------------------------------------------------------------------------------------


def test_explain_measures_a_step(cli):
    status, out, err = cli("explain", "mine.py:step", "--strategy", "checkpoint")
    assert (status, err) == (0, "")
    assert "TrainingStep(Sequential of 153 parameters" in out
    assert "checkpoint, measured on cpu\n\nThe peak, " in out


@pytest.fixture
def saved(tmp_path):
    """A trace and its file."""
    trace = memlab.measure(memlab.zoo.mlp_step(batch=4, width=8, depth=2), allocator=False)
    return trace, trace.save(tmp_path / "step.trace.json.gz").name


def test_explain_reads_what_was_saved(cli, saved):
    trace, file = saved
    assert cli("explain", file) == (0, f"baseline, measured on cpu\n\n{trace.explain()}\n", "")


def test_export_writes_for_other_tools_and_explain_reads_snapshots(cli, saved, tmp_path):
    trace, file = saved
    for out in ("a.json", "a.json.gz", "a.pickle", "a.pkl", "a.html", "a.png", "A.PNG"):
        assert cli("export", file, out) == (0, f"{out}\n", "")
        assert (tmp_path / out).stat().st_size > 1000
    assert json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    assert pickle.loads((tmp_path / "a.pickle").read_bytes())["device_traces"]
    assert (tmp_path / "a.html").read_text() == trace.to_html()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    status, out, err = cli("explain", "a.pickle")
    assert (status, err) == (0, "")
    assert "The peak, " in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "none.trace"], "there is no file none.trace; and 'none.trace' is none of gpt"),
        (["explain", "mine.py"], "mine.py holds no trace that this memlab can read"),
        (["explain", "step.trace.json.gz", "--batch", "2"], "is a file: --strategy, --set and --batch are for steps"),
        (["explain", "none.py:step"], "there is no file none.py"),
        (["explain", "mine.py:nan"], "the loss is NaN"),
        (
            ["export", "step.trace.json.gz", "out.txt"],
            "no form is known for 'out.txt': the suffix decides, one of .json,",
        ),
        (["export", "none.trace", "out.json"], "no trace can be read from none.trace: No such file or directory"),
        (["export", "step.trace.json.gz", "step.trace.json.gz"], "is the file to be read: give another name to write"),
        (["export", "step.trace.json.gz", "no/where.json"], "where.json"),
        (["export", "step.trace.json.gz", "no/where.html"], "cannot write no/where.html: No such file or directory"),
        (["export", "step.trace.json.gz", "no/where.png"], "cannot write no/where.png: No such file or directory"),
    ],
)
def test_mistakes_with_files_are_one_line(cli, saved, arguments, message):
    status, _, err = cli(*arguments)
    assert status == 1
    assert err.startswith("memlab: ")
    assert message in err
    assert err.count("\n") == 1


def test_devices_are_listed_with_their_sources(cli):
    status, out, err = cli("devices")
    assert (status, err) == (0, "")
    for device in DEVICES.values():
        assert re.search(rf"^{device.name} +{device.memory // 2**30} GiB +{device.bandwidth / 1e9:.0f} GB/s", out, re.M)
        assert f"{device.name}: {device.source}" in out


def test_a_reader_who_has_read_enough(tmp_path):
    command = [sys.executable, "-m", "memlab", "devices"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


# -- the rest ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["compare", "simulate", "explain", "export", "devices"])
def test_each_command_has_an_example_that_can_be_read(command, capsys, monkeypatch):
    from memlab.__main__ import _parser

    with pytest.raises(SystemExit):
        main([command, "--help"])
    *_, example = " ".join(capsys.readouterr().out.split()).partition("example: python -m memlab ")
    options = _parser().parse_args(shlex.split(example))
    assert options.run.__module__ == "memlab.commands"


def test_help_and_version(capsys):
    for arguments, words in (
        (["--help"], "compare"),
        (["compare", "--help"], "--strategy"),
        (["--help"], "simulate the techniques on one training step"),
        (["--version"], "memlab 0."),
    ):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 0
        assert words in capsys.readouterr().out


def test_no_command_asks_for_one(capsys):
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 2
    assert "usage: memlab" in capsys.readouterr().err


IMPORT = """
import sys, time
import torch
start, before = time.perf_counter(), set(sys.modules)
import memlab
print(time.perf_counter() - start, *sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
"""


def test_importing_costs_little_and_torch_alone():
    """At most 0.1 s where the machine is idle; it may be busy here."""
    runs = [
        subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True) for _ in range(3)
    ]
    seconds = min(float(run.stdout.split()[0]) for run in runs)
    print(f"import memlab: {seconds:.3f} s beyond torch")
    imported = set(runs[0].stdout.split()[1:])
    assert imported & {"pandas", "matplotlib", "IPython", "ipywidgets", "tqdm", "sklearn", "numpy"} <= set()
    assert imported - {"memlab", "torch"} <= set(sys.stdlib_module_names)
    assert seconds < 0.5


def test_a_budget_that_is_nearly_taken_is_tight(capsys):
    assert main(["simulate", "mlp", "--strategy", "baseline", "--budget", "9.5MiB"]) == 0
    said = capsys.readouterr().out
    assert "tight" in said
    assert "Tight: above 90 %" in said


def test_a_cpu_is_held_against_no_gpu(capsys):
    assert main(["simulate", "mlp", "--device", "cpu", "--on", "T4"]) == 1
    assert "--on is for a GPU" in capsys.readouterr().err
