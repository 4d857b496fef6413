"""A teacher's fork: one command points every link at it."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import links
import pytest

ROOT = Path(__file__).parent.parent
ELSEWHERE = (
    "See github.com/pytorch/pytorch, github.com/an/other-kit and https://github.com/{name}-extras, not {name}.\n"
)


def tree(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def copy(tmp_path):
    """The project's files that name the repository, in a folder of their own, beside some that only look so."""
    for path in links.files(ROOT):
        if links.repository().encode() in path.read_bytes():
            target = tmp_path / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    (tmp_path / "elsewhere.md").write_text(ELSEWHERE.format(name=links.repository()))
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/made.md").write_text(f"github.com/{links.repository()}")
    return tmp_path


def test_the_project_names_one_repository():
    """Every badge and every set-up cell the same, whoever's fork this is."""
    named = set()
    for path in links.files(ROOT):
        if path.suffix in (".ipynb", ".md"):
            places = (
                rf"(?:colab\.research\.google\.com/github|mybinder\.org/v2/gh|git\+https://github\.com)/({links.NAME})"
            )
            named |= {name.removesuffix("/blob") for name in re.findall(places, path.read_text("utf-8"))}
    assert named == {links.repository()}


def test_every_link_points_at_the_fork(copy):
    old = links.repository()
    changed = links.point_at("ada-l/memory.course_2", copy)
    assert links.repository(copy) == "ada-l/memory.course_2"
    assert copy / "README.md" == changed[-1], "the last, so that an interrupted run can be repeated"
    assert copy / "notebooks/00_start_here.ipynb" in changed
    assert {path.relative_to(copy) for path in changed} >= {
        path.relative_to(ROOT) for path in (ROOT / "notebooks").rglob("[0-9]*.ipynb")
    }
    for path in changed:
        text = path.read_text("utf-8")
        assert not re.search(rf"(github|gh)/{re.escape(old)}\b|github\.com/{re.escape(old)}\b", text)
        assert "git+https://github.com/ada-l/memory.course_2" in text or path.suffix != ".ipynb"


def test_nothing_else_changes(copy):
    before = tree(copy)
    changed = links.point_at("ada/kit", copy)
    after = tree(copy)
    assert {path for path in before if before[path] != after[path]} == set(changed)
    assert copy / "elsewhere.md" not in changed
    assert copy / ".venv/made.md" not in changed
    for path in changed:
        lines = zip(before[path].splitlines(), after[path].splitlines(), strict=True)
        assert all(new == old.replace(links.repository().encode(), b"ada/kit") for old, new in lines)


def test_it_can_be_repeated_and_taken_back(copy):
    before = tree(copy)
    links.point_at("ada/kit", copy)
    after = tree(copy)
    assert links.point_at("ada/kit", copy) == []
    assert tree(copy) == after
    links.point_at(links.repository(), copy)
    assert tree(copy) == before


def test_an_interrupted_run_can_be_repeated(copy):
    readme = (copy / "README.md").read_bytes()
    links.point_at("ada/kit", copy)
    after = tree(copy)
    (copy / "README.md").write_bytes(readme)
    assert links.point_at("ada/kit", copy) == [copy / "README.md"]
    assert tree(copy) == after


@pytest.mark.parametrize(
    "name",
    ["", "ada", "ada/", "/kit", "https://github.com/ada/kit", "ada/kit/", "ada/kit/main", "a da/kit", "ada/kit\n"],
)
def test_what_is_no_name_is_refused_with_the_form(copy, name):
    before = tree(copy)
    with pytest.raises(
        SystemExit, match=r"is no repository: write owner/name, as in the address github\.com/owner/name"
    ):
        links.point_at(name, copy)
    assert tree(copy) == before


def test_without_a_name_the_command_says_how_it_is_called():
    run = subprocess.run([sys.executable, ROOT / "notebooks/links.py"], capture_output=True, text=True)
    assert run.returncode == 1
    assert "make release-links REPO=owner/name" in run.stderr
