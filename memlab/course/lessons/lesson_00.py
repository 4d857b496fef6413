"""Lesson 00, start here: read a step, a comparison, and what may lower a peak.

The steps that answers are tried on are small and really run; the tables of exercise 0.2 are made up, so that each slip
picks a row of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ... import zoo
from ...compare import Comparison, Row
from ...record import record
from ...step import TrainingStep
from ...strategies import Baseline, Checkpoint, OptimizerInBackward, Strategy
from ...trace import Allocation, Operator, Place, SavedTensor, Trace
from ...units import KiB, MiB
from ..exercises import Exercise, Mistake
from ..quizzes import Option, Question

COMPARISON = "read a comparison of memory-saving techniques: peak, price and proof"
PHASE = "say in which phase of a training step the peak is, and what is alive there"
SAVED = "tell saved bytes from the peak"
CHOICE = "choose a technique that acts on what is alive at a given peak"

Sizes = dict[str, int]  # bytes by name

_foreach = partial(torch.optim.AdamW, foreach=True)
_gpt = partial(zoo.gpt_step, width=64, context=64)


# -- steps that are run ------------------------------------------------------------------------------------------------


def _classes(model: nn.Module, batch: int) -> TrainingStep:
    """Trained with SGD to tell ten classes apart, from 64 numbers a sample."""
    inputs, labels = torch.ones(batch, 64), torch.zeros(batch, dtype=torch.int64)
    return TrainingStep(model, (inputs, labels), zoo.classification_loss, torch.optim.SGD)


def _frozen_features() -> TrainingStep:
    """A frozen network whose wide layer is needed for an instant, and a small one that is trained."""
    frozen = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 64)).requires_grad_(False)
    return _classes(nn.Sequential(frozen, nn.Linear(64, 10)), batch=256)


def _mlp(batch: int, depth: int) -> TrainingStep:
    return _classes(zoo.MLP(depth=depth), batch)


def _chain(batch: int, biases_alone: bool = False) -> TrainingStep:
    """Blocks that widen and narrow, trained whole or their biases alone."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)))
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() == 1 or not biases_alone)
    return TrainingStep(model, (torch.ones(batch, 64), torch.zeros(batch, 64)), nn.MSELoss(), torch.optim.SGD)


