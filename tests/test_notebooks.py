"""The lessons' structure: what every notebook tells its learner, asks, shows and leaves out.

What they print is compared by nbval (`make test`); that they are stored whole is held in `test_project.py`, exercises
and quizzes in `test_course_exercises.py` and `test_course_quizzes.py`, the solved notebooks in `test_solutions.py`.
"""

import base64
import importlib
import io
import re

import beliefs
import links
import numpy as np
import pytest
from lessons import FOLDER, LESSONS, every_exercise, every_lesson, shown
from matplotlib import colors, image

from memlab.views.colours import COLOURS

LARGEST_FIGURE = 40_000  # bytes of PNG
MOST_CODE_CELLS = 20
ALSO_READ = [FOLDER / "README.md", FOLDER / "glossary.md", *sorted((FOLDER / "instructor").glob("*.md"))]
every_page = pytest.mark.parametrize("page", ALSO_READ, ids=lambda path: path.stem)


def test_the_lessons_begin_at_0_and_no_number_is_there_twice():
    numbers = [lesson.number for lesson in LESSONS]
    assert numbers[0] == 0
    assert len(set(numbers)) == len(numbers) >= 4


# -- for the learner ---------------------------------------------------------------------------------------------------


@every_lesson
def test_it_opens_on_colab_and_on_binder(lesson):
    first = lesson.cells[0].source
    file = f"notebooks/{lesson.path.name}"
    repository = links.repository()
    assert f"](https://colab.research.google.com/github/{repository}/blob/main/{file})" in first
    assert f"](https://mybinder.org/v2/gh/{repository}/main?urlpath=lab/tree/{file})" in first


@every_lesson
def test_it_installs_itself_on_colab_alone(lesson):
    guard, *_ = (cell.source for cell in lesson.code)
    assert lesson.cells[1].source == guard, "before anything else"
    assert 'if "google.colab" in sys.modules:' in guard
    assert f"%pip install --quiet --no-deps git+https://github.com/{links.repository()}" in guard
    assert not re.search(r"pip install|conda install|drive\.mount", "".join(cell.source for cell in lesson.code[1:]))


@every_lesson
def test_it_says_what_it_asks_and_what_it_gives(lesson):
    first = lesson.cells[0].source
    assert re.match(r"# \S", first)
    assert re.search(r"^\*\*.+\?\*\*$", first, re.MULTILINE), "a question to open with"
    assert 20 <= lesson.minutes <= 45
    assert re.search(r"^\*\*Before:\*\* \S", first, re.MULTILINE)
    headings = re.findall(r"^## (.+)$", lesson.text, re.MULTILINE)
    assert headings[-3:] == ["Summary", "Words", "References"]


@every_lesson
def test_its_objectives_say_what_can_be_seen_to_be_done(lesson):
    assert 3 <= len(lesson.objectives) <= 5
    for objective in lesson.objectives:
        verb = objective.split()[0]
        assert re.fullmatch(r"[a-z]+", verb), objective
        assert verb not in {"a", "an", "appreciate", "how", "know", "learn", "see", "the", "understand", "what", "why"}


@every_lesson
def test_it_is_one_sitting(lesson):
    assert 25 <= len(lesson.cells) <= 45
    assert len(lesson.code) <= MOST_CODE_CELLS
    assert all(len(cell.source.splitlines()) <= 30 for cell in lesson.code)


@every_lesson
def test_it_has_a_worked_example_with_named_steps(lesson):
    _, *behind = re.split(r"worked example", lesson.text, flags=re.IGNORECASE)
    assert behind
    source = "\n".join(cell.source for cell in lesson.cells)
    assert len(set(re.findall(r"\bstep (\d)\b", source, re.IGNORECASE))) >= 2


@every_lesson
def test_it_asks_for_predictions_and_runs_without(lesson):
    fields = re.findall(r"^\w+ = \"no guess\"(.*)$", "\n".join(cell.source for cell in lesson.code), re.MULTILINE)
    assert len(fields) >= 2, "one to begin with and one to end with"
    assert all(field.startswith("  # @param ") for field in fields), "a form on Colab"


@every_lesson
def test_its_last_prediction_stands_beside_its_first(lesson):
    predicting = [place for place, cell in enumerate(lesson.code) if re.search(r"\bpredict\(", cell.source)]
    closing = [place for place, cell in enumerate(lesson.code) if re.search(r"\bbeside\(", cell.source)]
    assert predicting[0] < predicting[-1] <= closing[-1]
    assert "your guess" in shown(lesson.code[closing[-1]])


def test_every_belief_is_in_the_list_of_beliefs():
    assert beliefs.PAGE.read_text("utf-8") == beliefs.page(), "run `make notebooks`"
    assert beliefs.page().count("\n| ") - 2 * len(LESSONS) == sum(
        lesson.text.count("**Often believed:**") for lesson in LESSONS
    )


