"""The solved notebooks: made from lesson and solutions and from nothing else, and each check in them says `right`."""

import nbformat
import pytest
import solve
from lessons import Lesson, every_lesson, sanitized, shown

markdown, code = nbformat.v4.new_markdown_cell, nbformat.v4.new_code_cell

BADGE = "[![Open](https://colab.research.google.com/github/an/y/blob/main/notebooks/07_small.ipynb)"
SOLUTIONS = """\
\"\"\"What stands before the first section is for whoever reads the file.\"\"\"

# %% 7.1
# Exercise 7.1 · fill · * · 2 min
double = 2 * 21

print("7.1: right" if double == 42 else "7.1: not yet")

# %% quiz
answers = "a"
quiz(7, answers)
"""


@pytest.fixture
def lesson(tmp_path):
    """A lesson of five cells with its solutions."""
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [
        markdown(f"# Small\n\n{BADGE}"),
        code("def quiz(lesson, answers):\n    print('right' if answers == 'a' else 'not answered yet')"),
        markdown(
            "Twice 21, as in the [glossary](glossary.md#twice), not in [a book](https://example.org) or [below](#end)."
        ),
        code(
            '# Exercise 7.1 · fill · * · 2 min\ndouble = ...\n\nprint("7.1: right" if double == 42 else "7.1: not yet")'
        ),
        code('answers = "no answer"\nquiz(7, answers)', execution_count=3, outputs=[]),
    ]
    path = tmp_path / "07_small.ipynb"
    nbformat.write(notebook, path)
    (tmp_path / "solutions").mkdir()
    (tmp_path / "solutions/07_small.py").write_text(SOLUTIONS)
    return path


def test_the_solutions_take_the_place_of_what_they_solve(lesson):
    before = nbformat.read(lesson, as_version=4)
    after = solve.solved(lesson)
    assert [cell.id for cell in after.cells] == [cell.id for cell in before.cells]
    assert after.cells[1].source == before.cells[1].source
    assert after.cells[3].source.startswith("# Exercise 7.1 · fill · * · 2 min\ndouble = 2 * 21\n")
    assert after.cells[4].source == 'answers = "a"\nquiz(7, answers)'
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in after.cells)


def test_it_says_what_it_is_and_its_links_start_from_its_own_folder(lesson):
    first, _, text, *_ = solve.solved(lesson).cells
    title, _, note, _, badge = first.source.splitlines()
    assert title == "# Small"
    assert "solve.py" in note
    assert "(../07_small.ipynb)" in note
    assert "(07_small.py)" in note
    assert badge == BADGE.replace("notebooks/07", "notebooks/solutions/07")
    assert text.source == (
        "Twice 21, as in the [glossary](../glossary.md#twice), not in [a book](https://example.org) or [below](#end)."
    )


def test_it_is_run_and_stored_beside_its_solutions(lesson, monkeypatch):
    monkeypatch.setattr("sys.argv", ["solve.py", str(lesson)])
    solve.main()
    stored = Lesson(lesson.parent / "solutions/07_small.ipynb")
    assert [cell.execution_count for cell in stored.code] == [1, 2, 3]
    assert [shown(cell) for cell in stored.code] == ["", "7.1: right", "right"]
    assert "widgets" not in stored.notebook.metadata


def test_one_that_raises_is_not_stored(lesson, monkeypatch):
    file = solve.solutions_of(lesson)
    file.write_text(SOLUTIONS.replace("2 * 21", "1 / 0"))
    monkeypatch.setattr("sys.argv", ["solve.py", str(lesson)])
    with pytest.raises(SystemExit, match="ZeroDivisionError"):
        solve.main()
    assert not file.with_suffix(".ipynb").exists()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("# %% 7.1", "# %% 7.2", r"07_small\.py has no section for: 7\.1$"),
        ("# %% quiz", "# some quiz", r"07_small\.py has no section for: quiz$"),
        ("# %% quiz", "# %% 7.2\ncheck()\n\n# %% quiz", r"07_small\.ipynb has no cell for: 7\.2$"),
        ("# %% quiz", "# %% 7.1\ncheck()\n\n# %% quiz", r"more than one section of: 7\.1$"),
    ],
)
def test_what_is_missing_is_named(lesson, old, new, message):
    solve.solutions_of(lesson).write_text(SOLUTIONS.replace(old, new))
    with pytest.raises(solve.MismatchError, match=message):
        solve.solved(lesson)


def test_a_lesson_without_solutions_is_told_where_they_belong(lesson):
    solve.solutions_of(lesson).unlink()
    with pytest.raises(solve.MismatchError, match=r"07_small\.ipynb has no solutions: write .*solutions/07_small\.py$"):
        solve.solved(lesson)


# -- every lesson ------------------------------------------------------------------------------------------------------


@every_lesson
def test_the_solved_notebook_is_made_from_the_lesson_as_it_stands(lesson):
    made, stored = solve.solved(lesson.path), lesson.solved.notebook
    assert [(cell.id, cell.source) for cell in stored.cells] == [(cell.id, cell.source) for cell in made.cells], (
        "run `make notebooks`"
    )


@every_lesson
def test_a_solution_leaves_the_first_and_the_last_line_of_its_cell(lesson):
    for name, source in lesson.solutions.items():
        given, written = lesson.asking[name].source.splitlines(), source.splitlines()
        assert written[-1] == given[-1], name
        assert name == "quiz" or written[0] == given[0], name


@every_lesson
def test_each_check_says_that_the_solution_is_right(lesson):
    said = {name: shown(cell) for name, cell in lesson.solved.asking.items()}
    assert said.pop("quiz").endswith("3 of 3 right")
    assert said == {number: f"{number}: right" for number in said}


@every_lesson
def test_what_is_printed_elsewhere_is_the_same_with_and_without_solutions(lesson):
    """Neither an answer nor a check changes what the cells behind it print."""
    for plain, solved in zip(lesson.code, lesson.solved.code, strict=True):
        if not solve.asks(plain) and "nbval-ignore-output" not in plain.metadata.get("tags", []):
            assert sanitized(shown(solved)) == sanitized(shown(plain)), plain.source
