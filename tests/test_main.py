"""The command line: what it prints, writes and refuses; and what `import memlab` costs."""

import subprocess
import sys
import textwrap

import pytest

from memlab.__main__ import main

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
"""


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """`compare` in a folder with the file above; exit status, stdout, stderr."""
    (tmp_path / "mine.py").write_text(textwrap.dedent(STEP))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delitem(sys.modules, "mine", raising=False)

    def run(*arguments):
        try:
            status = main(["compare", *arguments])
        except SystemExit as stop:  # argparse's
            status = stop.code
        return status, *capsys.readouterr()

    return run


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
        (["mine.py:step", "--batch", "8"], "--batch is for memlab's own networks: your step brings its own batch"),
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

    monkeypatch.setattr("memlab.__main__.compare", interrupted)
    status, _, err = run("mine.py:step")
    assert (status, err) == (130, "memlab: interrupted\n")


def test_help_and_version(capsys):
    for arguments, words in (
        (["--help"], "compare"),
        (["compare", "--help"], "--strategy"),
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
