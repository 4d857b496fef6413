"""Lesson 9, accuracy and memory: five exercises and the quiz.

What is checked are comparisons: their order, their numbers, what they allow to be said. The truth comes from what each
line needs, from torch's own statistics, from counting step by step, and from trying every size.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from itertools import count, product, takewhile
from typing import Any

import torch

from ..exercises import Answer, Exercise, Mistake, Result, letters_of
from ..quizzes import Option, Question

_TOGETHER = "put a fair comparison together: what is equal, and what alone differs"
_READ = "read a difference beside its spread over seeds"
_STEPS = "plan the steps of a comparison at equal samples and at equal time"
_FITS = "find the largest model that fits under a limit, and say where it wins"


# ---------------------------------------------------------------------------------------------- 9.1 a fair comparison

# In the order of the letters; what each needs to have been done before it.
_LINES = {
    "a": ("train both on the same batches, in the same order", "d"),
    "b": ("make a model", "g"),
    "c": ("take the seed at which the technique did best", None),
    "d": ("copy the model, for the technique", "b"),
    "e": ("score both on the samples that were held out", "a"),
    "f": ("subtract the scores, seed by seed; take mean and standard error", "e"),
    "g": ("for each seed: set it", "i"),
    "h": ("draw other batches for the technique", None),
    "i": ("hold samples out; fix the number of steps, and the seeds", ""),
}


_TOO_SOON = {
    "b": "The model is made before the seed is set: from where has it its weights, and does the next seed have others?",
    "d": "A copy of what? It comes before there is a model.",
    "a": "The copy is made of a model that is trained already: do both begin with the same weights?",
    "e": "Both are scored before they are trained: what would the difference be?",
}


def _lines(order: Answer) -> Result:
    """The lines that the letters name."""
    return letters_of(order, _LINES, "line", "b d")


def _by_needs() -> Result:
    """Each line once what it needs is there."""
    order, done = [], ""
    while ready := [letter for letter, (_, needs) in _LINES.items() if needs == done]:
        (done,) = ready
        order.append(done)
    return order


def _what_is_out_of_order(result: Result, truth: Result) -> str | None:
    if "c" in result:
        return "The best of several seeds is better than a single run even where nothing differs: may one choose it?"
    if "h" in result:
        return "With other batches two things differ, the technique and the data: to which would you put a difference?"
    if twice := [letter for letter in result if result.count(letter) > 1]:
        return f"{twice[0]} is there twice: each line happens once in the text, those of a seed once for each."
    if missing := [letter for letter in truth if letter not in result]:
        return f"{len(missing)} of the lines {'is' if len(missing) == 1 else 'are'} missing; two of the nine are none."
    if result[0] != "i":
        return "What must not depend on how the runs turn out? It has to be fixed before any of them."
    for letter in truth:
        needs = _LINES[letter][1]
        if needs and result.index(needs) > result.index(letter):
            if letter in _TOO_SOON:
                return _TOO_SOON[letter]
            return f"“{_LINES[letter][0]}” comes before “{_LINES[needs][0]}”: can it do without?"
    return None


_ORDER = Exercise(
    number="9.1",
    kind="order",
    task="Order the lines of a fair comparison, without the two that make it unfair.",
    difficulty=1,
    minutes=4,
    objective=_TOGETHER,
    run=_lines,
    truth=_by_needs,
    mistakes=(
        Mistake(
            "i b g d a e f",
            _TOO_SOON["b"],
        ),
        Mistake(
            "i g b a d e f",
            _TOO_SOON["a"],
        ),
        Mistake(
            "i g b d a e f c",
            "All is in order until the last line. How would one seed, chosen for its result, do where nothing differs?",
        ),
        Mistake(
            "i g b d h a e f",
            "Two things differ now, the technique and the data. What can be said about the technique then?",
        ),
        Mistake(
            "g b d i a e f",
            "The samples are held out once the first model is there. Is it the same samples, and as many steps, for "
            "each seed?",
        ),
        Mistake(
            "i g b d e a f",
            _TOO_SOON["e"],
        ),
        Mistake(
            "g b d a e f i",
            "The number of steps and of seeds is fixed when the results are known. Who could not win like that?",
        ),
    ),
    diagnose=_what_is_out_of_order,
)


# ---------------------------------------------------------------------------------------- 9.2 mean and standard error

_Scores = Sequence[float]
_PAIRS: tuple[tuple[_Scores, _Scores], ...] = (
    ((90.0, 94.0, 92.0, 97.0), (92.0, 95.0, 95.0, 99.0)),
    ((2.75, 2.5, 2.875), (2.5, 2.375, 2.25)),
    ((80.0, 85.0), (83.0, 84.0)),
)


def _paired_results(paired: Answer) -> Result:
    return [list(paired([*one], [*other])) for one, other in _PAIRS]


def _paired_by_torch() -> Result:
    results = []
    for one, other in _PAIRS:
        differences = torch.tensor(other, dtype=torch.float64) - torch.tensor(one, dtype=torch.float64)
        spread = differences.std(correction=1).item()
        results.append([differences.mean().item(), spread / len(one) ** 0.5])
    return results


def _paired(error: Callable[[list[float]], float], mean: Callable[[list[float]], float] = statistics.mean) -> Answer:
    """The exercise's function with these two lines in it."""

    def paired(one: list[float], other: list[float]) -> tuple[float, float]:
        differences = [b - a for a, b in zip(one, other, strict=True)]
        return mean(differences), error(differences)

    return paired


