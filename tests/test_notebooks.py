"""The lessons' structure: what every notebook tells its learner, shows and leaves out.

What they print is compared by nbval (`make test`); that they are stored whole is held in `test_project.py`.
"""

import base64
import re
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
REPOSITORY = "memlab/memlab"  # the one place to change: badges and installation are held against it
LARGEST_FIGURE = 40_000  # bytes of PNG
MOST_CODE_CELLS = 20


@dataclass(frozen=True)
class Lesson:
    """A notebook as the tests ask about it."""

    path: Path
    cells: list[nbformat.NotebookNode]

    @property
    def text(self) -> str:
        return "\n\n".join(cell.source for cell in self.cells if cell.cell_type == "markdown")

    @property
    def code(self) -> list[nbformat.NotebookNode]:
        return [cell for cell in self.cells if cell.cell_type == "code"]

    @property
    def outputs(self) -> list[nbformat.NotebookNode]:
        return [output for cell in self.code for output in cell.outputs]


LESSONS = [Lesson(path, nbformat.read(path, as_version=4).cells) for path in sorted(FOLDER.glob("[0-9][0-9]_*.ipynb"))]
every_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.path.stem)


# -- for the learner ---------------------------------------------------------------------------------------------------


@every_lesson
def test_it_opens_on_colab_and_on_binder(lesson):
    first = lesson.cells[0].source
    file = f"notebooks/{lesson.path.name}"
    assert f"](https://colab.research.google.com/github/{REPOSITORY}/blob/main/{file})" in first
    assert f"](https://mybinder.org/v2/gh/{REPOSITORY}/main?urlpath=lab/tree/{file})" in first


@every_lesson
def test_it_installs_itself_on_colab_alone(lesson):
    guard, *_ = (cell.source for cell in lesson.code)
    assert 'if "google.colab" in sys.modules:' in guard
    assert f"%pip install --quiet --no-deps git+https://github.com/{REPOSITORY}" in guard
    assert not re.search(r"pip install|conda install|drive\.mount", "".join(cell.source for cell in lesson.code[1:]))


@every_lesson
def test_it_says_what_it_asks_and_what_it_gives(lesson):
    first = lesson.cells[0].source
    assert re.match(r"# \S", first)
    assert re.search(r"^\*\*.+\?\*\*$", first, re.MULTILINE), "a question to open with"
    assert re.search(r"^\*\*Minutes:\*\* \d+$", first, re.MULTILINE)
    assert re.search(r"^\*\*Before:\*\* \S", first, re.MULTILINE)
    assert len(re.findall(r"^- ", first.partition("**Afterwards you can**")[2], re.MULTILINE)) >= 3
    headings = re.findall(r"^## (.+)$", lesson.text, re.MULTILINE)
    assert headings[-3:] == ["Summary", "Words", "References"]


@every_lesson
def test_it_is_one_sitting(lesson):
    assert 25 <= len(lesson.cells) <= 45
    assert len(lesson.code) <= MOST_CODE_CELLS
    assert all(len(cell.source.splitlines()) <= 30 for cell in lesson.code)


@every_lesson
def test_it_asks_for_predictions_and_runs_without(lesson):
    fields = re.findall(r"^\w+ = \"no guess\"(.*)$", "\n".join(cell.source for cell in lesson.code), re.MULTILINE)
    assert len(fields) >= 2, "one to begin with and one to end with"
    assert all(field.startswith("  # @param ") for field in fields), "a form on Colab"


# -- what is stored ----------------------------------------------------------------------------------------------------


@every_lesson
def test_a_figure_is_small_and_has_its_text(lesson):
    for cell in lesson.code:
        figures = [output.data for output in cell.outputs if "image/png" in output.get("data", {})]
        for data in figures:
            assert len(base64.b64decode(data["image/png"])) <= LARGEST_FIGURE
            assert not data["text/plain"].startswith("<"), "a summary, not <Figure ...>"
        if figures:
            assert any(output.output_type == "stream" for output in cell.outputs), "what is to be read from it"


@every_lesson
def test_nothing_is_stored_that_differs_from_run_to_run(lesson):
    for output in lesson.outputs:
        assert output.get("name") != "stderr", output.text
        assert not {key for key in output.get("data", {}) if "widget" in key or "svg" in key or "javascript" in key}
    assert not any(re.search(r"clear_output|Output\(|\binteract|%matplotlib", cell.source) for cell in lesson.code)


@every_lesson
def test_nothing_names_the_machine_it_was_made_on(lesson):
    text = re.sub(r'"image/png": "[^"]*"', "", lesson.path.read_text())  # where any letters may meet
    assert not re.search(r"/(home|root|tmp|work|Users)/", text)
