"""Lesson 4, placing checkpoints: five exercises and the quiz.

Lengths are of segments in order, the first block's first; sizes are in bytes. The truth is a chain that is gone through
tensor by tensor, a search through all splits, or PyTorch's own `torch.utils.checkpoint`.
"""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ..exercises import Answer, Exercise, Mistake, Result, letters_of
from ..quizzes import Option, Question

_PLACE = "place segments from `A`, `a` and the number of blocks"
_NEST = "nest checkpoints, and put their passes in order"
_READ = "read a frontier of peak against arithmetic, and its bounds"
_SELECT = "use a selective policy"
_ENDLESS = "no end"


class _TooLong(Exception):
    pass


def _in_time(answer: Answer, *arguments: Any, seconds: float = 1.0) -> Result:
    """What the answer gives; `_ENDLESS` where it has computed for so long and is not done."""
    end, before = time.process_time() + seconds, sys.gettrace()

    def look(*_: Any) -> Any:
        """Called by Python at each line."""
        if time.process_time() > end:
            raise _TooLong
        return look

    sys.settrace(look)
    try:
        return answer(*arguments)
    except _TooLong:
        return _ENDLESS
    finally:
        sys.settrace(before)


# --------------------------------------------------------------------------------------------- 4.1 what is held at most

_Lengths = Sequence[int]
_SPLITS: tuple[tuple[_Lengths, int, int], ...] = (  # lengths, A, a
    ((2, 2, 2, 2), 60, 10),
    ((7,), 24, 8),
    ((1, 1, 1, 1, 1, 1), 9, 9),
    ((5, 3, 2), 20, 4),
    ((1, 4, 2, 3, 1), 30, 7),
)


def _held(answer: Answer) -> Result:
    return [answer(list(lengths), A, a) for lengths, A, a in _SPLITS]


def _held_tensor_by_tensor() -> Result:
    """Each input and each block put down and taken away in the order in which a step does."""
    tops = []
    for lengths, A, a in _SPLITS:
        held = {("input", number): a for number in range(len(lengths))}
        top = sum(held.values())
        for number in reversed(range(len(lengths))):
            held["input", number] = 0  # it is its first block's, and counted there
            held |= {("block", block): A for block in range(lengths[number])}
            top = max(top, sum(held.values()))
            held = {key: nbytes for key, nbytes in held.items() if key[0] == "input"}
        tops.append(top)
    return tops


def _highest(waiting: Callable[[int, _Lengths, int, int], int], back: Callable[[int, int, int], int]) -> Answer:
    """The exercise's function with these in its two gaps: of (i, lengths, A, a) and of (length, A, a)."""
    return lambda lengths, A, a: max(waiting(i, lengths, A, a) + back(length, A, a) for i, length in enumerate(lengths))


def _before(i: int, lengths: _Lengths, A: int, a: int) -> int:
    return i * a


def _blocks(length: int, A: int, a: int) -> int:
    return length * A


def _too_much(result: Result, truth: Result) -> str | None:
    if not all(isinstance(its, int | float) for its in result):
        return None
    if result[1] != truth[1]:
        return (
            f"Take a single segment of 7 blocks, each of 24 bytes with its input of 8: yours says {result[1]:g}. "
            "Nothing waits there: what is back?"
        )
    if any(abs(one) < other for one, other in zip(result, truth, strict=True)):
        return (
            f"Too low where several segments follow one another: for lengths 2, 2, 2, 2 with A of 60 and a of 10 yours "
            f"says {result[0]:g}. How many inputs wait when backward gets to the last?"
        )
    return (
        f"Too high where several segments follow one another: for lengths 2, 2, 2, 2 with A of 60 and a of 10 yours "
        f"says {result[0]:g}. Which inputs are already in A, or gone?"
    )


