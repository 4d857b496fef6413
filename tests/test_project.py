"""The project's own promises: its files agree with one another, its notebooks can be read, its imports go one way."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


# -- dependencies ------------------------------------------------------------------------------------------------------


def requirements(extra: str | None = None) -> dict[str, Requirement]:
    """The direct dependencies of the package, with an extra's and those of the extras of our own that it names."""
    found = {}
    for text in PROJECT["dependencies"] + (PROJECT["optional-dependencies"][extra] if extra else []):
        requirement = Requirement(text)
        if requirement.name == PROJECT["name"]:
            for other in requirement.extras:
                found |= requirements(other)
        else:
            found[canonicalize_name(requirement.name)] = requirement
    return found


def conda_packages(path: str) -> dict[str, str]:
    """Package to version bound (`>=2.0`, `=3.12`), from the flat list that our conda files hold."""
    lines = re.findall(r"^  - ([a-z][a-z0-9-]*)([<>=]+[0-9.]+)?$", (ROOT / path).read_text(), re.MULTILINE)
    return dict(lines)


@pytest.mark.parametrize("extra", [None, *PROJECT["optional-dependencies"]])
def test_dependencies_have_lower_bounds_only(extra):
    for requirement in requirements(extra).values():
        assert [bound.operator for bound in requirement.specifier] == [">="], requirement


@pytest.mark.parametrize(
    ("path", "python", "torch"),
    [
        ("environment.yml", PROJECT["requires-python"], "pytorch"),
        ("binder/environment.yml", "=3.12", "pytorch-cpu"),  # Binder builds once for all: one Python, no CUDA
    ],
)
def test_conda_files_agree_with_pyproject(path, python, torch):
    expected = {name: str(requirement.specifier) for name, requirement in requirements("notebooks").items()}
    expected[torch] = expected.pop("torch")
    assert conda_packages(path) == expected | {"python": python, "pip": ""}


def test_constraints_pin_what_the_extras_ask_for():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pins = {canonicalize_name(pin.name): pin.specifier for pin in map(Requirement, lines)}
    for specifier in pins.values():
        (version,) = specifier
        assert version.operator == "=="
        assert "+" not in version.version, "a build such as +cpu is on no public index"
    for name, requirement in requirements("test").items():
        assert name in pins
        (version,) = pins[name]
        assert requirement.specifier.contains(version.version), f"{name} is pinned below its bound"


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"])
def test_the_file_is_there(name):
    assert (ROOT / name).stat().st_size > 0


@pytest.mark.parametrize("name", [".ci/run", "binder/postBuild", "binder/start"])
def test_scripts_can_be_started(name):
    path = ROOT / name
    assert path.stat().st_mode & 0o111 == 0o111
    assert path.read_text().startswith("#!")
    subprocess.run(["bash", "-n", str(path)], check=True)


def test_commands_in_the_documentation_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in ROOT.glob("*.md"):
        named = set(re.findall(r"(?:`|^\s*(?:\$ )?)make ([a-z-]+)", path.read_text(), re.MULTILINE))
        assert named <= targets, path.name


def test_make_lists_its_targets():
    text = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    listed = subprocess.run(["make", "--no-print-directory", "-C", ROOT], capture_output=True, text=True, check=True)
    assert re.findall(r"^make ([a-z-]+) +\S", listed.stdout, re.MULTILINE) == phony.split()


# -- notebooks ---------------------------------------------------------------------------------------------------------

NOTEBOOKS = sorted(path for path in (ROOT / "notebooks").rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts)
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@every_notebook
def test_a_notebook_is_stored_with_the_outputs_of_one_run(path):
    """One without outputs would pass the comparison with a run of today, whatever that run prints."""
    notebook = json.loads(path.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code" and "".join(cell["source"]).strip()]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1)), "run `make notebooks`"
    assert any(cell["outputs"] for cell in code)


@every_notebook
def test_a_notebook_can_be_read_everywhere(path):
    metadata = json.loads(path.read_text())["metadata"]
    assert "widgets" not in metadata, "repository sites do not show a notebook with stored widget state"
    assert metadata["language_info"] == {"name": "python"}
    assert path.stat().st_size < 300_000


def test_there_is_a_notebook_to_start_with():
    assert ROOT / "notebooks/00_start_here.ipynb" in NOTEBOOKS


# -- imports -----------------------------------------------------------------------------------------------------------

# A file of memlab imports only what stands before it. A folder is one entry: its files may import one another.
ORDER = [
    "errors",
    "units",
    "patch",
    "modes",
    "clock",
    "allocator",
    "trace",
    "held",
    "contrast",
    "roofline",
    "release",
    "accumulation",
    "tracker",
    "flops",
    "ledger",
    "nest",
    "walk",
    "state",
    "copies",
    "step",
    "strategies",
    "code",
    "lives",
    "assemble",
    "holders",
    "leaks",
    "record",
    "limit",
    "measure",
    "passes",
    "chain",
    "simulation",
    "simulate",
    "means",
    "kept",
    "outcome",
    "difference",
    "causes",
    "proof",
    "reasons",
    "progress",
    "compare",
    "views",
    "files",
    "__init__",
    "zoo",
    "notebook",
    "course",
    "cuda_check",
    "named",
    "commands",
    "__main__",
]
# A method such as `Trace.plot` hands over to these, by an import inside of it.
SHOWN_BY = {"views", "files", "notebook", "code", "contrast", "roofline"}
SOURCES = sorted((ROOT / "memlab").rglob("*.py"))


def entry(path: Path) -> str:
    """The name in ORDER that a source file belongs to."""
    return path.relative_to(ROOT / "memlab").with_suffix("").parts[0]


def imported(node: ast.AST, path: Path) -> Iterator[str]:
    """The entries of ORDER that one import statement reaches for."""
    if isinstance(node, ast.Import):
        modules = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        package = path.relative_to(ROOT).parent.parts
        base = package[: len(package) - node.level + 1] if node.level else ()
        modules = [".".join(filter(None, [*base, node.module, alias.name])) for alias in node.names]
    else:
        return
    for module in modules:
        package, _, rest = module.partition(".")
        if package == "memlab":
            name = rest.partition(".")[0]
            yield name if name in ORDER else "__init__"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path):
    here = entry(path)
    assert here in ORDER, f"give {here} its place in ORDER"
    allowed = set(ORDER[: ORDER.index(here)])
    if here in path.relative_to(ROOT / "memlab").parts[:-1]:  # files of one package
        allowed.add(here)
    tree = ast.parse(path.read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {id(node) for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        reached = set(imported(node, path))
        assert reached <= (allowed | SHOWN_BY if id(node) in inside else allowed), ast.unparse(node)


def test_importing_memlab_needs_torch_alone():
    code = "import sys, torch; old = set(sys.modules); import memlab; print(*set(sys.modules) - old)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    packages = {name.partition(".")[0] for name in run.stdout.split()}
    assert not packages & {"IPython", "ipywidgets", "matplotlib", "pandas", "sklearn", "tqdm"}
