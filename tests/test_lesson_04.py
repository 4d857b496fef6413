"""Lesson 4: its solutions are right, and each wrong answer is told what is wrong with it.

The answers below are as people write them: each section of the solutions, the cells of the notebook as they stand, the
mistakes that the lesson knows, and slips that it does not know.
"""

import itertools
import math
from pathlib import Path

import nbformat
import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

import memlab
from memlab.course import check, quiz
from memlab.course.exercises import Exercise
from memlab.course.lessons.lesson_04 import EXERCISES, QUIZ

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
SECTIONS = {
    name: source
    for name, _, source in (
        part.partition("\n")
        for part in (NOTEBOOKS / "solutions/04_placing_checkpoints.py").read_text("utf-8").split("# %% ")[1:]
    )
}
NUMBERS = {exercise.number: exercise for exercise in EXERCISES}
PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
LESSON = {"torch": torch, "comb": math.comb, "CheckpointPolicy": CheckpointPolicy, "products": PRODUCTS}
every_exercise = pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.number)


def outcome_of(source):
    """What the check in a cell says."""
    said = []
    exec(source, LESSON | {"check": lambda number, answer: said.append(check(number, answer))})
    (outcome,) = said
    return outcome


def changed(number, name, *replacements):
    """The solution with some of its text replaced."""
    source = SECTIONS[number]
    for old, new in replacements:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    space = LESSON | {"check": lambda *answer: None}
    exec(source, space)
    return space[name]


@every_exercise
def test_the_solution_is_right(exercise):
    assert outcome_of(SECTIONS[exercise.number]).state == "right"
    assert SECTIONS[exercise.number].startswith(f"# {exercise.head}\n")


def test_the_quiz_has_its_solution():
    said = []
    exec(SECTIONS["quiz"], {"quiz": lambda *answers: said.append(quiz(*answers))})
    assert said[0].right == len(QUIZ) == 3


@every_exercise
def test_the_cell_as_it_stands_is_not_attempted(exercise):
    cells = nbformat.read(NOTEBOOKS / "04_placing_checkpoints.ipynb", as_version=4).cells
    (cell,) = (cell for cell in cells if cell.source.startswith(f"# {exercise.head}\n"))
    assert outcome_of(cell.source).text == "not attempted yet"


@every_exercise
def test_each_mistake_gets_its_own_hint(exercise):
    assert len(exercise.mistakes) >= 3
    assert len({mistake.hint for mistake in exercise.mistakes}) == len(exercise.mistakes)
    for mistake in exercise.mistakes:
        assert exercise.judge(mistake.answer).text == f"not yet. {mistake.hint}"


@every_exercise
def test_what_is_read_from_a_wrong_value_suits_the_mistakes_too(exercise):
    """Were a mistake not known, there would still be something to say."""
    unknown = Exercise(**{**vars(exercise), "mistakes": ()})
    for mistake in exercise.mistakes:
        assert "something else on the cases" not in unknown.judge(mistake.answer).text


@pytest.mark.parametrize("number", ["4.1", "4.2", "4.4", "4.5"])
def test_the_learners_own_error_passes(number):
    def fails(*args, **kwargs):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        check(number, fails)


def says(number, answer, words):
    outcome = NUMBERS[number].judge(answer)
    assert outcome.state == "wrong"
    assert words in outcome.text


# -- 4.1 ---------------------------------------------------------------------------------------------------------------

WAITING, BACK = '"waiting": i * a', '"back": length * A'


@pytest.mark.parametrize(
    ("waiting", "back", "words"),
    [
        ("(i + 1) * a", "length * A", "is in your sum twice"),
        ("len(lengths) * a", "length * A", "wait until the end"),
        ("i", "length * A", "inputs, not bytes"),
        ("i * a", "length", "blocks, not bytes"),
        ("i * a", "A", "a single block is back"),
        ("a", "length * A", "whichever segment"),
        ("a * (i > 0)", "length * A", "whichever segment"),
        ("0", "length * A", "still to reach"),
        ("i * A", "length * A", "keeps more than its first block's input"),
        ("i * a", "length * a", "no more than its input"),
        ("i * a", "(length - 1) * A + a", "what is back"),
        ("i * a", "length * A + a", "is in your sum twice"),
        ("(len(lengths) - i) * a", "length * A", "Counted from the wrong end"),
        ("(len(lengths) - i - 1) * a", "length * A", "counted from the wrong end"),
        ("sum(lengths[:i]) * a", "length * A", "however many blocks"),
    ],
)
def test_slips_in_what_is_held(waiting, back, words):
    answer = changed("4.1", "most_held", (WAITING, f'"waiting": {waiting}'), (BACK, f'"back": {back}'))
    says("4.1", answer, words)