def _standard_error(differences: list[float]) -> float:
    return statistics.stdev(differences) / math.sqrt(len(differences))


def _of_scores(one: list[float], other: list[float]) -> float:
    return math.hypot(_standard_error(one), _standard_error(other))


_HINT_OF_SCORES = (
    "The error is made of each one's own spread. What do two runs of one seed have in common, and where does that go "
    "when you subtract?"
)


def _what_is_off(result: Result, truth: Result) -> str | None:
    means, errors = ([[*map(float, its)][place] for its in result] for place in (0, 1))
    true_means, true_errors = ([its[place] for its in truth] for place in (0, 1))
    sizes = [len(one) for one, _ in _PAIRS]
    if _close(means, [-mean for mean in true_means]):
        return "The mean has the other sign: is it what the second gives more than the first?"
    if not _close(means, true_means):
        if _close(means, [abs(mean) for mean in true_means]):
            return "The mean is without its sign: which of the two is ahead then?"
        totals = [mean * n for mean, n in zip(true_means, sizes, strict=True)]
        if _close(means, totals):
            return "Your mean grows with the number of seeds: is it the sum?"
        return "The mean is off: it is that of the differences, one for each seed."
    if _close(errors, [_of_scores([*one], [*other]) for one, other in _PAIRS]):
        return _HINT_OF_SCORES
    if _close(errors, [_standard_error([*other]) for _, other in _PAIRS]):
        return "The error is that of the second alone. Of which numbers is the mean taken?"
    ratios = [error / right for error, right in zip(errors, true_errors, strict=True)]
    if _close(ratios, [1 / n**0.5 for n in sizes]):
        return "The mean is right. The error is too small: by what is the spread divided, n or its root?"
    if _close(ratios, [n - 1 for n in sizes]) or _close(ratios, [n**0.5 for n in sizes]):
        return "The mean is right. The error is too large by what depends on the number of seeds: is it divided at all?"
    return "The mean is right, the error is not: it is the spread of the differences over the root of their number."


def _close(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(one, other, strict=True))


_ERROR = Exercise(
    number="9.2",
    kind="fill",
    task="Give the mean of the differences over seeds, and its standard error.",
    difficulty=1,
    minutes=4,
    objective=_READ,
    run=_paired_results,
    truth=_paired_by_torch,
    mistakes=(
        Mistake(
            _paired(statistics.stdev),
            "That is the spread of single differences. Is the mean of four as uncertain as one of them?",
        ),
        Mistake(
            _paired(lambda d: statistics.pstdev(d) / len(d) ** 0.5),
            "The spread is too small: `pstdev` is for all seeds there are. You have a few of them.",
        ),
        Mistake(
            _paired(lambda d: statistics.stdev(d) / len(d)),
            "The spread is divided by the number of seeds: with four times as many, does the error fall to a quarter?",
        ),
        Mistake(
            _paired(lambda d: statistics.variance(d) / len(d)),
            "In which unit is a variance, and in which is the mean?",
        ),
        Mistake(
            _paired(lambda d: statistics.stdev(d) / (len(d) - 1) ** 0.5),
            "`stdev` has divided by n - 1 already. Over the root of what number is the mean taken?",
        ),
        Mistake(
            _paired(_standard_error, statistics.median),
            "The error is right. Your first number is the difference in the middle: what was asked for?",
        ),
        Mistake(
            lambda one, other: (statistics.mean(other) - statistics.mean(one), _of_scores(one, other)),
            _HINT_OF_SCORES,
        ),
        Mistake(
            _paired(lambda d: 0.0),
            "An error of 0 would say that another set of seeds gives the same mean. Which function tells the spread?",
        ),
    ),
    diagnose=_what_is_off,
)


