"""Lesson 3, checkpointing: five exercises and the quiz.

What is checked are gradients, bytes and the order of passes; the truth is PyTorch's own autograd, its own
`torch.utils.checkpoint`, or a chain that is gone through tensor by tensor.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from ...flops import FlopCounter
from ...record import record
from ...units import format_bytes
from ..exercises import Answer, Exercise, Mistake, Result, letters_of, same
from ..quizzes import Option, Question
from .numbers import drawn

_BY_HAND = "write checkpointing by hand, over a `saved` dict and as an `autograd.Function`"
_IN_ORDER = "put the passes of a checkpointed step in order"
_THE_SAME = "keep random numbers and BatchNorm's statistics right in the second run"
_NO_HELP = "say when a checkpoint cannot lower the peak"


def _relative(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm().clamp_min(1e-30))


# ------------------------------------------------------------------------------------------ 3.1 what was deleted, again

_NAMES = ("x", "w1", "w2", "w3")
_SIZES = ((6, 4), (9, 5), (3, 8))  # samples and width: square weights, so that a wrong line runs too


def _tensors(samples: int, width: int) -> tuple[Tensor, list[Tensor]]:
    """What comes from above, and `_NAMES`."""
    return drawn(9, samples, width), [drawn(0, samples, width), *(drawn(n, width, width) for n in (1, 2, 3))]


class _Work(FlopCounter):
    """Counts operations, and calls of tanh, which are none of them."""

    tanhs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.tanhs += func is torch.ops.aten.tanh.default
        return super().__torch_dispatch__(func, types, args, kwargs)


def _gradients_of(backward: Answer) -> Result:
    """For each size: the gradients, and the work of all that ran."""
    results = []
    for size in _SIZES:
        g, (x, *weights) = _tensors(*size)
        with _Work() as work:
            gradients = backward(g, {"x": x}, *weights)
        results.append({"gradients": list(gradients), "work": [work.total, work.tanhs]})
    return results


def _gradients_by_autograd() -> Result:
    results = []
    for samples, width in _SIZES:
        g, leaves = _tensors(samples, width)
        x, w1, w2, w3 = (leaf.requires_grad_() for leaf in leaves)
        y = x + torch.tanh(torch.tanh(x @ w1.T) @ w2.T) @ w3.T
        # Two matrix products of three are needed again, and backward has two for each of the three.
        work = [(2 + 6) * 2 * samples * width**2, 2]
        results.append({"gradients": list(torch.autograd.grad(y, leaves, g)), "work": work})
    return results


_Again = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _with_again(again: _Again) -> Answer:
    """The exercise's function with these two lines in it."""

    def backward(g: Tensor, saved: dict[str, Tensor], w1: Tensor, w2: Tensor, w3: Tensor) -> tuple[Tensor, ...]:
        x = saved["x"]
        a, b = again(x, w1, w2, w3)
        g_w3, g_b = g.T @ b, g @ w3
        g_k = g_b * (1 - b**2)
        g_w2, g_a = g_k.T @ a, g_k @ w2
        g_h = g_a * (1 - a**2)
        g_w1, g_x = g_h.T @ x, g + g_h @ w1
        return g_x, g_w1, g_w2, g_w3

    return backward