def test_other_ways_to_say_what_is_held_are_right():
    assert check("4.1", lambda lengths, A, a: max(i * a + n * A for i, n in enumerate(lengths))).state == "right"
    assert check("4.1", lambda lengths, A, a: float(max(i * a + n * A for i, n in enumerate(lengths)))).state == "right"


# -- 4.2 ---------------------------------------------------------------------------------------------------------------


def near_equal(n, count):
    return [n // count + (number < n % count) for number in range(count)]


def by_trial(n, A, a):
    """A right answer by another road: bisection over the room."""

    def within(room):
        found = []
        while sum(found) < n and room - len(found) * a >= A:
            found.append(min(n - sum(found), (room - len(found) * a) // A))
        return found

    low, high = A, n * A
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if sum(within(middle)) == n else (middle + 1, high)
    return tuple(within(low))


def test_another_road_to_the_lengths_is_right():
    assert check("4.2", by_trial).state == "right"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda n, A, a: near_equal(n, max(1, n // 2)), "your highest moment is"),
        (lambda n, A, a: [n / 2, n / 2], "give a list of whole numbers"),
        (lambda n, A, a: [n + 1, -1], "give a list of whole numbers"),
        (lambda n, A, a: [*by_trial(n, A, a)][:-1], "is the last one cut"),
        (lambda n, A, a: [*by_trial(n, A, a), 1], "is the last one cut"),
        (lambda n, A, a: [n // 5] * 5, "is the last one cut"),
        (lambda n, A, a: sorted(by_trial(n, A, a)), "in reverse"),
        (lambda n, A, a: [n - 1, 1], "Which is the least room"),
        (lambda n, A, a: [1, n - 1], "Beside which segment do the fewest"),
        (lambda n, A, a: near_equal(n, math.isqrt(n)), "your highest moment is"),
        (lambda n, A, a: len(by_trial(n, A, a)), "give a list of whole numbers"),
        (lambda n, A, a: max(i * a + k * A for i, k in enumerate(by_trial(n, A, a))), "give a list of whole numbers"),
    ],
)
def test_slips_in_the_lengths(answer, words):
    says("4.2", answer, words)


def test_lengths_that_are_looked_for_without_end():
    def lengths(n, A, a):
        found = []
        while sum(found) < n:
            found.append((2 * A - len(found) * a) // A)
        return found

    says("4.2", lengths, "yours does not come to an end")


def test_the_least_highest_moment_is_that_of_all_splits():
    """By enumeration, where there are few."""
    (held,) = (NUMBERS["4.2"].truth()[place][1] for place in (4,))  # 7 blocks of 300 and 100 bytes
    splits = (
        [b - a for a, b in itertools.pairwise((0, *cuts, 7))]
        for count in range(7)
        for cuts in itertools.combinations(range(1, 7), count)
    )
    assert held == min(max(i * 100 + length * 300 for i, length in enumerate(split)) for split in splits)


# -- 4.3 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ("b d f a e i g h e", "after its own backward pass"),
        ("b d f a i e g e h", "From what would B run again"),
        ("b d f a e g e h", "how often does it run again"),
        ("d b f a e i g e h", "in which order, and how far"),
        ("b d a f e i g e h", "in which order, and how far"),
        ("b d f a e i g e", "A runs backward once"),
        ("b d f h g a", "Which block stands next to it"),
        ("b d f a g e i e h", "B runs backward before it has run again"),
        ("b d f a e i g e e h", "Count the checkpoints that A lies in"),
        ("b d f e a i g e h", "does C's backward pass need"),
        ("b d f a e i e h g", "Which block stands next to it"),
    ],
)
def test_slips_in_the_order(order, words):
    says("4.3", order, words)


def test_the_order_may_be_written_in_several_ways():
    for order in ("bdfaeigeh", "B D F A E I G E H", "b, d, f, a, e, i, g, e, h", list("bdfaeigeh")):
        assert check("4.3", order).state == "right"
    with pytest.raises(memlab.MemlabError, match="no pass has the letter 'z': write letters from a to i"):
        check("4.3", "b d z")


# -- 4.4 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("replacements", "words"),
    [
        ([("(room - A) // a", "room // a")], "What else has to be there"),
        ([("(room - A) // a", "(room - A + a) // a")], "One input too many"),
        ([("(room - A) // a", "room - A")], "how many inputs are they?"),
        ([("(room - A) // a", "room - 5")], "Here both are arguments"),
        ([("(room - A) // a", "room // a - A // a")], "You round twice"),
        ([("s < 1", "s < 0")], "yours does not come to an end"),
        ([("s < 1", "room < A")], "yours does not come to an end"),
        ([("r * n - comb(s + r, r - 1)", "r * n")], "fewer times than r"),
        ([("r * n - comb(s + r, r - 1)", "r * n - comb(s + r, r)")], "has r - 1 below"),
        ([("r * n - comb(s + r, r - 1)", "n - comb(s + r, r - 1)")], "yours says"),
        ([("r * n - comb(s + r, r - 1)", "r * n - comb(s + r - 1, r - 1)")], "the upper number is s + r"),
        ([("r * n - comb(s + r, r - 1)", "r * n - comb(s + r, r - 1) + n")], "the first forward pass too"),
        ([("r * n - comb(s + r, r - 1)", "n")], "one level of checkpoints"),
        ([("return None", "return 0")], "cannot run at all"),
        ([("return None", "return -1")], "Does a running block fit in"),
        ([("comb(s + r, r) < n", "comb(s + r, s + 1) < n")], "yours says"),
    ],
)
def test_slips_in_the_bound(replacements, words):
    says("4.4", changed("4.4", "least_again", *replacements), words)


def test_where_r_reaches_exactly_n_the_next_one_gives_the_same():
    assert check("4.4", changed("4.4", "least_again", ("< n", "<= n"))).state == "right"


def test_the_search_gives_the_bound_as_well():
    def least_again(n, A, a, room):
        if room - A < a:
            return None
        found = [[0] * (n + 1) for _ in range((room - A) // a + 1)]
        for s, m in itertools.product(range(len(found)), range(2, n + 1)):
            found[s][m] = min(k + found[s][k] + found[s - 1][m - k] for k in range(1, m)) if s else math.inf
        return found[-1][n]

    assert check("4.4", least_again).state == "right"


# -- 4.5 ---------------------------------------------------------------------------------------------------------------

KEEP = "op in products and args[-1].shape[1] <= args[-2].shape[1]"


@pytest.mark.parametrize(
    ("keep", "words"),
    [
        ("op in products", "give more numbers than they read"),
        ("op in products and args[-1].shape[0] <= args[-2].shape[1]", "which side of `w`"),
        ("op not in products", "which is no matrix product"),
        ("not (op in products and args[-1].shape[1] <= args[-2].shape[1])", "which is no matrix product"),
        ("op in products and args[-1].shape[1] < args[-2].shape[1]", "just as many"),
        ("op in products and args[-1].shape[1] > args[-2].shape[1]", "the wrong way round"),
        ("op in products and args[-1].shape[0] <= args[-2].shape[0]", "How many columns has the result?"),
        ("op in products and args[-1].numel() <= args[-2].numel()", "or all numbers of both"),
        ("op is torch.ops.aten.mm", "Nothing is kept"),
        ("op is products[0] and args[-1].shape[1] <= args[-2].shape[1]", "Linear layers with a bias"),
        ("str(op) in ('mm', 'addmm')", "Nothing is kept"),
        ("op in products and args[1].shape[1] <= args[0].shape[-1]", "bias before the two matrices"),
        ("op in products and args[-1].shape[1] <= args[-2].shape[0]", "with the rows of the matrix"),
        ("False", "Nothing is kept"),
        ("True", "You keep everything"),
    ],
)
def test_slips_in_the_policy(keep, words):
    says("4.5", changed("4.5", "policy", (KEEP, keep)), words)


def test_other_policies_are_right():
    for keep in (
        "op in products and args[-1].shape[1] <= args[-1].shape[0]",
        "op in products and not args[-1].size(1) > args[-2].size(1)",
        "op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) and (args[-2] @ args[-1]).numel() <= "
        "args[-2].numel()",
    ):
        assert check("4.5", changed("4.5", "policy", (KEEP, keep))).state == "right"
    prefer = changed("4.5", "policy", ("MUST_SAVE", "PREFER_SAVE"))
    assert check("4.5", prefer).state == "right"