# ------------------------------------------------------------------------------------------------------- 9.3 a verdict

_COMPARED: tuple[tuple[str, _Scores, _Scores], ...] = (
    ("seeds that differ much more than the two do", (90.0, 80.0, 95.0, 70.0), (91.0, 81.5, 96.0, 71.5)),
    ("the second below the first at each seed", (97.0, 98.0, 97.5, 98.5, 97.0), (95.0, 95.5, 96.0, 96.0, 95.0)),
    ("a mean that one seed alone makes", (90.0, 91.0, 92.0, 93.0), (90.0, 91.5, 92.0, 97.0)),
    ("equal scores", (97.0, 98.0, 96.0), (97.0, 98.0, 96.0)),
    ("two to three standard errors", (90.0, 90.0, 90.0, 90.0), (90.5, 93.5, 91.0, 93.0)),
    ("a difference that is the same at each seed", (88.0, 90.0, 92.0), (89.0, 91.0, 93.0)),
    ("the largest score on the other side", (90.0, 99.0, 91.0, 92.0, 90.0), (93.0, 98.9, 94.0, 95.0, 93.0)),
    ("differences to both sides", (97.0, 95.0, 96.0, 96.0), (96.5, 95.5, 97.0, 95.5)),
    ("three seeds, not quite two errors", (90.0, 91.0, 92.0), (90.1, 92.0, 93.9)),
    ("two seeds", (80.0, 85.0), (83.06, 86.06)),
    ("scores that spread, and differences that do not", (90.0, 92.0) * 8, (92.0, 93.9, 92.1, 94.0) * 4),
    ("many seeds", (90.0, 92.0) * 8, (91.0, 92.5, 90.5, 92.5) * 4),
)


def _verdicts(verdict: Answer) -> Result:
    return [_word(verdict([*one], [*other])) for _, one, other in _COMPARED]


def _word(said: Any) -> Any:
    return said.strip().lower() if isinstance(said, str) else said


def _judged(errors: float = 3) -> Result:
    return [_judge(one, other, errors) for _, one, other in _COMPARED]


_NONE = "no difference seen"


def _judge(one: _Scores, other: _Scores, errors: float) -> str:
    """By torch, and squared: no root is taken."""
    differences = torch.tensor(other, dtype=torch.float64) - torch.tensor(one, dtype=torch.float64)
    mean, variance = differences.mean().item(), differences.var(correction=1).item() / len(one)
    if mean * mean <= errors**2 * variance:
        return _NONE
    return "better" if mean > 0 else "worse"


_Unit = Callable[[list[float], list[float]], float]


def _of_pairs(one: list[float], other: list[float]) -> float:
    return _standard_error(_pairs(one, other))


def _pairs(one: list[float], other: list[float]) -> list[float]:
    return [b - a for a, b in zip(one, other, strict=True)]


def _verdict(unit: _Unit = _of_pairs, least: float = 3, says: str = "all", sign: int = 1) -> Answer:
    """A verdict by how many such units the second is above the first; `says` is what it can say."""

    def verdict(one: list[float], other: list[float]) -> str:
        mean, its = sign * (statistics.mean(other) - statistics.mean(one)), unit(one, other)
        if says == "none where the error is 0" and its == 0:
            return _NONE
        if mean > least * its:
            return "better"
        if says == "never none" or (mean < -least * its and says != "never worse"):
            return "worse"
        return _NONE

    return verdict


