"""Make `beliefs.md`: every belief that a lesson puts to the test, and where.

    python notebooks/beliefs.py

A belief stands in a lesson as a box, `> **Often believed:** ...`, with its measurements below it.
"""

import re
from pathlib import Path

import nbformat
from execute import HERE, LESSONS

BELIEF = re.compile(r"^> \*\*Often believed:\*\* (.+(?:\n> .+)*)$", re.MULTILINE)
SECTION = re.compile(r"^#{2,} (.+)$", re.MULTILINE)
PAGE = HERE / "beliefs.md"
HEAD = """\
# Often believed

What introductions, blog posts and chatbots say of memory in training, and where it is put to the test: each sentence is
measured once where it fails and once where it holds. The lesson [Folklore](11_folklore.ipynb) has them all on one score
sheet. This page is made from the lessons by `notebooks/beliefs.py`.
"""


def beliefs(lesson: Path) -> list[tuple[str, str]]:
    """Each belief of a lesson, with the heading of the section that it stands in."""
    found, heading = [], ""
    for cell in nbformat.read(lesson, as_version=4).cells:
        if cell.cell_type == "markdown":
            for mark in sorted([*SECTION.finditer(cell.source), *BELIEF.finditer(cell.source)], key=re.Match.start):
                if mark.re is SECTION:
                    heading = mark[1]
                else:
                    found.append((mark[1].replace("\n> ", " "), heading))
    return found


def page() -> str:
    """The page as it should be for the lessons as they stand."""
    parts = [HEAD]
    for lesson in sorted(HERE.glob(LESSONS)):
        title = nbformat.read(lesson, as_version=4).cells[0].source.splitlines()[0].removeprefix("# ")
        rows = [f"| {belief} | {heading} |" for belief, heading in beliefs(lesson)]
        parts.append("\n".join([f"## [{title}]({lesson.name})\n", "| belief | section |", "| --- | --- |", *rows, ""]))
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
