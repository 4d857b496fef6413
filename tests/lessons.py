"""The lessons as the tests ask about them: cells, texts, outputs, exercises, solutions."""

import configparser
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import nbformat
import pytest
import solve

from memlab.course.exercises import Exercise, lesson_module
from memlab.course.quizzes import Question

FOLDER = Path(__file__).parent.parent / "notebooks"


@dataclass(frozen=True)
class Lesson:
    """A notebook in `notebooks/`, with what belongs to it elsewhere."""

    path: Path

    @cached_property
    def notebook(self) -> nbformat.NotebookNode:
        return nbformat.read(self.path, as_version=4)

    @property
    def cells(self) -> list[nbformat.NotebookNode]:
        return self.notebook.cells

    @property
    def text(self) -> str:
        return "\n\n".join(cell.source for cell in self.cells if cell.cell_type == "markdown")

    @property
    def code(self) -> list[nbformat.NotebookNode]:
        return [cell for cell in self.cells if cell.cell_type == "code"]

    @property
    def outputs(self) -> list[nbformat.NotebookNode]:
        return [output for cell in self.code for output in cell.outputs]

    @property
    def minutes(self) -> int:
        return int(re.search(r"^\*\*Minutes:\*\* (\d+)$", self.cells[0].source, re.MULTILINE)[1])

    @property
    def objectives(self) -> list[str]:
        """What the first cell promises, without the marks that end a line."""
        promised = self.cells[0].source.partition("**Afterwards you can**")[2].strip().split("\n\n")[0]
        return [line.removeprefix("- ").rstrip(".;") for line in promised.splitlines()]

    @property
    def number(self) -> int:
        return int(self.path.name[:2])

    @property
    def exercises(self) -> tuple[Exercise, ...]:
        return lesson_module(str(self.number)).EXERCISES

    @property
    def questions(self) -> tuple[Question, ...]:
        return lesson_module(str(self.number)).QUIZ

    @property
    def asking(self) -> dict[str, nbformat.NotebookNode]:
        """The cells that ask for an answer, by the number of the exercise or `quiz`."""
        return {name: cell for cell in self.cells if (name := solve.asks(cell))}

    @property
    def solutions(self) -> dict[str, str]:
        return solve.sections(solve.solutions_of(self.path).read_text("utf-8"))

    @property
    def solved(self) -> "Lesson":
        return Lesson(solve.solutions_of(self.path).with_suffix(".ipynb"))

    @property
    def plan(self) -> Path:
        """What a teacher has for it."""
        return self.path.parent / "instructor" / f"{self.path.stem}.md"


def shown(cell: nbformat.NotebookNode) -> str:
    """What a cell printed and gave, as text."""
    outputs = (output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs)
    return "\n".join(output.rstrip() for output in outputs)


def sanitized(text: str) -> str:
    """The text without what may differ from run to run, by the patterns that nbval goes by."""
    patterns = configparser.ConfigParser(interpolation=None)
    patterns.read(FOLDER / "nbval_sanitize.cfg")
    for name in patterns.sections():
        text = re.sub(patterns[name]["regex"], patterns[name]["replace"], text)
    return text


LESSONS = [Lesson(path) for path in sorted(FOLDER.glob("[0-9][0-9]_*.ipynb"))]
every_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.path.stem)
every_exercise = pytest.mark.parametrize(
    ("lesson", "exercise"),
    [
        pytest.param(lesson, exercise, id=exercise.number)
        for lesson in LESSONS
        if (FOLDER.parent / f"memlab/course/lessons/lesson_{lesson.number:02}.py").exists()
        for exercise in lesson.exercises
    ],
)