def _made(make: Callable[[], TrainingStep]) -> TrainingStep:
    """The same parameters each time."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return make()


def _trace(make: Callable[[], TrainingStep], strategy: Strategy | None = None) -> Trace:
    """The second step, when the optimizer has its state."""
    step = _made(make)
    with (strategy or Baseline()).applied(step) as runner:
        runner.run()
        with record(step.model, step.optimizer, step.batch) as trace:
            runner.run()
    return trace


# -- 0.1 · where the peak is ------------------------------------------------------------------------------------------


@cache
def _steps() -> tuple[Trace, ...]:
    """The peak in backward, in the optimizer step, at the end of backward, in forward."""
    return (
        _trace(partial(_gpt, batch=8, depth=2, optimizer=_foreach)),
        _trace(partial(_gpt, batch=1, depth=2, optimizer=_foreach)),
        _trace(partial(_mlp, batch=64, depth=4)),
        _trace(_frozen_features),
    )


def _read(trace: Trace) -> tuple[Sizes, Sizes]:
    return trace.by_phase("tensor_peak"), trace.by_category("tensor_peak")


def _where(answer: Callable[[Sizes, Sizes], Any]) -> list[Any]:
    return [answer(*_read(trace)) for trace in _steps()]


def _truly_where() -> list[tuple[str, str]]:
    """From the operator that ran and the blocks that were alive, one by one."""
    found = []
    for trace in _steps():
        sums: Sizes = {}
        for allocation in trace.tensor_peak.allocations:
            sums[allocation.category] = sums.get(allocation.category, 0) + allocation.nbytes
        found.append((trace.tensor_peak.phase, sorted((nbytes, name) for name, nbytes in sums.items())[-1][1]))
    return found


class _Pick(NamedTuple):
    """A slip in picking a name from sizes, and what to say to it."""

    pick: Callable[[Sizes], Any]
    hint: str


_PICKS = (
    _Pick(max, "always the last name: `max` of a dictionary compares the names. Where do the sizes come in?"),
    _Pick(lambda sizes: max(sizes.values()), "a number of bytes. Of which name?"),
    _Pick(
        lambda sizes: max(sizes.items(), key=lambda item: item[1]), "a name with its bytes: the name alone is asked."
    ),
    _Pick(lambda sizes: min(sizes, key=lambda name: sizes[name]), "the name with the fewest bytes, not the most."),
    _Pick(lambda sizes: next(iter(sizes)), "always the first name, whatever its size."),
)


def _largest(sizes: Sizes) -> str:
    return max(sizes, key=lambda name: sizes[name])


def _picked_twice(pick: Callable[[Sizes], Any]) -> Callable[[Sizes, Sizes], tuple[Any, Any]]:
    return lambda highest, alive: (pick(highest), pick(alive))


def _where_hint(result: Any, truth: Any) -> str | None:
    """Line by line: one may be right."""
    if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in result):
        return "Leave the last line as it was: it returns the phase and the category."
    phases, categories = zip(*map(_read, _steps()), strict=True)
    for place, line, sizes, others in ((0, "phase", phases, categories), (1, "largest", categories, phases)):
        given, right = [pair[place] for pair in result], [pair[place] for pair in truth]
        if given == right:
            continue
        for pick, hint in _PICKS:
            if given == [pick(of) for of in sizes]:
                return f"`{line}` is {hint}"
        if not all(isinstance(name, str) for name in given):
            return f"`{line}` is of the type {type(given[0]).__name__}, where a name is asked."
        if all(name in of for name, of in zip(given, others, strict=True)):
            return f"`{line}` is a name from the other dictionary."
        if len(set(given)) == 1:
            return f"`{line}` is {given[0]!r} for every step. The steps of the check have their peaks elsewhere too."
        return f"`{line}` is right for {sum(map(str.__eq__, given, right))} of {len(right)} steps."
    return None


# -- 0.2 · a comparison -----------------------------------------------------------------------------------------------


class _Line(NamedTuple):
    """A row of a made-up table; sizes in MiB."""

    label: str
    peak: int
    saved: int
    flops: float
    time: float
    equivalent: bool | None


_TABLES = (
    (
        _Line("baseline", 100, 80, 1.0, 1.0, True),
        _Line("checkpoint", 42, 8, 1.25, 1.2, True),
        _Line("4 micro-batches", 55, 20, 1.0, 1.4, True),
        _Line("pure bf16", 51, 40, 1.0, 0.9, None),
        _Line("optimizer in backward", 90, 80, 1.0, 1.05, True),
        _Line("checkpoint + 4 micro-batches", 30, 2, 1.25, 1.6, True),
    ),
    (  # a network with BatchNorm
        _Line("baseline", 60, 30, 1.0, 1.0, True),
        _Line("checkpoint", 52, 6, 1.3, 1.3, False),
        _Line("4 micro-batches", 29, 8, 1.0, 1.1, False),
        _Line("bf16 autocast", 48, 18, 1.0, 0.95, True),
        _Line("optimizer in backward", 44, 30, 1.0, 1.2, True),
        _Line("pure bf16", 31, 15, 1.0, 0.9, None),
    ),
    (  # a network whose parameters outweigh the rest
        _Line("baseline", 20, 3, 1.0, 1.0, True),
        _Line("checkpoint", 21, 1, 1.3, 1.3, True),
        _Line("4 micro-batches", 24, 1, 1.0, 1.05, True),
        _Line("2 micro-batches", 23, 2, 1.0, 1.02, True),
    ),
)
_MOST_ARITHMETIC = 1.1


@cache
def _comparisons() -> tuple[Comparison, ...]:
    return tuple(Comparison(tuple(map(_row, table))) for table in _TABLES)


def _row(line: _Line) -> Row:
    there = Allocation(line.peak * MiB, "activations", Place("backward"), 0, None, -1)
    saved = SavedTensor("", "", "", (), "", line.saved * MiB, 1, line.saved * MiB, "activations")
    trace = Trace((there,), (Operator(Place("backward"), 1, 0.0),), (saved,), line.label)
    return Row(Baseline(), line.label, trace, line.time, line.flops, line.equivalent)


def _lowest(answer: Callable[[Comparison], Any]) -> list[Any]:
    return [answer(comparison) for comparison in _comparisons()]


def _truly_lowest() -> list[str]:
    """From the tables' own figures."""
    return [
        next(
            line.label
            for line in sorted(table, key=lambda line: line.peak)
            if line.equivalent and line.flops <= _MOST_ARITHMETIC
        )
        for table in _TABLES
    ]


def _least(
    among: Callable[[Row], bool], by: Callable[[Row], Any] = lambda row: row.tensor_peak_bytes
) -> Callable[[Comparison], str]:
    return lambda comparison: min(filter(among, comparison.rows), key=by).label