@every_lesson
def test_it_measures_each_belief_where_it_fails_and_where_it_holds(lesson):
    boxes = [place for place, cell in enumerate(lesson.cells) if "> **Often believed:** " in cell.source]
    assert boxes
    for box, end in zip(boxes, [*boxes[1:], len(lesson.cells)], strict=True):
        measured = []
        for cell in lesson.cells[box + 1 : end]:
            if re.search(r"^## ", cell.source, re.MULTILINE) and cell.cell_type == "markdown":
                break
            measured += shown(cell).splitlines() if cell.cell_type == "code" else []
        assert len(measured) >= 2, lesson.cells[box].source


# -- exercises and quiz ------------------------------------------------------------------------------------------------


@every_lesson
def test_it_has_exercises_of_each_kind(lesson):
    numbers = [exercise.number for exercise in lesson.exercises]
    assert numbers == [f"{lesson.number}.{place + 1}" for place in range(len(numbers))]
    assert 3 <= len(numbers) <= 5
    assert {exercise.kind for exercise in lesson.exercises} == {"fill", "order", "write"}
    assert [*lesson.asking] == [*numbers, "quiz"], "in this order, and no others"


@every_lesson
def test_each_objective_has_an_exercise(lesson):
    assert {exercise.objective.rstrip(".;") for exercise in lesson.exercises} == set(lesson.objectives)


@every_exercise
def test_its_cell_begins_with_its_head_and_ends_with_its_check(lesson, exercise):
    lines = lesson.asking[exercise.number].source.splitlines()
    assert lines[0] == f"# {exercise.head}"
    assert lines[-1].startswith(f'check("{exercise.number}", ')
    assert lines[-1].endswith(")")


@every_exercise
def test_its_task_stands_above_it(lesson, exercise):
    place = lesson.cells.index(lesson.asking[exercise.number])
    assert lesson.cells[place - 1].cell_type == "markdown"


@every_exercise
def test_untouched_it_is_not_attempted(lesson, exercise):
    assert shown(lesson.asking[exercise.number]) == f"{exercise.number}: not attempted yet"


@every_lesson
def test_it_ends_in_a_quiz_that_is_not_answered(lesson):
    cell = lesson.asking["quiz"]
    assert 'answers = "no answer"  # @param {type: "string"}' in cell.source.splitlines()
    assert cell.source.splitlines()[-1] == f"quiz({lesson.number}, answers)"
    assert shown(cell).endswith("not answered yet")


# -- beside it ---------------------------------------------------------------------------------------------------------


@every_lesson
def test_a_teacher_has_a_plan_for_it(lesson):
    plan = lesson.plan.read_text("utf-8")
    assert "45" in plan, "minutes of a class"
    for exercise in lesson.exercises:
        assert exercise.number in plan, "what learners answer to it"
    assert "varies" in plan, "what is different on another machine"


@every_lesson
def test_the_list_of_lessons_has_it(lesson):
    title = lesson.cells[0].source.splitlines()[0].removeprefix("# ")
    row = rf"^\| \[{re.escape(title)}\]\({lesson.path.name}\) \|.*\| {lesson.minutes} \|$"
    assert re.search(row, (FOLDER / "README.md").read_text("utf-8"), re.MULTILINE), f"{title}, {lesson.minutes} minutes"


# -- links and names ---------------------------------------------------------------------------------------------------