_MOST = Exercise(
    number="4.1",
    kind="fill",
    task="Say what waits and what is back when backward gets to a segment.",
    difficulty=1,
    minutes=4,
    objective=_PLACE,
    run=_held,
    truth=_held_tensor_by_tensor,
    mistakes=(
        Mistake(
            _highest(lambda i, lengths, A, a: (i + 1) * a, _blocks),
            "One input is in your sum twice: a segment's own input is its first block's, which is part of A.",
        ),
        Mistake(
            _highest(lambda i, lengths, A, a: len(lengths) * a, _blocks),
            "Your inputs wait until the end, all of them. Which are gone, or in A, when backward is at a segment?",
        ),
        Mistake(
            _highest(lambda i, lengths, A, a: (len(lengths) - 1) * a, _blocks),
            "Right for the last segment. How many inputs still wait when backward has come to an earlier one?",
        ),
        Mistake(
            _highest(lambda i, lengths, A, a: (len(lengths) - i - 1) * a, _blocks),
            "Your inputs are counted from the wrong end: backward goes from the last segment to the first.",
        ),
        Mistake(
            _highest(lambda i, lengths, A, a: (len(lengths) - i) * a, _blocks),
            "Counted from the wrong end, since backward begins at the last segment; and a segment's own input is in A.",
        ),
        Mistake(
            _highest(lambda i, lengths, A, a: 0, _blocks),
            "That is one segment while it is back. What is kept for the segments that backward has still to reach?",
        ),
        Mistake(
            _highest(lambda i, lengths, A, a: a, _blocks),
            "In yours one input waits, whichever segment it is: how many segments come before segment i?",
        ),
        Mistake(
            _highest(lambda i, lengths, A, a: min(i, 1) * a, _blocks),
            "In yours one input waits, whichever segment comes after the first: how many come before segment i?",
        ),
        Mistake(
            _highest(lambda i, lengths, A, a: (i - 1) * a, _blocks),
            "Segments are counted from 0: how many inputs wait beside segment 1?",
        ),
        Mistake(
            _highest(lambda i, lengths, A, a: i, _blocks),
            "You count inputs, not bytes, in what waits.",
        ),
        Mistake(
            _highest(lambda i, lengths, A, a: i * A, _blocks),
            "In yours a segment that waits keeps more than its first block's input: how many bytes is that?",
        ),
        Mistake(
            _highest(lambda i, lengths, A, a: sum(lengths[:i]) * a, _blocks),
            "You let each block's input wait. A segment keeps one input, however many blocks it has.",
        ),
        Mistake(
            _highest(_before, lambda length, A, a: A),
            "In your sum a single block is back. How many of a segment's blocks run again before its backward pass?",
        ),
        Mistake(_highest(_before, lambda length, A, a: length), "You count blocks, not bytes, in what is back."),
        Mistake(
            _highest(_before, lambda length, A, a: length * a),
            "In yours a block that is back saves no more than its input: what is A?",
        ),
        Mistake(
            _highest(_before, lambda length, A, a: length * (A + a)),
            "Each block's input is in your sum twice: A is all that a block saves, its input among it.",
        ),
        Mistake(
            _highest(_before, lambda length, A, a: length * (A - a)),
            "Within a segment that is back each block saves its input too: what does A count?",
        ),
    ),
    diagnose=_too_much,
)


# -------------------------------------------------------------------------------------------------- 4.2 unequal lengths

_CHAINS = ((24, 5, 1), (10, 40, 40), (13, 66, 4), (30, 12, 4), (7, 300, 100))  # n, A, a


def _peak(lengths: _Lengths, A: int, a: int) -> int:
    return max(number * a + length * A for number, length in enumerate(lengths))


def _split(answer: Answer) -> Result:
    """Of each chain: how many blocks the lengths have, and the highest moment, and where that is not the least, what
    the lengths are like: any split of least peak is right."""
    results: list[list[Any] | str | None] = []
    for n, A, a in _CHAINS:
        lengths = _in_time(answer, n, A, a)
        if lengths == _ENDLESS:
            results.append(
                f"For {n} blocks with A = {A} and a = {a} yours does not come to an end within a second. "
                "What does a loop do where not even one block has room?"
            )
            break
        if lengths is None or lengths is ...:
            results.append(None)
            continue
        if not isinstance(lengths, list | tuple) or not all(type(its) is int and its > 0 for its in lengths):
            results.append(f"lengths({n}, {A}, {a}) gave {lengths!r}: give a list of whole numbers such as [3, 2, 1].")
            continue
        total, peak = sum(lengths), _peak(lengths, A, a)
        results.append([total, peak, _like(lengths)] if total == n and peak > _least_peak(n, A, a) else [total, peak])
    return results


def _like(lengths: _Lengths) -> str:
    if max(lengths) - min(lengths) <= 1:
        return "near-equal"
    return "falling" if list(lengths) == sorted(lengths, reverse=True) else "not falling"


