"""Make the solved notebooks from the lessons and their solutions, so that nothing is written twice.

    python notebooks/solve.py [lesson ...]   # notebooks as paths; without names: all lessons, beside this file

`solutions/NN_topic.py` holds the solutions of `NN_topic.ipynb`: behind a line `# %% 2.3` the whole source of the cell
of exercise 2.3, behind `# %% quiz` that of the quiz's. `solutions/NN_topic.ipynb` is the lesson with these cells in
place of its own, run from top to bottom. Each exercise must have its solution, and each solution its exercise.
"""

import re
import sys
from pathlib import Path

import nbformat
from execute import HERE, LESSONS, run, store
from nbclient.exceptions import CellExecutionError

SECTION = re.compile(r"^# %% (\S+)$", re.MULTILINE)
EXERCISE = re.compile(r"# Exercise (\d+\.\d+)\b")
QUIZ = re.compile(r"^quiz\(", re.MULTILINE)
LOCAL_LINK = re.compile(r"\]\((?![a-z]+:|#)")
NOTE = (
    "> **Solved.** This page is the lesson [{name}](../{name}.ipynb) with its solutions, made by "
    "`notebooks/solve.py` from the lesson and [{name}.py]({name}.py): change those, not this."
)


class MismatchError(Exception):
    """A lesson and its solutions do not go together."""


def sections(text: str) -> dict[str, str]:
    """The parts of a file of solutions, by what stands behind `# %%`."""
    _, *parts = SECTION.split(text)
    names, sources = parts[::2], parts[1::2]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise MismatchError(f"more than one section of: {', '.join(twice)}")
    return {name: source.strip() for name, source in zip(names, sources, strict=True)}


def asks(cell: nbformat.NotebookNode) -> str | None:
    """Which solution belongs into a cell: the number of an exercise, `quiz`, or none."""
    if cell.cell_type != "code":
        return None
    if exercise := EXERCISE.match(cell.source):
        return exercise[1]
    return "quiz" if QUIZ.search(cell.source) else None


def solutions_of(lesson: Path) -> Path:
    """The file with the solutions of a lesson; the solved notebook lies beside it, under the lesson's name."""
    return lesson.parent / "solutions" / f"{lesson.stem}.py"


def solved(lesson: Path) -> nbformat.NotebookNode:
    """The solved notebook, not yet run. Raises MismatchError where a solution or an exercise is missing."""
    file = solutions_of(lesson)
    if not file.exists():
        raise MismatchError(f"{lesson.name} has no solutions: write {file}")
    notebook = nbformat.read(lesson, as_version=4)
    solutions = sections(file.read_text(encoding="utf-8"))
    asked = [name for name in map(asks, notebook.cells) if name]
    if missing := [name for name in asked if name not in solutions]:
        raise MismatchError(f"{file} has no section for: {', '.join(missing)}")
    if left := [name for name in solutions if name not in asked]:
        raise MismatchError(f"{lesson} has no cell for: {', '.join(left)}")
    for cell in notebook.cells:
        if name := asks(cell):
            cell.source = solutions[name]
        elif cell.cell_type == "markdown":
            cell.source = LOCAL_LINK.sub("](../", cell.source)  # it lies one folder below the lesson
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    first = notebook.cells[0]
    title, rest = first.source.replace(f"/{lesson.name}", f"/solutions/{lesson.name}").split("\n", 1)
    first.source = f"{title}\n\n{NOTE.format(name=lesson.stem)}\n{rest}"
    return notebook


def main() -> None:
    for lesson in [Path(name) for name in sys.argv[1:]] or sorted(HERE.glob(LESSONS)):
        path = solutions_of(lesson).with_suffix(".ipynb")
        print(path, flush=True)
        try:
            notebook = solved(lesson)
            run(notebook, path.parent)
        except (MismatchError, CellExecutionError) as error:
            sys.exit(f"{path} was left as it was:\n{error}")
        store(notebook, path)


if __name__ == "__main__":
    main()