def _and_the_output(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> tuple[Tensor, Tensor]:
    a = torch.tanh(x @ w1.T)
    b = torch.tanh(a @ w2.T)
    _ = x + b @ w3.T
    return a, b


def _swapped(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> tuple[Tensor, Tensor]:
    a = torch.tanh(x @ w1.T)
    return torch.tanh(a @ w2.T), a


def _what_is_off(result: Result, truth: Result) -> str | None:
    if not all(len(its["gradients"]) == len(_NAMES) for its in result):
        return "It returns other gradients than those of x, w1, w2 and w3: were the lines below yours changed?"
    wrong = {
        name
        for its, right in zip(result, truth, strict=True)
        for name, one, other in zip(_NAMES, its["gradients"], right["gradients"], strict=True)
        if not same(one, other)
    }
    if not wrong:
        return (
            "The gradients are right, with more arithmetic than they need. Which matrix product is there twice, or is "
            "read by no line below?"
        )
    if "w3" in wrong:
        return "The gradient of w3 is off, and of the two it reads b alone: what went into w3 in the forward pass?"
    return "The gradient of w3 is right, so b is. Those that read a are off: what went into w2 in the forward pass?"


_DELETED = Exercise(
    number="3.1",
    kind="fill",
    task="Bring back what backward reads, from the block's input alone.",
    difficulty=1,
    minutes=4,
    objective=_BY_HAND,
    run=_gradients_of,
    truth=_gradients_by_autograd,
    mistakes=(
        Mistake(
            _with_again(_and_the_output),
            "The gradients are right, and yet there is a matrix product too many: does any line below read the "
            "block's output?",
        ),
        Mistake(
            _with_again(lambda x, w1, w2, w3: (torch.tanh(x @ w1.T), torch.tanh(torch.tanh(x @ w1.T) @ w2.T))),
            "The gradients are right, but the first layer runs twice: what of it have you got already when b is due?",
        ),
        Mistake(
            _with_again(lambda x, w1, w2, w3: (x, x)),
            "Nothing was run again: x is the block's input, and the lines below need what the layers made of it.",
        ),
        Mistake(
            _with_again(lambda x, w1, w2, w3: (torch.tanh(x @ w1.T), torch.tanh(x @ w2.T))),
            "In the forward pass the second layer reads what the first has made. What does yours read?",
        ),
        Mistake(
            _with_again(lambda x, w1, w2, w3: (x @ w1.T, (x @ w1.T) @ w2.T)),
            "`1 - a**2` is the derivative of tanh, written with tanh's result. Is your a that, or tanh's input?",
        ),
        Mistake(
            _with_again(lambda x, w1, w2, w3: (torch.tanh(x @ w1.T), torch.tanh(x @ w1.T) @ w2.T)),
            "a is right. `1 - b**2` wants tanh's result too: is your b that, or tanh's input?",
        ),
        Mistake(
            _with_again(lambda x, w1, w2, w3: (torch.tanh(x @ w1), torch.tanh(torch.tanh(x @ w1) @ w2))),
            "The second run has to be the first one to the letter: how do the weights stand in the formula of y?",
        ),
        Mistake(_with_again(_swapped), "Both values are right, and each is in the other's place."),
    ),
    diagnose=_what_is_off,
)


# ---------------------------------------------------------------------------------------------- 3.2 the passes in order

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
    """The passes that the letters name."""
    return [_PASSES[letter] for letter in letters_of(order, _PASSES, "pass", "b d")]


class _Mark(torch.autograd.Function):
    """Notes when a block begins to run, and when its backward pass is over."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, log: list[str]) -> Tensor:
        ctx.name, ctx.log = name, log
        inside_backward = torch._C._current_graph_task_id() != -1
        log.append(f"{name} runs {'again' if inside_backward else 'forward'}")
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.log.append(f"{ctx.name} runs backward")
        return *gradients, None, None


def _passes_that_ran() -> Result:
    """Three blocks, A and C checkpointed, by PyTorch."""
    log: list[str] = []

    def block(name: str, x: Tensor) -> Tensor:
        return torch.tanh(_Mark.apply(x, name, log)).exp()  # type: ignore[no-untyped-call]

    x = drawn(0, 3).requires_grad_()
    for name in "ABC":
        run = functools.partial(block, name)
        x = run(x) if name == "B" else checkpoint(run, x, use_reentrant=False)
    x.sum().backward()
    return log


def _what_is_out_of_order(result: Result, truth: Result) -> str | None:
    missing = [its for its in truth if its not in result]
    twice = [its for its in result if result.count(its) > 1]
    if "B runs again" in result:
        return "B is not checkpointed: what is there to bring back?"
    if twice:
        return f"“{twice[0]}” is there twice: each pass happens once."
    if any("again" in its for its in missing):
        return (
            "A block that is checkpointed has nothing but its input when backward gets there: what has to come first?"
        )
    if missing:
        return f"{len(missing)} of the passes that happen {'is' if len(missing) == 1 else 'are'} missing."
    if sorted(result[:3]) == sorted(truth[:3]) != result[:3]:
        return "Each block reads what the one before it has made: in which order do they run forward?"
    if result[:3] != truth[:3]:
        return "Nothing runs backward or again before the loss is there: how far has the forward pass to go first?"
    backward = [its for its in result if its.endswith("backward")]
    if backward != [its for its in truth if its.endswith("backward")]:
        return "Backward begins at the loss. Which block stands next to it?"
    for name in "AC":
        if result.index(f"{name} runs again") > result.index(f"{name} runs backward"):
            return f"{name} runs backward before it has run again: what would its derivatives read?"
    return "A block runs again as late as can be: between which two passes does it have to be?"


_ORDER = Exercise(
    number="3.2",
    kind="order",
    task="Order the passes of three blocks, of which the first and the last are checkpointed.",
    difficulty=1,
    minutes=3,
    objective=_IN_ORDER,
    run=_passes,
    truth=_passes_that_ran,
    mistakes=(
        Mistake(
            "b d f a g h",
            "This is the plain step. When C's backward begins, where do C's saved tensors come from?",
        ),
        Mistake(
            "b d f c e a g h",
            "Both blocks run again before any backward, so the saved tensors of both are in memory at once. When is "
            "the latest moment for A?",
        ),
        Mistake(
            "b d f e c a g h",
            "A runs again first, though its tensors are the last that backward reads. Which block does backward reach "
            "first?",
        ),
        Mistake(
            "b d f e h g c a",
            "This goes backward from the first block to the last. Where does the first gradient come from?",
        ),
        Mistake(
            "b d f c a i g e h",
            "B is not checkpointed: all it saved is still there when backward reaches it.",
        ),
        Mistake(
            "b d f a c g h e",
            "Here blocks run again after their backward pass: too late for it to read anything.",
        ),
    ),
    diagnose=_what_is_out_of_order,
)


# ---------------------------------------------------------------------------------------------------- 3.3 as a Function


class _Hidden(nn.Module):
    """A block whose hidden tensor is much larger than its input."""

    def __init__(self, seed: int, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(drawn(seed, 16 * width, width))
        self.down = nn.Parameter(drawn(seed + 1, width, 16 * width) / 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.up.T) @ self.down.T


_Way = Callable[[nn.Module, Tensor], Tensor]


def _trained(way: _Way, depth: int, samples: int, width: int) -> dict[str, Any]:
    """A chain of blocks run that way: the gradients of what stands before them and of the blocks, in order; and the
    bytes that are alive when backward begins."""
    first, last = drawn(1, width, width).requires_grad_(), drawn(2, width)
    blocks = [_Hidden(10 * number, width) for number in range(1, depth + 1)]
    with record() as trace:
        x = drawn(0, samples, width) @ first
        for block in blocks:
            x = way(block, x)
        loss = (x * last).square().mean()
        loss.backward()
    leaves = [first, *(parameter for block in blocks for parameter in block.parameters())]
    forward = [its.tick for its in trace.operators if its.place.phase == "forward"]
    alive = sum(its.nbytes for its in trace.alive(max(forward)) if its.category not in ("parameters", "batch"))
    return {"gradients": [leaf.grad for leaf in leaves], "held": alive}


_CHAINS = ({"depth": 1, "samples": 4, "width": 3}, {"depth": 3, "samples": 6, "width": 4})


def _trained_with(answer: Answer) -> Result:
    return [_trained(lambda block, x: answer.apply(x, block), **chain) for chain in _CHAINS]


def _trained_by_torch() -> Result:
    """The gradients are those of plain autograd, the rest is that of PyTorch's own checkpoint."""

    def kept(block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]

    return [
        _trained(kept, **chain) | {"gradients": _trained(lambda block, x: block(x), **chain)["gradients"]}
        for chain in _CHAINS
    ]


class _KeepsTheGraph(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, block: nn.Module) -> Tensor:
        ctx.x = x.detach().requires_grad_()
        with torch.enable_grad():
            ctx.y = block(ctx.x)
        return ctx.y.detach()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.y.backward(*gradients)
        return ctx.x.grad, None


def _function(backward: Callable[..., Any]) -> type:
    """A Function that keeps x alone, and goes back like that."""

    class Checkpointed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, block: nn.Module) -> Tensor:
            ctx.save_for_backward(x)
            ctx.block = block
            return block(x)  # type: ignore[no-any-return]

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            (x,) = ctx.saved_tensors
            return backward(x, ctx.block, *gradients)

    return Checkpointed


def _run_again(x: Tensor, block: nn.Module) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        return x, block(x)


def _no_weights(x: Tensor, block: nn.Module, g: Tensor) -> Any:
    x, y = _run_again(x, block)
    return *torch.autograd.grad(y, x, g), None


def _nothing_from_above(x: Tensor, block: nn.Module, g: Tensor) -> Any:
    x, y = _run_again(x, block)
    y.backward(torch.ones_like(y))
    return x.grad, None


def _nothing_for_x(x: Tensor, block: nn.Module, g: Tensor) -> Any:
    _, y = _run_again(x, block)
    y.backward(g)
    return None, None


def _passed_through(x: Tensor, block: nn.Module, g: Tensor) -> Any:
    _, y = _run_again(x, block)
    y.backward(g)
    return g, None


def _what_is_wrong_with_it(result: Result, truth: Result) -> str | None:
    theirs, right = result[-1], truth[-1]
    if any(gradient is None for gradient in theirs["gradients"][1:]):
        return "The block's weights got no gradient: which tensors does your second backward pass go to?"
    if theirs["gradients"][0] is None:
        return "What stands before the blocks got no gradient: what has backward to return for x?"
    off = [_relative(one, other) for one, other in zip(theirs["gradients"], right["gradients"], strict=True)]
    twice = [_relative(one, 2 * other) for one, other in zip(theirs["gradients"], right["gradients"], strict=True)]
    if any(its < 1e-5 for its in twice[1:]):
        return "The weights' gradients are twice what they should be: how often does your backward add to them?"
    if max(off[-2:]) > 1e-5:
        return "Even the last block's weights have a wrong gradient: what goes into your second backward pass?"
    if max(off) > 1e-5:
        return "The last block's weights are right, what stands before them is not: what do you return for x?"
    more = theirs["held"] - right["held"]
    if more > 0:
        return (
            f"The gradients are right, but when backward begins {format_bytes(more)} more are alive than needed. What "
            "does ctx hold, beside the block and its input?"
        )
    return None


_FUNCTION = Exercise(
    number="3.3",
    kind="write",
    task="Write checkpointing of any block as an `autograd.Function`.",
    difficulty=3,
    minutes=8,
    objective=_BY_HAND,
    run=_trained_with,
    truth=_trained_by_torch,
    mistakes=(
        Mistake(
            _KeepsTheGraph,
            "The gradients are right, but nothing was thrown away: through ctx, the block's graph of the forward pass "
            "lives until backward.",
        ),
        Mistake(
            _function(_no_weights),
            "x gets its gradient, and the block's weights get none. `torch.autograd.grad(y, x, g)` computes what it is "
            "asked for and leaves every `.grad` alone: what does it differently that training calls?",
        ),
        Mistake(
            _function(_nothing_from_above),
            "The gradient that arrives from above goes in nowhere. `y.sum().backward()` is right for a loss that is "
            "the sum of y, and this one is not.",
        ),
        Mistake(
            _function(_nothing_for_x),
            "The last block's weights are right, and nothing before it gets a gradient. Does the x that goes into the "
            "second run ask for one?",
        ),
        Mistake(
            _function(_passed_through),
            "What is returned for x is the gradient of the block's output, and not of its input.",
        ),
    ),
    diagnose=_what_is_wrong_with_it,
)


# ----------------------------------------------------------------------------------------- 3.4 the second run, the same


def _random_blocks() -> Iterable[tuple[nn.Module, Tensor]]:
    """Blocks that draw random numbers, that keep statistics, and that do both; the same in every call."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        yield nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 6)).double(), drawn(0, 5, 6)
        yield nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Tanh()).double(), drawn(1, 7, 6)
        both = nn.Sequential(nn.Conv1d(2, 3, 3), nn.BatchNorm1d(3, momentum=None), nn.Dropout(0.3)).double()
        yield both, drawn(2, 4, 2, 9)


_Runs = Callable[[nn.Module, Tensor, Tensor], Any]


def _second_run(again: _Runs) -> Result:
    """What the second run gives, its gradients, and what it leaves behind. The random stream has moved on before."""
    results: list[dict[str, Any]] = []
    for block, data in _random_blocks():
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(11)
            state = torch.get_rng_state()
            block(data)
            torch.rand(3)
            x = data.clone().requires_grad_()
            out = again(block, x, state)
            if out is None or out is ...:
                return out
            if out.requires_grad:
                out.square().sum().backward()
            results.append(
                {
                    "output": out.detach(),
                    "gradient": x.grad,
                    "weights": [parameter.grad for parameter in block.parameters()],
                    "buffers": [buffer.clone() for buffer in block.buffers()],
                    "stream": torch.get_rng_state(),
                    "training": [module.training for module in block.modules()],
                }
            )
    return results


def _first_run() -> Result:
    """The first run itself, with its gradients, and what the step has left behind by the time of the second."""
    results: list[dict[str, Any]] = []
    for block, data in _random_blocks():
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(11)
            x = data.clone().requires_grad_()
            out = block(x)
            torch.rand(3)
            results.append(
                {
                    "output": out.detach(),
                    "buffers": [buffer.clone() for buffer in block.buffers()],
                    "stream": torch.get_rng_state(),
                    "training": [module.training for module in block.modules()],
                }
            )
            out.square().sum().backward()
            results[-1] |= {"gradient": x.grad, "weights": [parameter.grad for parameter in block.parameters()]}
    return results


def _with_copies(block: nn.Module, x: Tensor) -> Any:
    """The block run with copies of its buffers."""
    return functional_call(block, {name: buffer.clone() for name, buffer in block.named_buffers()}, (x,))


def _no_care(block: nn.Module, x: Tensor, rng_state: Tensor) -> Any:
    return block(x)


def _no_buffers(block: nn.Module, x: Tensor, rng_state: Tensor) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(rng_state)
        return block(x)


def _stream_left_back(block: nn.Module, x: Tensor, rng_state: Tensor) -> Any:
    torch.set_rng_state(rng_state)
    return _with_copies(block, x)


def _both_left(block: nn.Module, x: Tensor, rng_state: Tensor) -> Any:
    torch.set_rng_state(rng_state)
    return block(x)


def _no_stream(block: nn.Module, x: Tensor, rng_state: Tensor) -> Any:
    return _with_copies(block, x)


def _any_seed(block: nn.Module, x: Tensor, rng_state: Tensor) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return _with_copies(block, x)


def _not_in_training(block: nn.Module, x: Tensor, rng_state: Tensor) -> Any:
    block.eval()
    out = block(x)
    block.train()
    return out


def _no_graph(block: nn.Module, x: Tensor, rng_state: Tensor) -> Any:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.set_rng_state(rng_state)
        return _with_copies(block, x)


def _on_a_copy(block: nn.Module, x: Tensor, rng_state: Tensor) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(rng_state)
        return copy.deepcopy(block)(x)


def _what_differs(result: Result, truth: Result) -> str | None:
    def wrong(part: str) -> bool:
        return any(not same(one[part], other[part]) for one, other in zip(result, truth, strict=True))

    if wrong("training"):
        return "The block is left in another mode than it was in: who calls `train()` again?"
    if wrong("output"):
        return "The block gives something else than in its first run: which numbers does it draw, in which mode is it?"
    if wrong("gradient"):
        return "The output is that of the first run, and backward does not get from it to x: is there a graph?"
    if wrong("weights"):
        return "The output is that of the first run, and the block's own weights do not get their gradients from it."
    if wrong("stream"):
        return "The second run has moved the program's random stream: where would the next dropout continue?"
    if wrong("buffers"):
        return "BatchNorm's buffers are not what they were before the second run: how many batches have they counted?"
    return None


_AGAIN = Exercise(
    number="3.4",
    kind="write",
    task="Run a block a second time, with the first run's random numbers, and leave no other trace of it.",
    difficulty=2,
    minutes=6,
    objective=_THE_SAME,
    run=_second_run,
    truth=_first_run,
    mistakes=(
        Mistake(
            _no_care,
            "The second run draws new random numbers and adds the batch to BatchNorm's statistics once more. What has "
            "to be put back before it, and what after it?",
        ),
        Mistake(
            _no_buffers,
            "Random numbers are right, before and after. BatchNorm's statistics have seen the batch twice: into which "
            "tensors did your run write them?",
        ),
        Mistake(
            _stream_left_back,
            "The output is right. But the program's random stream now stands where the first run left it, and draws "
            "the same numbers once more: who puts it back?",
        ),
        Mistake(
            _both_left,
            "The output is right. What the run leaves behind is not: look at the random stream, and at the number of "
            "batches that BatchNorm has counted.",
        ),
        Mistake(
            _no_stream,
            "BatchNorm's statistics are right. Dropout drops other elements than in the first run: where did the "
            "stream stand when that began?",
        ),
        Mistake(
            _any_seed,
            "A fixed seed gives the same numbers every time, but not those of the first run: which of your arguments "
            "knows them?",
        ),
        Mistake(
            _not_in_training,
            "In `eval()` dropout drops nothing and BatchNorm takes its running statistics: that is another function "
            "than the one that ran first.",
        ),
        Mistake(
            _on_a_copy,
            "All is as it was, and the block learns nothing: backward takes the gradients to the weights of the copy.",
        ),
        Mistake(
            _no_graph,
            "It is the same output, but nothing was recorded in the second run, so that backward ends there.",
        ),
    ),
    diagnose=_what_differs,
)


# ------------------------------------------------------------------------------------------------- 3.5 how much is held

_Sizes = Sequence[int]
_Regions = Sequence[Sequence[int]]
_HELD: tuple[tuple[_Sizes, _Sizes, _Regions], ...] = (
    ([8, 8, 8, 8], [40, 40, 40, 40], [[0], [1], [2], [3]]),
    ([8, 8, 8, 8, 8], [40, 40, 40, 40, 40], [[0, 1, 2, 3, 4]]),
    ([16, 8, 4, 2, 1], [100, 90, 30, 20, 10], [[0, 1], [2], [3, 4]]),
    ([8, 8, 8], [0, 0, 0], [[0], [1], [2]]),
    ([4, 6, 5, 7, 3, 2], [10, 80, 20, 30, 50, 60], [[0], [1, 2], [3], [4, 5]]),
)


def _held(answer: Answer) -> Result:
    return [answer(list(inputs), list(saved), [list(region) for region in regions]) for inputs, saved, regions in _HELD]


def _held_tensor_by_tensor() -> Result:
    """Each tensor put down and taken away in the order in which a step does."""
    tops = []
    for inputs, saved, regions in _HELD:
        held = {("input", region[0]): inputs[region[0]] for region in regions}
        top = sum(held.values())
        for region in reversed(regions):
            for block in region:
                held["input", block] = inputs[block]
                held["saved", block] = saved[block]
            top = max(top, sum(held.values()))
            for block in region:
                del held["input", block], held["saved", block]
        tops.append(top)
    return tops


def _everything(inputs: _Sizes, saved: _Sizes, regions: _Regions) -> int:
    return sum(inputs) + sum(saved)


def _after_forward(inputs: _Sizes, saved: _Sizes, regions: _Regions) -> int:
    return sum(inputs[region[0]] for region in regions)


def _of(region: Sequence[int], *sizes: _Sizes) -> int:
    return sum(size[block] for size in sizes for block in region)


def _all_inputs(inputs: _Sizes, saved: _Sizes, regions: _Regions) -> int:
    inside = max(_of(region[1:], inputs) + _of(region, saved) for region in regions)
    return _after_forward(inputs, saved, regions) + inside


def _own_input_twice(inputs: _Sizes, saved: _Sizes, regions: _Regions) -> int:
    return _after_forward(inputs, saved, regions) + max(_of(region, inputs, saved) for region in regions)


def _own_input_waits_too(inputs: _Sizes, saved: _Sizes, regions: _Regions) -> int:
    return max(
        _after_forward(inputs, saved, regions[: number + 1]) + _of(region, inputs, saved)
        for number, region in enumerate(regions)
    )


def _no_inputs_within(inputs: _Sizes, saved: _Sizes, regions: _Regions) -> int:
    return _after_forward(inputs, saved, regions) + max(_of(region, saved) for region in regions)


def _last_region(inputs: _Sizes, saved: _Sizes, regions: _Regions) -> int:
    return _after_forward(inputs, saved, regions[:-1]) + _of(regions[-1], inputs, saved)


def _alone(inputs: _Sizes, saved: _Sizes, regions: _Regions) -> int:
    return max(_of(region, inputs, saved) for region in regions)


def _one_input_a_region(inputs: _Sizes, saved: _Sizes, regions: _Regions) -> int:
    return max(
        _after_forward(inputs, saved, regions[: number + 1]) + _of(region, saved)
        for number, region in enumerate(regions)
    )


def _inputs_of_all_before(inputs: _Sizes, saved: _Sizes, regions: _Regions) -> int:
    return max(sum(inputs[: region[0]]) + _of(region, inputs, saved) for region in regions)


def _how_far_off(result: Result, truth: Result) -> str | None:
    numbers = all(isinstance(its, int | float) and not isinstance(its, bool) for its in result)
    if not numbers:
        return "It returns something else than a number of bytes: at one moment there is one number."
    if result[1] != truth[1]:
        return (
            f"Take five blocks in a single region, each with 8 bytes of input and 40 of saved tensors: yours says "
            f"{result[1]:g} bytes. What is held just after that region has run again?"
        )
    if result[0] != truth[0]:
        return (
            f"Take four blocks of 8 and 40 bytes, each its own region: yours says {result[0]:g} bytes. What is held "
            "when backward has just brought back the last of them?"
        )
    if any(one < other for one, other in zip(result, truth, strict=True)):
        return "With unequal blocks yours is too low: at which region is the most held? It need not be the last."
    return "With unequal blocks yours is too high: what has been let go of by the time that backward gets to a region?"


_MOST = Exercise(
    number="3.5",
    kind="write",
    task="Say how many bytes are held for backward at the highest moment, given which blocks are one checkpoint.",
    difficulty=2,
    minutes=6,
    objective=_NO_HELP,
    run=_held,
    truth=_held_tensor_by_tensor,
    mistakes=(
        Mistake(
            _after_forward,
            "That is what is held when the forward pass ends. What comes back when backward reaches a region?",
        ),
        Mistake(
            _everything,
            "That is the plain step, in which all is kept. Which of it is never there at the same time?",
        ),
        Mistake(
            _alone,
            "That is one region while it is back. What is held for the regions that backward has still to reach?",
        ),
        Mistake(
            _last_region,
            "Right for blocks that are all alike. Is the last region always the moment of the most, even where an "
            "earlier one saves more?",
        ),
        Mistake(
            _all_inputs,
            "You hold the inputs of all regions until the end. Which inputs are gone when backward gets to the first "
            "region?",
        ),
        Mistake(
            _own_input_twice,
            "A region's own input is in your sum twice: it is the one it runs again from. And which inputs are gone by "
            "then?",
        ),
        Mistake(
            _own_input_waits_too,
            "A region's own input is in your sum twice: as the one that it kept, and as its first block's.",
        ),
        Mistake(
            _no_inputs_within,
            "Two things: within a region that is back, each block's input is saved too, not the first one's alone. And "
            "which inputs are gone when backward gets to an earlier region?",
        ),
        Mistake(
            _one_input_a_region,
            "Within a region that is back, each block's input is saved as in a plain step. In your sum there is the "
            "first one's alone.",
        ),
        Mistake(
            _inputs_of_all_before,
            "A region that waits for its turn holds one input, however many blocks are in it. How many are in your "
            "sum?",
        ),
    ),
    diagnose=_how_far_off,
)


EXERCISES: tuple[Exercise, ...] = (_DELETED, _ORDER, _FUNCTION, _AGAIN, _MOST)

QUIZ: tuple[Question, ...] = (
    Question(
        "A block is checkpointed. The forward pass is over, and backward has not begun. What is held for this block?",
        (
            Option("its input", "the rest is computed from it when backward gets there.", right=True),
            Option(
                "its input, and its weights' gradients", "no gradient exists before backward: from what would it be?"
            ),
            Option("its saved tensors, moved to another place", "that is offloading; here they are deleted."),
            Option("nothing", "then it could not run again: it needs something to start from."),
        ),
    ),
    Question(
        "You put the whole network into one checkpoint. Autograd holds next to nothing when the forward pass ends, and "
        "the peak has not moved. Why?",
        (
            Option(
                "the gradients have taken the place of the activations",
                "they are born later, while what came back is let go.",
            ),
            Option(
                "the whole network runs again at once, and all that it saves is back",
                "then backward stands where it stands in a plain step.",
                right=True,
            ),
            Option("PyTorch leaves a checkpoint out that is too large", "it runs: the arithmetic has grown."),
        ),
    ),
    Question(
        "A ResNet was trained with each block in `checkpoint(block, x, use_reentrant=False)`. Its gradients were the "
        "plain ones to the last bit, its accuracy in `eval()` is another. What do you look at first?",
        (
            Option("dropout", "its random numbers are restored, and with others the gradients would differ."),
            Option(
                "the recomputed activations, which are rounded", "they come from the same operators: not a bit off."
            ),
            Option(
                "BatchNorm's running statistics",
                "`eval()` reads them, and each step has updated them twice.",
                right=True,
            ),
        ),
    ),
)