def _proven(row: Row) -> bool:
    return row.equivalent is True


def _passes(row: Row) -> bool:
    return _proven(row) and _cheap(row)


def _cheap(row: Row) -> bool:
    return row.flops_ratio is not None and row.flops_ratio <= _MOST_ARITHMETIC


def _quick(row: Row) -> bool:
    return row.time_ratio is not None and row.time_ratio <= _MOST_ARITHMETIC


def _lowest_hint(result: Any, truth: Any) -> str | None:
    """Of the first row that was picked and is not the one: why not."""
    for table, given, right in zip(_TABLES, result, truth, strict=True):
        if given == right:
            continue
        line = next((line for line in table if line.label == given), None)
        if isinstance(given, Row):
            return "You return the row: its label is asked."
        if isinstance(given, list | tuple | set):
            return "You return several things: one label is asked."
        if isinstance(given, int | float):
            return "You return a number: the label of that row is asked."
        if line is None:
            return f"{given!r} is not the label of a row."
        if line.equivalent is not True:
            return f"In one table you pick {given!r}: what does its `equivalent` say?"
        if line.flops > _MOST_ARITHMETIC:
            return f"In one table you pick {given!r}: how much arithmetic does it do?"
        return f"In one table you pick {given!r}, and a row with a lower peak passes both conditions too."
    return None


# -- 0.3 · the lines of a step ----------------------------------------------------------------------------------------

LINES = {
    "a": "optimizer.step()",
    "b": "loss.backward()",
    "c": "loss = loss_fn(model, batch)",
    "d": "optimizer.zero_grad()",
}
_ROUNDS = 3
_TRAINED_ON: tuple[Callable[[], TrainingStep], ...] = (
    partial(_mlp, batch=256, depth=8),
    partial(_gpt, batch=8, depth=1, width=128),
)


class _Loop(NamedTuple):
    """What a loop left: parameters, peak and saved bytes, or the name of the error that it ran into."""

    parameters: list[Tensor]
    peak: int = 0
    saved: int = 0
    error: str = ""


def _ordered(answer: Any) -> list[_Loop]:
    letters = [letter for letter in str(answer).lower() if letter.isalpha()]
    if sorted(letters) != sorted(LINES):
        return []
    return list(_run_as("".join(letters)))


@cache
def _run_as(letters: str) -> tuple[_Loop, ...]:
    return tuple(_run_lines(letters, _made(make)) for make in _TRAINED_ON)


def _run_lines(letters: str, step: TrainingStep) -> _Loop:
    body = "".join(f"    {LINES[letter]}\n" for letter in letters)
    names: dict[str, Any] = {
        "model": step.model, "batch": step.batch, "loss_fn": step.loss_fn, "optimizer": step.optimizer
    }  # fmt: skip
    exec(f"def training_step():\n{body}", names)  # a function, so that no loss outlives its step
    try:
        with record(step.model, step.optimizer, step.batch) as trace:
            for _ in range(_ROUNDS):
                names["training_step"]()
    except (UnboundLocalError, RuntimeError) as error:
        return _Loop([], error=type(error).__name__)
    return _Loop([p.detach().clone() for p in step.model.parameters()], trace.tensor_peak_bytes, trace.saved_bytes)


@cache
def _truly_ordered() -> list[_Loop]:
    return [_well_trained(make) for make in _TRAINED_ON]