# The usual slips, by what they are about: the right way first, which needs no hint. They come together as well.
_UNITS: tuple[tuple[_Unit, str], ...] = (
    (_of_pairs, ""),
    (
        _of_scores,
        "You set the spread of the scores beside the difference. A seed that is good for one is good for the other: "
        "what spreads less?",
    ),
    (
        lambda one, other: statistics.stdev(_pairs(one, other)),
        "That is the spread of single differences: the mean of n of them is surer than one. By how much?",
    ),
    (
        lambda one, other: max(statistics.stdev(one), statistics.stdev(other)),
        "The spread of the scores decides. Of which numbers is the mean taken, whose error you need?",
    ),
    (
        lambda one, other: statistics.stdev(_pairs(one, other)) / len(one),
        "Your error is too small: is the spread divided by the number of seeds, or by its root?",
    ),
)
_BORDERS: tuple[tuple[float, str], ...] = (
    (3, ""),
    (2, "Right but for where the border is: how many standard errors does the task ask for?"),
    (1, "One standard error is passed by chance very often: how many does the task ask for?"),
    (0, "The means alone decide. What would they do if one technique were trained twice, with other seeds?"),
)
_SIDES: tuple[tuple[str, int, str], ...] = (
    ("all", 1, ""),
    ("never worse", 1, "It never says that the second is worse: on which side of 0 is a mean then?"),
    ("all", -1, "Better and worse are in each other's place: which of the two is judged, the first or the second?"),
    (
        "none where the error is 0",
        1,
        "Where all differences are the same their error is 0. Are they all 0 then? How far from 0 may the mean be?",
    ),
    (
        "never none",
        1,
        "What is not better is worse: what is to be said of a mean that lies within three errors of 0?",
    ),
)
_BY_COUNT = "It goes by the seeds at which the second is above the first, and forgets by how much."


def _by_count(one: list[float], other: list[float]) -> str:
    above = sum(difference > 0 for difference in _pairs(one, other)) / len(one)
    return "better" if above == 1 else "worse" if above == 0 else _NONE


def _which_case(result: Result, truth: Result) -> str | None:
    words = {"better", "worse", _NONE}
    if unknown := [said for said in result if not isinstance(said, str) or said not in words]:
        return f"It gives {unknown[0]!r}: the three answers are in the task, word for word."
    if len({*result}) == 1:
        return f"It says {result[0]!r} in each case: what of its two lists does it go by?"
    for (unit, why), (least, where), (says, sign, which) in product(_UNITS, _BORDERS, _SIDES):
        if (why or where or which) and result == _verdicts(_verdict(unit, least, says, sign)):
            return why if why and least else where or which
    wrong = [place for place, (one, other) in enumerate(zip(result, truth, strict=True)) if one != other]
    case = _COMPARED[wrong[0]][0]
    if truth[wrong[0]] == _NONE:
        return f"It sees a difference where there is none to be seen: {case}. How far is the mean from 0, in errors?"
    return f"It says {result[wrong[0]]!r} in this case: {case}. What are mean and error there?"


_VERDICT = Exercise(
    number="9.3",
    kind="write",
    task="Say whether the second is better, worse, or no difference is seen.",
    difficulty=2,
    minutes=7,
    objective=_READ,
    run=_verdicts,
    truth=_judged,
    mistakes=(
        *(Mistake(_verdict(unit), hint) for unit, hint in _UNITS[1:]),
        *(Mistake(_verdict(least=least), hint) for least, hint in _BORDERS[1:]),
        *(Mistake(_verdict(says=says, sign=sign), hint) for says, sign, hint in _SIDES[1:]),
        Mistake(
            lambda one, other: "better" if max(other) > max(one) else "worse" if max(other) < max(one) else _NONE,
            "The best seed of each decides. What is chosen for its result says little about the next run.",
        ),
        Mistake(_by_count, _BY_COUNT),
    ),
    diagnose=_which_case,
)


# -------------------------------------------------------------------------------------------------------- 9.4 the steps

_PLANS: tuple[tuple[int, int, int, int, float], ...] = (  # steps, batch, micro, accumulation, ratio
    (400, 60, 15, 1, 0.25),
    (400, 60, 15, 4, 1.25),
    (1000, 64, 16, 2, 0.75),
    (500, 16, 12, 4, 3.5),
    (99, 7, 4, 5, 2.5),
)


def _steps_of(equal_steps: Answer) -> Result:
    return [list(equal_steps(*plan)) for plan in _PLANS]