@functools.cache
def _least_peak(n: int, A: int, a: int) -> int:
    """By trying each length of the first segment: what comes after it has one input more beside it."""
    return min(max(first * A, a + _least_peak(n - first, A, a) if n > first else 0) for first in range(1, n + 1))


def _near_equal(n: int, count: int) -> list[int]:
    return [n // count + (number < n % count) for number in range(count)]


def _least(n: int, A: int, a: int) -> list[int]:
    """Lengths of the least peak: as many blocks as there is room for, in the smallest room that does."""
    for room in range(A, n * A + 1):
        lengths = [(room - waiting * a) // A for waiting in range(n) if room - waiting * a >= A]
        if sum(lengths) >= n:
            return _cut(lengths, n)
    raise AssertionError


def _cut(lengths: _Lengths, n: int) -> list[int]:
    """The first n blocks of these segments."""
    kept: list[int] = []
    for length in lengths:
        if sum(kept) < n:
            kept.append(min(length, n - sum(kept)))
    return kept


def _falling(n: int, A: int, a: int) -> list[int]:
    """m, m - 1, ...: right where A is a."""
    m = next(m for m in range(1, n + 1) if m * (m + 1) // 2 >= n)
    return _cut(range(m, 0, -1), n)


_REMEDY = {
    "near-equal": "Beside the first segment no input waits, beside the last nearly all: have they to be equally long?",
    "falling": "Falling lengths are right. Which is the least room in which all blocks fit, to the byte, and how long "
    "may segment i be in it?",
    "not falling": "Beside which segment do the fewest inputs wait, and how long may that one be?",
}


def _how_far(result: Result, truth: Result) -> str | None:
    for (n, A, a), its, right in zip(_CHAINS, result, truth, strict=False):  # it ends at a search without end
        if isinstance(its, str):
            return its
        if its is None:
            return f"For {n} blocks of {A} and {a} bytes yours gives nothing."
        if its[0] != right[0]:
            return (
                f"The lengths add up to {its[0]} blocks where the chain has {n} (A = {A}, a = {a}). Each block is in "
                "one segment: is the last one cut to what is left?"
            )
        if its[1] > right[1]:
            return (
                f"For {n} blocks with A = {A} and a = {a} your highest moment is {its[1]} bytes, and a lower one is "
                f"possible. {_REMEDY[its[2]]}"
            )
    return None


_UNEQUAL = Exercise(
    number="4.2",
    kind="write",
    task="Give the lengths of segments whose highest moment is the lowest that segments can have.",
    difficulty=2,
    minutes=8,
    objective=_PLACE,
    run=_split,
    truth=lambda: [[n, _least_peak(n, A, a)] for n, A, a in _CHAINS],
    mistakes=(
        Mistake(
            lambda n, A, a: _near_equal(n, max(1, round(math.sqrt(n)))),
            "These are about sqrt(n) segments, whatever A and a are. And equal: beside which of them do fewest inputs "
            "wait?",
        ),
        Mistake(
            lambda n, A, a: _near_equal(n, min(n, max(1, round(math.sqrt(n * A / a))))),
            "The number is that of the formula for equal lengths. The first segments have fewer inputs beside them: "
            "what does that allow?",
        ),
        Mistake(
            lambda n, A, a: [1] * n, "Every block is its own segment: then n - 1 inputs wait. Is a large or small?"
        ),
        Mistake(lambda n, A, a: [n], "One segment: all of it is back at once, as in the plain step."),
        Mistake(
            lambda n, A, a: _least(n, A, a)[::-1],
            "The lengths are the right ones in reverse. When backward is at the last segment most inputs wait: long or "
            "short?",
        ),
        Mistake(
            _falling,
            "Right where A = a: each input that waits costs a block's place. How many inputs cost that where A is "
            "larger?",
        ),
    ),
    diagnose=_how_far,
)


# ------------------------------------------------------------------------------------------------- 4.3 nested, in order

_PASSES = {
    "a": "C runs backward",
    "b": "A runs forward",
    "c": "C runs again",
    "d": "B runs forward",
    "e": "A runs again",
    "f": "C runs forward",
    "g": "B runs backward",
    "h": "A runs backward",
    "i": "B runs again",
}


def _passes(order: Answer) -> Result:
    return [_PASSES[letter] for letter in letters_of(order, _PASSES, "pass", "b d")]


def _passes_that_ran() -> Result:
    """Blocks A and B in one checkpoint, A in one of its own within it, C in none: run by PyTorch."""
    log: list[str] = []

    def block(name: str, x: Tensor) -> Tensor:
        inside_backward = torch._C._current_graph_task_id() != -1
        log.append(f"{name} runs {'again' if inside_backward else 'forward'}")
        x = x.view_as(x)  # whose gradient is the last that the block's backward pass finds
        x.register_hook(lambda gradient: log.append(f"{name} runs backward"))
        return x.sin().exp()

    def both(x: Tensor) -> Tensor:
        return block("B", checkpoint(functools.partial(block, "A"), x, use_reentrant=False))

    x = torch.ones(3, requires_grad=True)
    block("C", checkpoint(both, x, use_reentrant=False)).sum().backward()
    return log


def _what_is_out_of_order(result: Result, truth: Result) -> str | None:
    again = [its for its in result if its.endswith("again")]
    if "C runs again" in again:
        return "C is not checkpointed: what is there to bring back?"
    if result[:3] != truth[:3]:
        return "First the whole forward pass, from the first block to the last: in which order, and how far?"
    for name in "ABC":
        if result.count(f"{name} runs backward") != 1:
            return f"{name} runs backward once in a step: how often in yours?"
    backward = [its for its in result if its.endswith("backward")]
    if backward != [its for its in truth if its.endswith("backward")]:
        return "Backward begins at the loss. Which block stands next to it, which one comes then?"
    if again.count("B runs again") != 1:
        return "B is in one checkpoint alone: how often does it run again?"
    if result.index("B runs again") > result.index("B runs backward"):
        return "B runs backward before it has run again: what would its derivatives read?"
    if result[::-1].index("A runs again") < result[::-1].index("A runs backward"):
        return "A runs again after its own backward pass: too late for that to read anything."
    if again.count("A runs again") != 2:
        return "Count the checkpoints that A lies in: each of them throws its tensors away once."
    if result.index("A runs again") > result.index("B runs again"):
        return "The outer checkpoint has kept A's input and nothing else. From what would B run again?"
    if "C runs backward" in result[result.index("A runs again") :]:
        return "A block runs again as late as can be: does C's backward pass need A or B?"
    return "The second time that A runs again is for its own backward pass: what stands right before that?"


_NESTED = Exercise(
    number="4.3",
    kind="order",
    task="Order the passes of three blocks: A and B in one checkpoint, A in another one within it, C in none.",
    difficulty=2,
    minutes=4,
    objective=_NEST,
    run=_passes,
    truth=_passes_that_ran,
    mistakes=(
        Mistake(
            "b d f a e i g h",
            "A runs again once in yours: as if it were in the outer checkpoint alone. When that runs again, what does "
            "the inner one do with A's tensors?",
        ),
        Mistake(
            "b d f a i g e h",
            "Here B runs again by itself. Its input has been thrown away: what has the outer checkpoint kept?",
        ),
        Mistake(
            "b d f a e i e g h",
            "A runs again twice before B's backward, and its tensors lie there meanwhile. When is the latest moment?",
        ),
        Mistake("b d f a g h", "This is the plain step: when does anything run again?"),
        Mistake(
            "b d f a e e i g h",
            "A runs again twice in a row. The first time is for B: and when is the second one needed?",
        ),
        Mistake(
            "b d f e i a g e h",
            "A and B run again before C's backward pass, which needs neither. When is the latest moment?",
        ),
        Mistake("b d f c a e i g e h", "C is in no checkpoint: all that it saved is still there."),
    ),
    diagnose=_what_is_out_of_order,
)


# -------------------------------------------------------------------------------------------------------- 4.4 the bound

_ROOMS = ((24, 5, 1, 8), (24, 5, 1, 6), (40, 70, 10, 115), (12, 100, 30, 240), (100, 16, 2, 27))  # n, A, a, room
_TOO_SMALL = ((9, 50, 10, 59), (9, 50, 10, 35))  # for a block with an input beside it, and for a block


def _bounds(answer: Answer) -> Result:
    results: list[Any] = []
    for case in _TOO_SMALL + _ROOMS:
        results.append(_in_time(answer, *case))
        if results[-1] == _ENDLESS:
            break
    return results


@functools.cache
def _least_again(n: int, s: int) -> float:
    """Block runs that come on top, with s inputs beside the running block: the least over each first part, which is
    run, thrown away, and brought back later, while its input waits."""
    if n <= 1:
        return 0
    if s < 1:
        return math.inf
    return min(m + _least_again(m, s) + _least_again(n - m, s - 1) for m in range(1, n))


def _bounds_by_search() -> Result:
    found = [_least_again(n, min(n, (room - A) // a)) for n, A, a, room in _TOO_SMALL + _ROOMS]
    return [None if again == math.inf else again for again in found]


def _formula(
    inputs: Callable[[int, int, int], int],
    again: Callable[[int, int, int], int] = lambda n, s, r: r * n - math.comb(s + r, r - 1),
    nothing: int | None = None,
) -> Answer:
    """The solution with something else in it."""

    def answer(n: int, A: int, a: int, room: int) -> int | None:
        s = inputs(A, a, room)
        if s < 1:
            return nothing
        return again(n, s, next(r for r in range(1, n + 1) if math.comb(s + r, r) >= n))

    return answer


def _beside(A: int, a: int, room: int) -> int:
    return (room - A) // a


def _which_part(result: Result, truth: Result) -> str | None:
    for (n, A, a, room), its, right in zip(_TOO_SMALL + _ROOMS, result, truth, strict=False):
        if its == _ENDLESS:
            return (
                f"{n} blocks with A = {A} and a = {a} in {room} bytes: yours does not come to an end within a "
                "second. How large is s there, and what is C(s + r, r) for it?"
            )
        if right is None and its is not None:
            return (
                f"{n} blocks with A = {A} and a = {a} in {room} bytes: yours says {its!r}. Does a running block fit in "
                "there, with an input beside it?"
            )
        if its is None and right is not None:
            return (
                f"{n} blocks with A = {A} and a = {a} in {room} bytes: yours says None, though there is room for a "
                "block and at least one input beside it."
            )
    result, truth = result[len(_TOO_SMALL) :], truth[len(_TOO_SMALL) :]
    if any(not isinstance(its, int | float) for its in result):
        return "It gives something else than a number of block runs."
    if result[1] != truth[1]:
        return (
            f"24 blocks, A = 5, a = 1, room for 6: yours says {result[1]:g}. One input has room: how often does the "
            "first block run again at most, and what is C(s + r, r) then?"
        )
    if result[0] != truth[0]:
        return (
            f"24 blocks, A = 5, a = 1, room for 8: yours says {result[0]:g}. Write s, r and both binomials down: is r "
            "the smallest that reaches 24?"
        )
    return "Right for sizes of 5 and 1. How many whole inputs fit where a does not divide the room, or s is large?"


_BOUND = Exercise(
    number="4.4",
    kind="write",
    task="Say how many block runs nesting costs at least within a given room, or that nothing fits.",
    difficulty=2,
    minutes=7,
    objective=_READ,
    run=_bounds,
    truth=_bounds_by_search,
    mistakes=(
        Mistake(
            _formula(lambda A, a, room: room // a),
            "Your s is all of the room in inputs. What else has to be there when a block is back?",
        ),
        Mistake(
            _formula(lambda A, a, room: (room - A) // a + 1),
            "One input too many: the running block's own is part of A.",
        ),
        Mistake(
            _formula(lambda A, a, room: (room - A) // a - 1),
            "One input too few: the running block's own is part of A, so all the room beside A is for others.",
        ),
        Mistake(
            _formula(lambda A, a, room: room - A),
            "Your s is the bytes that are left beside a running block: how many inputs are they?",
        ),
        Mistake(
            _formula(lambda A, a, room: room - 5),
            "5 is the A of the lesson's chain, in units of its a. Here both are arguments.",
        ),
        Mistake(
            _formula(lambda A, a, room: -((A - room) // a)),
            "Your s is rounded up: only inputs that fit whole count.",
        ),
        Mistake(
            _formula(lambda A, a, room: room // a - A // a),
            "You round twice. Which bytes are left beside a running block, and how many whole inputs are they?",
        ),
        Mistake(
            _formula(lambda A, a, room: room // (A + a)),
            "Not every input has a block beside it: one block is back at a time, and all the others' room is for "
            "inputs.",
        ),
        Mistake(
            _formula(_beside, again=lambda n, s, r: r * n),
            "r n counts each block r times. Which blocks run again fewer times than r? The formula takes them off.",
        ),
        Mistake(
            _formula(_beside, again=lambda n, s, r: r * n - math.comb(s + r - 1, r - 1)),
            "In the binomial that is taken off the upper number is s + r, as in the other.",
        ),
        Mistake(
            _formula(_beside, again=lambda n, s, r: (r + 1) * n - math.comb(s + r, r - 1)),
            "You count the first forward pass too: what comes on top of it is asked for.",
        ),
        Mistake(
            _formula(_beside, again=lambda n, s, r: r),
            "That is how often one block runs again at most. How many runs are it for all blocks?",
        ),
        Mistake(
            _formula(_beside, again=lambda n, s, r: r * n - math.comb(s + r, r)),
            "The binomial that is taken off has r - 1 below, not r.",
        ),
        Mistake(
            _formula(_beside, nothing=0),
            "Where no input fits beside a running block, a chain cannot run at all: what is asked for in that case?",
        ),
        Mistake(
            lambda n, A, a, room: n if room >= A + a else None,
            "That is one level of checkpoints: each block once more. Does it fit into so little room?",
        ),
    ),
    diagnose=_which_part,
)


# -------------------------------------------------------------------------------------------------------- 4.5 selective

_NETS: tuple[tuple[nn.Module, tuple[int, ...]], ...] = (
    (nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4)), (6, 4)),
    (nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False), nn.Linear(3, 12)), (2, 8)),
    (nn.Sequential(nn.Linear(5, 9, bias=False), nn.LayerNorm(9), nn.Linear(9, 9), nn.ReLU()), (20, 5)),
)
_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def _inputs() -> Iterator[tuple[nn.Module, Tensor]]:
    for net, shape in _NETS:
        yield net, torch.ones(shape, requires_grad=True)


def _kept(policy: Answer) -> Result:
    """For each net, run in a checkpoint under the policy: what is kept, operators with the shapes that they read."""
    results = []
    for net, x in _inputs():
        kept: list[str] = []

        def noting(ctx: Any, op: Any, *args: Any, kept: list[str] = kept, **kwargs: Any) -> Any:
            decision = policy(ctx, op, *args, **kwargs)
            if decision in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE, True) and not ctx.is_recompute:
                kept.append(_called(op, args))
            return CheckpointPolicy.PREFER_RECOMPUTE if decision is None else decision

        contexts = functools.partial(create_selective_checkpoint_contexts, noting)
        y = checkpoint(net, x, use_reentrant=False, context_fn=contexts)
        torch.autograd.grad(y.sum(), x)
        results.append(kept)
    return results


def _called(op: Any, args: Sequence[Any]) -> str:
    shapes = ["x".join(map(str, its.shape)) for its in args if isinstance(its, Tensor)]
    return f"{op.name().removeprefix('aten::')} {' '.join(shapes)}"


class _NarrowResults(TorchDispatchMode):
    """Notes the matrix products whose result has no more numbers than the matrix on the left."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _PRODUCTS and result.numel() <= args[-2].numel():
            self.found.append(_called(func, args))
        return result


def _narrow_products() -> Result:
    results = []
    for net, x in _inputs():
        with _NarrowResults() as mode:
            net(x)
        results.append(mode.found)
    return results


def _policy(keeps: Callable[..., Any]) -> Answer:
    """The exercise's function with this in its gap."""

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if keeps(op, *args) else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _product(op: Any) -> bool:
    return op in _PRODUCTS


def _what_is_kept(result: Result, truth: Result) -> str | None:
    extra = [its for one, other in zip(result, truth, strict=True) for its in one if its not in other]
    missing = [its for one, other in zip(result, truth, strict=True) for its in other if its not in one]
    if not any(result):
        return "Nothing is kept. Is `op` compared with an overload, such as `torch.ops.aten.mm.default`?"
    if others := [its for its in extra if "mm" not in its.split()[0]]:
        return f"You keep `{others[0].split()[0]}` too, which is no matrix product."
    if extra and not missing:
        return f"You keep `{extra[0]}`, which is wider than what it multiplies (operator, shapes that it reads)."
    if missing and not extra:
        return f"`{missing[0]}` is missing, and no wider than what it multiplies (operator, shapes that it reads)."
    return f"You keep `{extra[0]}` and not `{missing[0]}`: operator, and the shapes that it reads."


_POLICY = Exercise(
    number="4.5",
    kind="fill",
    task="Keep the matrix products whose result is no wider than what they multiply, and nothing else.",
    difficulty=2,
    minutes=5,
    objective=_SELECT,
    run=_kept,
    truth=_narrow_products,
    mistakes=(
        Mistake(
            _policy(lambda op, *args: _product(op)),
            "You keep every matrix product. Which of them give more numbers than they read? And which side of `w` are "
            "the result's columns?",
        ),
        Mistake(
            _policy(lambda op, *args: _product(op) and args[-1].shape[1] >= args[-1].shape[0]),
            "These are the ones that are no narrower than what they multiply: the comparison is the wrong way round.",
        ),
        Mistake(
            _policy(lambda op, *args: _product(op) and args[-1].shape[1] > args[-1].shape[0]),
            "You keep those that widen, and run the others again: the wrong way round.",
        ),
        Mistake(
            _policy(lambda op, *args: _product(op) and args[-1].shape[1] < args[-1].shape[0]),
            "One that gives just as many numbers as it reads is to be kept too.",
        ),
        Mistake(
            _policy(lambda op, *args: op == _PRODUCTS[1] and args[-1].shape[1] <= args[-1].shape[0]),
            "Linear layers without a bias are matrix products too: which operator do they call?",
        ),
        Mistake(
            _policy(lambda op, *args: op == _PRODUCTS[0] and args[-1].shape[1] <= args[-1].shape[0]),
            "Linear layers with a bias are matrix products too: which operator do they call?",
        ),
        Mistake(
            _policy(lambda op, *args: _product(op) and args[-2].shape[1] <= args[-2].shape[0]),
            "You compare the two sides of the left matrix. How many columns has the result?",
        ),
        Mistake(
            _policy(lambda op, *args: _product(op) and args[1].shape[-1] <= args[0].shape[-1]),
            "Right for `mm`. `addmm` has its bias before the two matrices: where are they, counted from the end?",
        ),
        Mistake(
            _policy(lambda op, *args: _product(op) and args[-1].shape[1] <= args[-2].shape[0]),
            "You compare with the rows of the matrix on the left, or all numbers of both: how many columns has it?",
        ),
        Mistake(
            _policy(lambda op, *args: op in (torch.ops.aten.mm, torch.ops.aten.addmm)),
            "Nothing is kept: `op` is an overload, and `torch.ops.aten.mm` without `.default` equals none.",
        ),
        Mistake(_policy(lambda op, *args: True), "You keep everything: then nothing is saved by the checkpoint."),
    ),
    diagnose=_what_is_kept,
)


EXERCISES: tuple[Exercise, ...] = (_MOST, _UNEQUAL, _NESTED, _BOUND, _POLICY)

QUIZ: tuple[Question, ...] = (
    Question(
        "A network has 10 equal blocks. A block saves 20 times the bytes of its input. How many near-equal segments, "
        "all checkpointed, give the lowest peak?",
        (
            Option(
                "3, about the square root of the number of blocks",
                "that is right where a block saves no more than its input.",
            ),
            Option("5, two blocks each", "4 inputs wait, and 40 are back; with single blocks 9 wait, and 20 are back."),
            Option("10, one for each block", "sqrt(10 x 20) is above 10: there are not that many blocks.", right=True),
        ),
    ),
    Question(
        "`checkpoint_sequential` with 13 segments on 24 blocks peaks far above the same with 12. Why?",
        (
            Option(
                "what does not divide is in the last segment, which keeps everything",
                "twelve single blocks, and then twelve blocks that are not checkpointed.",
                right=True,
            ),
            Option("13 inputs take more memory than 12", "by one input, and the peak rose by far more."),
            Option(
                "each segment runs again once for every segment that comes after it",
                "nothing is nested there: each of the checkpointed ones runs again once.",
            ),
        ),
    ),
    Question(
        "One level of checkpoints with the best lengths fits into your memory. Should they be nested as well?",
        (
            Option(
                "yes: the peak falls further, and the arithmetic stays what it was",
                "it falls, and the arithmetic rises: blocks run again several times.",
            ),
            Option("no: more would run again", "nesting pays where one level does not fit.", right=True),
            Option("no: the gradients would differ", "they do not: the same operators run on the same numbers."),
        ),
    ),
)