def _well_trained(make: Callable[[], TrainingStep]) -> _Loop:
    """Bytes as they are in the library's own loop; parameters trained without `.backward()`."""
    step, trace = _made(make), _trace(make)
    parameters = list(step.model.parameters())
    for _ in range(_ROUNDS):
        gradients = torch.autograd.grad(step.loss(step.batch), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        assert step.optimizer is not None
        step.optimizer.step()
    return _Loop([p.detach().clone() for p in parameters], trace.tensor_peak_bytes, trace.saved_bytes)


def _ordered_hint(result: Any, truth: Any) -> str:
    if not result:
        return f"Write each of the letters {', '.join(LINES)} once."
    if any(loop.error == "RuntimeError" for loop in result):
        return (
            "PyTorch refuses: backward comes after the optimizer has changed the parameters that the forward pass "
            "computed with."
        )
    start = list(_made(_TRAINED_ON[0]).model.parameters())
    if all(map(torch.equal, result[0].parameters, start)):
        return "The parameters never change: whenever the optimizer steps, no gradient is there for it."
    return "It does not train as it should: follow one gradient from where it is born to where it is used."


# -- 0.4 · a technique for a peak --------------------------------------------------------------------------------------

_CHECKPOINT, _IN_BACKWARD = "checkpoint", "optimizer in backward"
_TO_CHOOSE_FOR: tuple[Callable[[], TrainingStep], ...] = (
    partial(_gpt, batch=8, depth=2, optimizer=_foreach),
    partial(_gpt, batch=1, depth=2, optimizer=_foreach),
    partial(_gpt, batch=3, depth=2, width=128, optimizer=partial(torch.optim.AdamW, foreach=False)),
    partial(_mlp, batch=64, depth=4),
    partial(_chain, batch=512),
    partial(_chain, batch=64, biases_alone=True),
)


@cache
def _plain() -> tuple[Trace, ...]:
    return tuple(map(_trace, _TO_CHOOSE_FOR))


def _chosen(answer: Callable[[Trace], Any]) -> list[Any]:
    return [answer(trace) for trace in _plain()]


@cache
def _truly_better() -> list[str]:
    """Each step run with either: the one with the lower peak."""
    both = {_CHECKPOINT: Checkpoint(), _IN_BACKWARD: OptimizerInBackward()}
    found = []
    for make in _TO_CHOOSE_FOR:
        peaks = {name: _trace(make, strategy).tensor_peak_bytes for name, strategy in both.items()}
        found.append(min(peaks, key=lambda name: peaks[name]))
    return found


def _alive(trace: Trace) -> Sizes:
    return {"activations": 0, "gradients": 0} | trace.by_category("tensor_peak")


def _gradients_and_state(trace: Trace) -> int:
    alive = _alive(trace)
    return alive["gradients"] + alive.get("optimizer state", 0)


def _checkpoint_if(condition: Callable[[Trace], bool]) -> Callable[[Trace], str]:
    return lambda trace: _CHECKPOINT if condition(trace) else _IN_BACKWARD


def _most_is_activations(trace: Trace) -> bool:
    return _largest(_alive(trace)) == "activations"


def _chosen_hint(result: Any, truth: Any) -> str | None:
    strange = [name for name in result if name not in (_CHECKPOINT, _IN_BACKWARD)]
    if strange:
        return f"Return one of the two names as text, {_CHECKPOINT!r} or {_IN_BACKWARD!r}: not {strange[0]!r}."
    for trace, given, right in zip(_plain(), result, truth, strict=True):
        if given != right:
            alive = _alive(trace)
            return (
                f"One peak is in {trace.tensor_peak.phase}, with {alive['activations'] / KiB:.0f} KiB of activations "
                f"and {alive['gradients'] / KiB:.0f} KiB of gradients alive. You choose {given!r}: on which of the two "
                "does it act?"
            )
    return None


# -- the exercises -----------------------------------------------------------------------------------------------------

EXERCISES = (
    Exercise(
        number="0.1",
        kind="fill",
        task="Fill two lines: the phase that holds the peak, and the category of which most is alive there.",
        difficulty=1,
        minutes=4,
        objective=PHASE,
        run=_where,
        truth=_truly_where,
        mistakes=(
            Mistake(
                lambda highest, alive: ("backward", "activations"),
                "That is our GPT's peak. The check tries other steps: what do `highest` and `alive` say?",
            ),
            Mistake(
                lambda highest, alive: (_largest(alive), _largest(highest)),
                "You have found both, and each stands in the other's line.",
            ),
            *(Mistake(_picked_twice(pick), f"Both lines give {hint}") for pick, hint in _PICKS),
        ),
        diagnose=_where_hint,
    ),
    Exercise(
        number="0.2",
        kind="write",
        task="Return the label of the row with the lowest tensor peak, of those that are proven to train the same "
        "model and do at most 1.1 times the plain step's arithmetic.",
        difficulty=1,
        minutes=6,
        objective=COMPARISON,
        run=_lowest,
        truth=_truly_lowest,
        mistakes=(
            Mistake(_least(lambda row: True), "The lowest of all rows: two conditions are left, on model and price."),
            Mistake(_least(_cheap), "You look at the price. Does each row that you pick train the same model?"),
            Mistake(
                _least(lambda row: row.equivalent is not False and _cheap(row)),
                "`equivalent` has three values: what does None say?",
            ),
            Mistake(_least(_proven), "The rows that you pick train the same model. What do they cost?"),
            Mistake(
                _least(lambda row: _proven(row) and _quick(row)),
                "Time is of one machine. Which figure counts the arithmetic?",
            ),
            Mistake(_least(_passes, lambda row: row.saved_bytes), "You compare saved bytes: the lowest peak is asked."),
            Mistake(
                lambda comparison: _least(_passes)(Comparison(comparison.rows[1:])),
                "The plain step is a row too: where every technique raises the peak, which is the lowest?",
            ),
        ),
        diagnose=_lowest_hint,
    ),
    Exercise(
        number="0.3",
        kind="order",
        task="Order the lines of a training step so that the model is trained and the peak is lowest.",
        difficulty=2,
        minutes=6,
        objective=SAVED,
        run=_ordered,
        truth=_truly_ordered,
        mistakes=(
            Mistake(
                "c d b a",
                "It trains, and it saves as many bytes as the best order. But its peak is higher: what of the step "
                "before is still alive during the forward pass?",
            ),
            Mistake(
                "c b d a",
                "The parameters never change: the gradients are gone before the optimizer has used them.",
            ),
            Mistake("b c a d", "Backward starts from `loss`, which no line has made yet."),
            Mistake(
                "a d c b",
                "The gradients of each step are used in the next one only: they lie in memory in between, and the last "
                "ones are never used.",
            ),
        ),
        diagnose=_ordered_hint,
    ),
    Exercise(
        number="0.4",
        kind="write",
        task='Return "checkpoint" or "optimizer in backward": the one that acts on more of what is alive at the peak.',
        difficulty=2,
        minutes=7,
        objective=CHOICE,
        run=_chosen,
        truth=_truly_better,
        mistakes=(
            Mistake(
                _checkpoint_if(lambda trace: trace.saved_bytes > _alive(trace)["gradients"]),
                "Saved bytes are counted when backward begins. How many of them are still alive at the peak?",
            ),
            Mistake(
                _checkpoint_if(lambda trace: trace.tensor_peak.phase != "optimizer"),
                "The phase alone does not tell: near the end of the backward pass most gradients are born, and most "
                "activations are gone.",
            ),
            Mistake(
                _checkpoint_if(_most_is_activations),
                "Activations need not be the largest category: neither of the two acts on parameters or optimizer "
                "state.",
            ),
            Mistake(
                _checkpoint_if(lambda trace: _alive(trace)["activations"] > _gradients_and_state(trace)),
                "You count the optimizer's state with the gradients: updated early or late, AdamW keeps it from step "
                "to step.",
            ),
            Mistake(
                _checkpoint_if(lambda trace: not _alive(trace)["gradients"]),
                "A few gradients may be alive beside many activations: compare the two.",
            ),
            Mistake(
                _checkpoint_if(lambda trace: _alive(trace)["activations"] <= _alive(trace)["gradients"]),
                "It is the other way round: which of the two acts on gradients?",
            ),
            Mistake(lambda trace: _CHECKPOINT, "Always checkpointing: can it lower a peak where nothing is saved?"),
            Mistake(
                lambda trace: _IN_BACKWARD,
                "Always the optimizer in backward: can it lower a peak where no gradient is alive?",
            ),
        ),
        diagnose=_chosen_hint,
    ),
)

QUIZ = (
    Question(
        "A technique takes 75 % off what is saved for backward. What does it do to the peak?",
        (
            Option("It takes 75 % off.", "Only where nearly all of the peak is what it acts on: section 4 has both."),
            Option(
                "It takes off at most what it acts on there; the rest stays.",
                "Parameters and optimizer state stay where they are, and another moment may become the highest.",
                right=True,
            ),
            Option(
                "Nothing: the peak is elsewhere.",
                "That happens where the peak is in another phase. Elsewhere some of the saving shows.",
            ),
        ),
    ),
    Question(
        "Alone, one technique takes 20 MiB off the peak, another 15 MiB. What do both together take off?",
        (
            Option("35 MiB.", "Both may act on the same bytes: checkpointing and micro-batches do. Look at the table."),
            Option(
                "At most 35 MiB.",
                "The optimizer in backward takes nothing off alone, and something after checkpointing: look at the "
                "table.",
            ),
            Option(
                "These two figures do not say.",
                "The first moves the peak to another moment, where other bytes are alive: measure the sum.",
                right=True,
            ),
        ),
    ),
    Question(
        'A row says "not proven" under *same model*. What does that mean?',
        (
            Option(
                "It trains another model: its gradients differ from the plain step's in float64.",
                'Then the row would say "no".',
            ),
            Option(
                "The proof, in float64, cannot show what the technique does.",
                "So it is with pure bf16, whose rounding float64 does not have: `gradient_error` has it.",
                right=True,
            ),
            Option("The run failed.", "A technique that cannot run has no bytes at all, and a sentence that says why."),
        ),
    ),
)