def _counted() -> Result:
    """Step by step, until one more would be too many."""
    results = []
    for steps, batch, micro, accumulation, ratio in _PLANS:
        samples = takewhile(lambda n, e=micro * accumulation, most=steps * batch: n * e <= most, count(1))  # type: ignore[misc]
        time = takewhile(lambda n, r=ratio, most=steps: n * r <= most, count(1))  # type: ignore[misc]
        results.append([sum(1 for _ in samples), sum(1 for _ in time)])
    return results


_Steps = Callable[[int, int, int, int, float], float]


def _fair_samples(s: int, b: int, m: int, k: int, r: float) -> float:
    return s * b // (m * k)


def _fair_time(s: int, b: int, m: int, k: int, r: float) -> float:
    return s / r


# The usual slips in each half of the answer; they come together as well.
_SAMPLES: tuple[tuple[_Steps, str], ...] = (
    (lambda s, b, m, k, r: s * b // m, "You count micro-batches. After how many of them does the optimizer step once?"),
    (
        lambda s, b, m, k, r: s * b * k // m,
        "The more micro-batches to a step, the more samples it has seen: are there more steps then, or fewer?",
    ),
    (
        lambda s, b, m, k, r: s,
        "As many steps as the first plan: do they see as many samples, where the batch is another?",
    ),
    (
        lambda s, b, m, k, r: s * m * k // b,
        "With a smaller batch yours has fewer steps: does a smaller batch see a given number of samples sooner?",
    ),
    (
        lambda s, b, m, k, r: s // k,
        "At equal samples you divide by the micro-batches alone: how many samples has each, and a step of the first?",
    ),
    (lambda s, b, m, k, r: s * b, "Your first number is that of the samples: how many of them does a step take?"),
)
_TIMES: tuple[tuple[_Steps, str], ...] = (
    (
        lambda s, b, m, k, r: s * r,
        "A step that takes longer gives you more steps in the same time: the wrong way round.",
    ),
    (lambda s, b, m, k, r: s, "At equal time you give as many steps as the first plan makes: does each take as long?"),
    (
        lambda s, b, m, k, r: s / (r * k),
        "Your time counts the micro-batches again: `ratio` is that of a whole optimizer step, with all of them in it.",
    ),
    (
        lambda s, b, m, k, r: s * k / r,
        "That many micro-batches fit into the time: of which is `ratio`, of one of them or of an optimizer step?",
    ),
    (
        lambda s, b, m, k, r: int(_fair_samples(s, b, m, k, r) / r),
        "Your time is that of the steps at equal samples. What is to be equal is the first plan's time.",
    ),
    (
        lambda s, b, m, k, r: int(_fair_samples(s, b, m, k, r) * r),
        "Your second number is how long the steps at equal samples take. How many take as long as the first plan?",
    ),
)


def _equal_steps(samples: _Steps = _fair_samples, time: _Steps = _fair_time) -> Answer:
    return lambda *plan: (int(samples(*plan)), int(time(*plan)))


def _which_half(result: Result, truth: Result) -> str | None:
    if not all(len(its) == 2 for its in result):
        return "Two numbers are asked for: the steps at equal samples, and those at equal time."
    mine, right = [*zip(*result, strict=True)], [*zip(*truth, strict=True)]
    for half, its, slips in zip(mine, right, (_SAMPLES, _TIMES), strict=True):
        for slip, hint in slips if half != its else ():
            if all(abs(steps - slip(*plan)) < 1 for steps, plan in zip(half, _PLANS, strict=True)):
                return hint
    if all(abs(a - b) <= 1 for half, its in zip(mine, right, strict=True) for a, b in zip(half, its, strict=True)):
        return "Nearly: a step is whole, and one more than fits is more samples, or more time, than the first plan has."
    if mine[0] == right[0]:
        return (
            "The steps at equal samples are right. Where one step takes twice as long, are there more of them or fewer?"
        )
    if mine[1] == right[1]:
        return "The steps at equal time are right. How many samples does the second plan see before it steps once?"
    return (
        "Take the first plan's samples, and its time in units of its own step. How much of each is one step of yours?"
    )


_PLANNER = Exercise(
    number="9.4",
    kind="write",
    task="Say how many steps of the second plan are fair at equal samples, and how many at equal time.",
    difficulty=2,
    minutes=6,
    objective=_STEPS,
    run=_steps_of,
    truth=_counted,
    mistakes=(
        *(Mistake(_equal_steps(samples=slip), hint) for slip, hint in _SAMPLES),
        *(Mistake(_equal_steps(time=slip), hint) for slip, hint in _TIMES),
        Mistake(
            lambda *plan: (int(_fair_time(*plan)), int(_fair_samples(*plan))),
            "Both numbers are right, and each is in the other's place.",
        ),
        Mistake(
            lambda s, b, m, k, r: (math.ceil(s * b / (m * k)), math.ceil(s / r)),
            "The last step goes beyond what the first plan has: round to whole steps that fit.",
        ),
        Mistake(
            lambda s, b, m, k, r: (s * b / (m * k), s / r),
            "There are no parts of a step: give whole steps, as many as fit.",
        ),
    ),
    diagnose=_which_half,
)


# -------------------------------------------------------------------------------------------------- 9.5 what still fits

_Peak = Callable[[int], int]
_MOST_CALLS = 12  # of `peak`, for a thousand sizes: ten halvings, and the ends
_ENDLESS = 3000  # calls: more than trying each size twice takes


class _NeverEnds(Exception):
    """So many calls that the search goes round in a circle."""


def _line(n: int) -> int:
    return 1000 + 437 * n


def _stairs(n: int) -> int:
    return 5000 * (n // 7) + 100


_SIZES: tuple[tuple[str, _Peak, int, int], ...] = (  # peak, limit, most
    ("somewhere in the middle", _line, 100_000, 1000),
    ("a peak that is the limit to the byte", _line, 1000 + 437 * 600, 1000),
    ("a peak that stays the same for seven sizes", _stairs, 300_000, 1000),
    ("all of them fit", _line, 10**9, 1000),
    ("none fits", _line, 1200, 1000),
    ("only the smallest fits", _line, 1437, 1000),
    ("all but the largest fit", _line, 1000 + 437 * 999, 1000),
)


def _found(largest: Answer) -> Result:
    """For each case the size, and whether `peak` was called seldom enough and for sizes that there are."""
    results = []
    for _, peak, limit, most in _SIZES:
        asked: list[int] = []

        def counted(n: int, peak: _Peak = peak, asked: list[int] = asked) -> int:
            asked.append(n)
            if len(asked) > _ENDLESS:
                raise _NeverEnds
            return peak(n)

        try:
            size = largest(counted, limit, most)
        except _NeverEnds:
            size = "never ends"
        results.append([size, len(asked) <= _MOST_CALLS, all(1 <= n <= most for n in asked)])
    return results


def _tried_one_by_one() -> Result:
    return [
        [max((n for n in range(1, most + 1) if peak(n) <= limit), default=0), True, True]
        for _, peak, limit, most in _SIZES
    ]


def _where_it_fails(result: Result, truth: Result) -> str | None:
    sizes, right = [its[0] for its in result], [its[0] for its in truth]
    if "never ends" in sizes:
        return (
            "In one of the cases it measures for ever: with two ends side by side, which is the middle, and does the "
            "one that takes its place move?"
        )
    if any(size is None for size in sizes):
        return "In one of the cases it gives nothing: does every way through it end in a `return`?"
    wrong = [place for place, (one, other) in enumerate(zip(sizes, right, strict=True)) if one != other]
    if not wrong:
        if not all(its[2] for its in result):
            return "The sizes are right, but it asks for the peak of one outside 1 to `most`: there is no such model."
        return (
            "The sizes are right, with too many calls of `peak`, each of which is a measured step: what does one call "
            "rule out?"
        )
    case = _SIZES[wrong[0]][0]
    if all(sizes[place] == right[place] + 1 for place in wrong):
        return f"It is one too large: {case}. Is what you give back a size that fits, or the first that does not?"
    if all(sizes[place] == right[place] - 1 for place in wrong):
        return f"It is one too small: {case}. Which size was never tried, or taken for one that does not fit?"
    return f"It is off where this is the case: {case}. What do your two ends stand for when the search is over?"


def _by_halves(fits: Callable[[int, int], bool], low: int = 0, over: int = 1, back: int = 0) -> Answer:
    """Bisection: `low` is where it begins, `over` how far beyond the largest size it ends, `back` what is added."""

    def largest(peak: _Peak, limit: int, most: int) -> int:
        lower, upper = low, most + over
        while upper - lower > 1:
            middle = (lower + upper) // 2
            lower, upper = (middle, upper) if fits(peak(middle), limit) else (lower, middle)
        return lower + back

    return largest


def _one_by_one(peak: _Peak, limit: int, most: int) -> int:
    size = 0
    while size < most and peak(size + 1) <= limit:
        size += 1
    return size


def _endless(peak: _Peak, limit: int, most: int) -> int:
    lower, upper = 1, most
    while lower < upper:
        middle = (lower + upper) // 2
        lower, upper = (middle, upper) if peak(middle) <= limit else (lower, middle - 1)
    return lower


def _doubling(peak: _Peak, limit: int, most: int) -> int:
    size = 1
    while 2 * size <= most and peak(2 * size) <= limit:
        size *= 2
    return size


def _in_proportion(peak: _Peak, limit: int, most: int) -> int:
    return min(most, limit // peak(1))


_LARGEST = Exercise(
    number="9.5",
    kind="write",
    task="Find the largest size that fits under a limit, with few measurements.",
    difficulty=2,
    minutes=8,
    objective=_FITS,
    run=_found,
    truth=_tried_one_by_one,
    mistakes=(
        Mistake(
            _one_by_one,
            "The sizes are right. For the largest of a thousand it measures a thousand steps: which half can one call "
            "rule out?",
        ),
        Mistake(
            _by_halves(lambda peak, limit: peak < limit),
            "A peak that is the limit to the byte fits: yours leaves it out.",
        ),
        Mistake(
            _by_halves(lambda peak, limit: peak <= limit, back=1),
            "One too large: that is the first size that does not fit.",
        ),
        Mistake(
            _by_halves(lambda peak, limit: peak <= limit, low=1),
            "Where not even the smallest fits, yours says 1 without having measured it.",
        ),
        Mistake(
            _by_halves(lambda peak, limit: peak <= limit, over=0),
            "Where all of them fit, yours is one short: was the largest ever measured?",
        ),
        Mistake(
            _by_halves(lambda peak, limit: peak > limit),
            "The wrong half is kept: where a size fits, are the smaller ones of interest, or the larger?",
        ),
        Mistake(
            _endless,
            "Your search never ends: with two ends side by side the middle is the lower one, and putting it in its own "
            "place changes nothing. What of a size that is tried already?",
        ),
        Mistake(
            _doubling,
            "It doubles the size and stops: between the last that fits and the first that does not there is more.",
        ),
        Mistake(
            _in_proportion,
            "A peak is not in proportion to the size: it has a part that is there at any size.",
        ),
    ),
    diagnose=_where_it_fails,
)


EXERCISES: tuple[Exercise, ...] = (_ORDER, _ERROR, _VERDICT, _PLANNER, _LARGEST)

QUIZ: tuple[Question, ...] = (
    Question(
        "Two runs with the same seed, one plain, one checkpointed, end with accuracies that differ by 2 points. What "
        "do you think of first?",
        (
            Option("checkpointing regularises a little", "it computes the same gradients: there is nothing in it to."),
            Option("chance", "at one seed, and with the same operators, there is no chance left."),
            Option(
                "something else differs: BatchNorm, the data's order, random numbers",
                "equal gradients from equal weights on equal batches give equal weights, to the last bit.",
                right=True,
            ),
        ),
    ),
    Question(
        "A batch of 60 does not fit, so you train with a batch of 15, at the same learning rate and for as many steps. "
        "What have you got?",
        (
            Option(
                "another training, which has seen a quarter of the samples",
                "four micro-batches of 15 would have been the same one.",
                right=True,
            ),
            Option("the same training, with less memory", "each step goes by another gradient, of fewer samples."),
            Option(
                "the same training, four times as fast, as each of its steps has a quarter of the arithmetic",
                "the steps are cheaper, but they are other steps.",
            ),
        ),
    ),
    Question(
        "A larger model, which fits with checkpointing alone, wins at equal steps, and not at equal time. What do you "
        "write?",
        (
            Option("that checkpointing improves accuracy", "the same model, trained without it, would win as well."),
            Option(
                "both results, each with its spread over seeds",
                "which of them counts is for the reader: is memory scarce, or time?",
                right=True,
            ),
            Option(
                "the result at equal time alone, since a comparison at equal steps is not fair to the smaller model",
                "it is fair where samples or steps are what is limited.",
            ),
        ),
    ),
)