def anchors(text):
    """The headings of a page, as a repository's site makes anchors of them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def dead_links(text, folder):
    """The links to files of ours that are not there, or have no such heading."""
    for link in re.findall(r"\]\((?![a-z]+:)([^)\s]+)\)", text):
        file, _, anchor = link.partition("#")
        path = folder / file
        there = text if not file else path.read_text("utf-8") if path.is_file() else ""
        if not path.exists() or (anchor and anchor not in anchors(there)):
            yield link


@every_lesson
def test_its_links_lead_somewhere(lesson):
    assert not list(dead_links(lesson.text, FOLDER))
    solved = lesson.solved
    assert not list(dead_links(solved.text, solved.path.parent))


@every_page
def test_the_links_of_a_page_lead_somewhere(page):
    assert not list(dead_links(page.read_text("utf-8"), page.parent))


@every_lesson
def test_its_words_are_in_the_glossary(lesson):
    words = lesson.text.partition("\n## Words\n")[2].partition("\n## ")[0]
    assert len(re.findall(r"\]\(glossary\.md#[\w-]+\)", words)) >= 3


@every_lesson
def test_it_links_to_its_own_repository_alone(lesson):
    """Papers and documentation are referred to by name, which lives longer than an address."""
    hosts = set(re.findall(r"https?://([^/\s)]+)", lesson.text))
    assert hosts == {"colab.research.google.com", "mybinder.org"}
    references = lesson.text.partition("\n## References\n")[2]
    assert len(re.findall(r"^- \S", references, re.MULTILINE)) >= 2


def resolves(name):
    """Whether a dotted name is a module, or something in one."""
    parts = name.split(".")
    for place in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:place]))
        except ImportError:
            continue
        for part in parts[place:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


@every_lesson
def test_the_names_in_its_text_exist(lesson):
    names = set(re.findall(r"`((?:torch|memlab)(?:\.\w+)+)\b", lesson.text))
    assert not [name for name in sorted(names) if not resolves(name)]


# -- spelling ----------------------------------------------------------------------------------------------------------

# The field's terms, and units that are powers of two; as a pattern without capitals, in any case.
WRONG = {
    r"check-point|check point": "checkpoint",
    r"gradient-checkpoint|activation-checkpoint": "gradient checkpointing, activation checkpointing",
    r"micro ?batch": "micro-batch",
    r"re-comput": "recompute",
    r"auto-cast|auto cast": "autocast",
    r"auto-grad|auto grad": "autograd",
    r"optimis(?:er|ing|ation|e)": "optimizer, optimize",
    r"work-space|work space": "workspace",
    r"vector-jacobian|vector Jacobian": "vector-Jacobian",
    r"layer-norm|layer norm|Layernorm": "LayerNorm",
    r"batch-norm|batch norm|Batchnorm": "BatchNorm",
    r"py-torch|py torch|Pytorch": "PyTorch",
    r"\bGelu\b|\bRelu\b|\bSilu\b": "GELU, ReLU, SiLU",
    r"\d ?(?:MB|GB|KB|kB)\b|\bmib\b|\bgib\b": "MiB, GiB, KiB",
    r"occured|seperat|accomodat|recieve|consistant|independant|noticable|wether": "as a dictionary has it",
}


def misspelled(text):
    text = re.sub(r"`[^`]*`|https?://\S+|\]\([^)]*\)", "", text)
    text = text.partition("\n## References\n")[0]  # titles are as their authors wrote them
    for wrong, right in WRONG.items():
        for found in re.findall(rf"\S*(?:{wrong})\S*", text, re.IGNORECASE if wrong.islower() else 0):
            yield f"{found}: write {right}"


@every_lesson
def test_its_terms_are_spelled_as_the_field_spells_them(lesson):
    said = [part for exercise in lesson.exercises for part in (exercise.task, *(m.hint for m in exercise.mistakes))]
    said += [
        part for question in lesson.questions for option in question.options for part in (option.text, option.feedback)
    ]
    said += [question.text for question in lesson.questions]
    comments = re.findall(r"#(.*)$", "\n".join(cell.source for cell in lesson.code), re.MULTILINE)
    assert not list(misspelled("\n".join([*said, *comments, lesson.text])))


@every_page
def test_the_terms_of_a_page_are_spelled_as_the_field_spells_them(page):
    assert not list(misspelled(page.read_text("utf-8")))


# -- what is stored ----------------------------------------------------------------------------------------------------


@every_lesson
def test_a_figure_is_small_and_has_its_text(lesson):
    for cell in lesson.code:
        figures = [output for output in cell.outputs if "image/png" in output.get("data", {})]
        for figure in figures:
            assert len(base64.b64decode(figure.data["image/png"])) <= LARGEST_FIGURE
            assert not figure.data["text/plain"].startswith("<"), "a summary, not <Figure ...>"
            assert figure.metadata["image/png"]["alt"], "what a screen reader reads"
        if figures:
            assert any(output.output_type == "stream" for output in cell.outputs), "what is to be read from it"


PALETTE = np.array([colors.to_rgb(colour) for colour in COLOURS.values()])
GREYS = np.array([(0.0, 0.0, 0.0), (1.0, 1.0, 1.0)])


def foreign_share(png):
    """The share of a picture's pixels whose colour is neither grey nor one of the palette, lighter or darker."""
    pixels = image.imread(io.BytesIO(png))[..., :3].reshape(-1, 3)
    coloured = pixels[np.ptp(pixels, axis=1) > 0.15]
    if not len(coloured):
        return 0.0
    unique, count = np.unique((coloured * 51).round() / 51, axis=0, return_counts=True)
    nearest = np.full(len(unique), np.inf)
    for colour in PALETTE:
        for end in GREYS:
            along = end - colour
            share = np.clip((unique - colour) @ along / (along @ along), 0, 1)[:, None]
            nearest = np.minimum(nearest, np.linalg.norm(unique - (colour + share * along), axis=1))
    return count[nearest > 0.12].sum() / len(pixels)


@every_lesson
def test_its_figures_have_the_colours_of_the_others(lesson):
    for output in lesson.outputs:
        if png := output.get("data", {}).get("image/png"):
            assert foreign_share(base64.b64decode(png)) < 0.01


@every_lesson
def test_nothing_is_stored_that_differs_from_run_to_run(lesson):
    for output in lesson.outputs:
        assert output.get("name") != "stderr", output.text
        assert not {key for key in output.get("data", {}) if "widget" in key or "svg" in key or "javascript" in key}
    assert not any(re.search(r"clear_output|Output\(|\binteract|%matplotlib", cell.source) for cell in lesson.code)


@every_lesson
def test_nothing_names_the_machine_it_was_made_on(lesson):
    for path in (lesson.path, lesson.solved.path):
        text = re.sub(r'"image/png": "[^"]*"', "", path.read_text("utf-8"))  # where any letters may meet
        assert not re.search(r"/(home|root|tmp|work|Users)/", text)
