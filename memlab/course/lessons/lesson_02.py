"""Lesson 2, saved tensors: its exercises and its quiz."""

from __future__ import annotations

import gc
import itertools
import re
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import MemlabError
from ...record import record
from ...units import KiB, MiB, format_bytes
from ..exercises import Exercise, Mistake, same
from ..quizzes import Option, Question

DERIVE = "derive from an operator's derivative what it must keep for backward"
COUNT = "count what is stored: distinct storages, not tensors"
HOOKS = "build the ledger of saved tensors with hooks"

# -- 2.1: the backward pass of a net with tanh, in order ---------------------------------------------------------------

LINES = {
    "a": 'dW1 = dz.T @ saved["x"]',
    "b": 'dz = dh * (1 - saved["z"] ** 2)',
    "c": 'dh = dy @ saved["W2"]',
    "d": "db2 = dy.sum(0)",
    "e": 'dy = 2 * (saved["y"] - saved["target"]) / saved["y"].numel()',
    "f": 'dW2 = dy.T @ saved["h"]',
    "g": 'dz = dh * (1 - saved["h"] ** 2)',
    "h": 'dW2 = dy.T @ saved["z"]',
    "i": "db1 = dz.sum(0)",
}
_NAMES = ("W1", "b1", "W2", "b2")
_SIZES = ((5, 3, 4), (2, 6, 7))  # samples, inputs, hidden


def _tanh_net(samples: int, inputs: int, hidden: int) -> dict[str, Tensor]:
    """Input, target and weights."""
    draw = torch.Generator().manual_seed(samples)
    shapes = {
        "x": (samples, inputs),
        "target": (samples, inputs),
        "W1": (hidden, inputs),
        "b1": (hidden,),
        "W2": (inputs, hidden),
        "b2": (inputs,),
    }
    return {name: torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in shapes.items()}


def _in_order(answer: Any) -> list[dict[str, Any]]:
    """The gradients that the lines make in that order, or where they stop for want of a name."""
    letters = re.findall(r"\w+", " ".join(map(str, answer)) if isinstance(answer, list | tuple) else str(answer))
    letters = list("".join(letters).lower())
    unknown = [letter for letter in letters if letter not in LINES]
    if unknown:
        raise MemlabError(f"there is no line {unknown[0]!r}: write letters from a to {max(LINES)}, such as 'c a b'")
    results = []
    for sizes in _SIZES:
        saved = _tanh_net(*sizes)
        saved["z"] = saved["x"] @ saved["W1"].T + saved["b1"]
        saved["h"] = saved["z"].tanh()
        saved["y"] = saved["h"] @ saved["W2"].T + saved["b2"]
        names: dict[str, Any] = {"saved": saved}
        results.append(_executed(letters, names))
    return results


def _executed(letters: Iterable[str], names: dict[str, Any]) -> dict[str, Any]:
    for letter in letters:
        try:
            exec(LINES[letter], names)
        except NameError as error:
            return {"stopped at": letter, "missing": error.name}
    return {f"d{weight}": names[f"d{weight}"] for weight in _NAMES if f"d{weight}" in names}


def _autograd_gradients() -> list[dict[str, Any]]:
    results = []
    for sizes in _SIZES:
        net = _tanh_net(*sizes)
        weights = [net[name].requires_grad_() for name in _NAMES]
        hidden = F.linear(net["x"], net["W1"], net["b1"]).tanh()
        loss = F.mse_loss(F.linear(hidden, net["W2"], net["b2"]), net["target"])
        gradients = torch.autograd.grad(loss, weights)
        results.append({f"d{name}": gradient for name, gradient in zip(_NAMES, gradients, strict=True)})
    return results


def _about_order(result: list[dict[str, Any]], truth: list[dict[str, Any]]) -> str | None:
    first = result[0]
    if "stopped at" in first:
        return f"Line {first['stopped at']} needs `{first['missing']}`, which no line before it makes."
    absent = [name for name in truth[0] if name not in first]
    if absent:
        return f"No line makes {' and '.join(f'`{name}`' for name in absent)} yet."
    wrong = [name for name in truth[0] if not same(first[name], truth[0][name])]
    return f"`{wrong[0]}` is not PyTorch's: which line makes it, and from which saved tensors?"


_order = Exercise(
    number="2.1",
    kind="order",
    task="Order the lines of the backward pass; two of the nine are wrong and stay out.",
    difficulty=2,
    minutes=5,
    objective=DERIVE,
    run=_in_order,
    truth=_autograd_gradients,
    mistakes=(
        Mistake("e f d c b a i", "The derivative of tanh(z) is 1 - tanh(z)**2: which saved tensor is tanh(z)?"),
        Mistake("e h d c g a i", "A weight's gradient is made with what its layer was given: what was layer 2 given?"),
        Mistake("e h d c b a i", "z and h are mixed up: which of them did tanh return, and which was layer 2 given?"),
        Mistake("a i g c d f e", "Backward begins at the loss: which line needs nothing but what is saved?"),
    ),
    diagnose=_about_order,
)

# -- 2.2: distinct storages --------------------------------------------------------------------------------------------


def _lists_of_tensors() -> list[list[Tensor]]:
    table = torch.zeros(6, 8)
    third, large, row = torch.zeros(2, 12), torch.zeros(100, 5, dtype=torch.float64), torch.zeros(4)
    return [
        [table, table.T, table.clone(), torch.zeros(10, dtype=torch.int64)],
        [*third.chunk(3, dim=1), torch.zeros(8, dtype=torch.bool), torch.zeros(1, dtype=torch.int64)],
        [large[-1], large[3:9], row.expand(1000, 4)],
    ]


def _summed(answer: Callable[[Tensor], Any]) -> list[Any] | None:
    """The sums of what the answer takes for storages; "no pair" where it does not give a name and a size."""
    sums: list[Any] = []
    for tensors in _lists_of_tensors():
        found = [answer(tensor) for tensor in tensors]
        if all(pair is None for pair in found):
            return None
        if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in found):
            return ["no pair"]
        sums.append(sum(nbytes for _, nbytes in dict(found).items()))
    return sums


def _by_construction() -> list[int]:
    return [6 * 8 * 4 + 6 * 8 * 4 + 10 * 8, 2 * 12 * 4 + 8 + 8, 100 * 5 * 8 + 4 * 4]


def _about_distinct(result: list[Any], truth: list[int]) -> str | None:
    if result == ["no pair"]:
        return "Return two things, as the cell did: the storage's name and its bytes."
    if scaled := _scaled(result, truth):
        return scaled
    if min(result) > MiB:
        return "No list holds as much: is the name the first of the two, and the bytes the second?"
    if all(got <= right for got, right in zip(result, truth, strict=True)):
        return "Too small: has each storage a name of its own, and the size of all that it holds?"
    return "Too large: have two views of one storage the same name, and is the size that of the storage?"


_distinct = Exercise(
    number="2.2",
    kind="fill",
    task="Fill the two lines, so that each storage counts once, at its full size.",
    difficulty=1,
    minutes=3,
    objective=COUNT,
    run=_summed,
    truth=_by_construction,
    mistakes=(
        Mistake(
            lambda t: (id(t), t.nbytes),
            "Each tensor counts, views too: is there something that two views of one storage share?",
        ),
        Mistake(
            lambda t: (id(t), t.untyped_storage().nbytes()),
            "The storage counts once for each view: is there something that two views of one storage share?",
        ),
        Mistake(
            lambda t: (t.data_ptr(), t.untyped_storage().nbytes()),
            "A view may begin inside its storage: a tensor's `data_ptr()` is where the view begins.",
        ),
        Mistake(
            lambda t: (t.data_ptr(), t.nbytes),
            "Both are the view's: where it begins inside its storage, and how much of it it shows.",
        ),
        Mistake(
            lambda t: (t.untyped_storage().data_ptr(), t.nbytes),
            "The names are right. The bytes are a view's: it may be smaller than its storage, or larger (`expand`).",
        ),
        Mistake(lambda t: (t.untyped_storage().data_ptr(), t.numel()), "You counted elements, not bytes."),
        Mistake(
            lambda t: (t.untyped_storage().data_ptr(), t.untyped_storage().size() // t.element_size()),
            "You counted the storage's elements, not its bytes.",
        ),
        Mistake(
            lambda t: (t.shape, t.untyped_storage().nbytes()),
            "Two tensors of one shape may be two storages: what names a storage?",
        ),
        Mistake(
            lambda t: (t.untyped_storage().nbytes(), t.untyped_storage().nbytes()),
            "Two storages may have the same size: what names a storage?",
        ),
    ),
    diagnose=_about_distinct,
)

# -- 2.3: the ledger ---------------------------------------------------------------------------------------------------

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class _Case:
    name: str
    model: nn.Module
    batch: Batch

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(model(inputs), labels)


class _LastToken(nn.Module):
    """Attention written out, of whose tokens the head reads the last."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 16)
        self.qkv = nn.Linear(16, 48)
        self.softmax = nn.Softmax(-1)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = self.qkv(self.tokens(tokens)).chunk(3, dim=-1)
        mixed = self.softmax(q @ k.transpose(1, 2)) @ v
        scores: Tensor = self.head(self.norm(mixed)[:, -1])
        return scores


def _cases() -> list[_Case]:
    """Nets that the learner has not seen; small, and made anew, as an answer may change them."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(2)
        mlp = nn.Sequential(
            nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 4)
        )
        cnn = nn.Sequential(
            nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(54, 3)
        )
        return [
            _Case("the MLP", mlp, (torch.randn(32, 24), torch.arange(32) % 4)),
            _Case("the net with BatchNorm", cnn, (torch.randn(7, 2, 8, 8), torch.arange(7) % 3)),
            _Case("the net with attention", _LastToken(), (torch.arange(27).view(3, 9) % 20, torch.arange(3))),
        ]


def _ledgers(answer: Callable[..., Any]) -> list[tuple[Any, int]] | None:
    """For each case what the answer gives, and how many bytes are alive because of it when it is done."""
    results = []
    for case in _cases():
        born: list[Callable[[], Any]] = []

        def note(module: nn.Module, inputs: Any, output: Tensor, born: list[Callable[[], Any]] = born) -> None:
            born.append(weakref.ref(output.untyped_storage()))

        handles = [m.register_forward_hook(note) for m in case.model.modules() if not list(m.children())]
        try:
            total = answer(case.loss, case.model, case.batch)
        finally:
            for handle in handles:
                handle.remove()
        if total is None or total is ...:
            return None
        results.append((_number(total), _alive(born)))
    return results


def _alive(born: list[Callable[[], Any]]) -> int:
    """Bytes of the storages that are still there after cycles of Python objects have been collected."""
    if any(reference() is not None for reference in born):
        gc.collect()
    alive = {storage.data_ptr(): storage.nbytes() for reference in born if (storage := reference()) is not None}
    return sum(alive.values())


def _recorded() -> list[tuple[int, int]]:
    """Read from the graph by memlab, without hooks."""
    results = []
    for case in _cases():
        with record(case.model, batch=case.batch) as trace:
            case.loss(case.model, case.batch).backward()
        results.append((trace.saved_bytes, 0))
    return results


# What people get wrong, apart or together, and what to say to it. `_total` computes a ledger with slips.
_ONCE_PER_VIEW = "You counted a storage once per view: compare `untyped_storage().data_ptr()`."
_WEIGHTS = "The weights are in your sum: a linear layer saves a view of its weight."
_SMALL_VIEW = "A small view keeps its whole storage in memory: count the storage's bytes."
_SLIPS = {
    "views": _ONCE_PER_VIEW,
    "whole storages": _ONCE_PER_VIEW,
    "weights": _WEIGHTS,
    "weights by identity": _WEIGHTS,
    "elements": "You counted elements, not bytes.",
    "batch": "The batch is in your sum: it is there anyway, and a layer saves its input.",
    "buffers": "The buffers are in your sum: BatchNorm saves its running statistics.",
    "addresses": "A view may begin inside its storage, at another address: compare `untyped_storage().data_ptr()`.",
    "last view": _SMALL_VIEW,
    "first view": _SMALL_VIEW,
    "four bytes": "Not every element has four bytes: positions and masks are saved too. Ask `element_size()`.",
    "no gradient": "You left out what takes no gradient itself, such as a mask, positions, BatchNorm's mean.",
    "shapes": "You left out activations that happen to have a weight's shape: compare storages.",
}


@dataclass(frozen=True)
class _Seen:
    """One call of a pack hook."""

    tensor: Tensor
    takes_gradient: bool
    is_leaf: bool


def _seen(loss_fn: Callable[..., Tensor], model: nn.Module, batch: Batch) -> list[_Seen]:
    seen: list[_Seen] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(_Seen(tensor.detach(), tensor.requires_grad, tensor.is_leaf))
        return seen[-1].tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_fn(model, batch)
    return seen


def _total(seen: list[_Seen], model: nn.Module, batch: Batch, slips: tuple[str, ...]) -> int:
    owned: dict[str, list[Tensor]] = {
        "weights": [] if "weights by identity" in slips else list(model.parameters()),
        "buffers": list(model.buffers()),
        "batch": list(batch),
    }
    there_anyway = {_address(t) for slip, tensors in owned.items() if slip not in slips for t in tensors}
    sizes: dict[int, int] = {}
    for number, entry in enumerate(seen):
        tensor = entry.tensor
        if _address(tensor) in there_anyway or ("no gradient" in slips and not entry.takes_gradient):
            continue
        if "weights by identity" in slips and entry.takes_gradient and entry.is_leaf:
            continue
        if "shapes" in slips and tensor.shape in {parameter.shape for parameter in model.parameters()}:
            continue
        each_view = "views" in slips or "whole storages" in slips
        key = number if each_view else tensor.data_ptr() if "addresses" in slips else _address(tensor)
        if key in sizes and "first view" in slips:
            continue
        of_view = {"views", "first view", "last view"}.intersection(slips)
        elements = tensor.numel() if of_view else tensor.untyped_storage().nbytes() // tensor.element_size()
        each = 1 if "elements" in slips else 4 if "four bytes" in slips else tensor.element_size()
        sizes[key] = elements * each
    return sum(sizes.values())


def _with_slips(*slips: str) -> Callable[..., int]:
    def ledger(loss_fn: Callable[..., Tensor], model: nn.Module, batch: Batch) -> int:
        return _total(_seen(loss_fn, model, batch), model, batch, slips)

    return ledger


def _of_the_model_alone(loss_fn: Callable[..., Tensor], model: nn.Module, batch: Batch) -> int:
    return _with_slips()(lambda model, batch: model(batch[0]), model, batch)


def _less_all_parameters(loss_fn: Callable[..., Tensor], model: nn.Module, batch: Batch) -> int:
    whole = _with_slips("weights")(loss_fn, model, batch)
    return whole - sum(parameter.nbytes for parameter in model.parameters())


def _outputs_of_modules(loss_fn: Callable[..., Tensor], model: nn.Module, batch: Batch) -> int:
    sizes: list[int] = []
    handles = [
        module.register_forward_hook(lambda module, inputs, output: sizes.append(output.nbytes))
        for module in model.modules()
        if not list(module.children())
    ]
    loss_fn(model, batch)
    for handle in handles:
        handle.remove()
    return sum(sizes)


_OTHERS = (
    (_of_the_model_alone, "The loss keeps something too: run `loss_fn(model, batch)` inside your hooks."),
    (_less_all_parameters, "You took off all parameters: not every one was saved. Leave out those that were."),
    (_outputs_of_modules, "That is the sum of what modules return: ask the pack hook what is saved."),
)


def _about_ledger(result: list[tuple[Any, int]], truth: list[tuple[int, int]]) -> str | None:
    totals, right = [total for total, _ in result], [total for total, _ in truth]
    if same(totals, right):
        alive = format_bytes(max(nbytes for _, nbytes in result))
        return f"Your hook kept the tensors alive: afterwards {alive} more are allocated."
    if scaled := _scaled(totals, right):
        return scaled
    slips = _slips_that_give(totals)
    if slips:
        return _SLIPS[slips[0]] + (" That is not all yet." if slips[1:] else "")
    for answer, hint in _OTHERS:
        if same(totals, [answer(case.loss, case.model, case.batch) for case in _cases()]):
            return hint
    if not any(totals):
        return "Nothing was counted: does the forward pass run inside the `with` of your hooks?"
    wrong = [number for number, total in enumerate(totals) if not same(total, right[number])]
    size = "large" if totals[wrong[0]] > right[wrong[0]] else "small"
    name = _cases()[wrong[0]].name
    if wrong[0] == 1 and size == "large":
        return f"Right for {_cases()[0].name}, then too large: what is left over from the call before?"
    freed = " What it does not return is not kept, and its address is used again." if size == "small" else ""
    return f"Too {size} for {name}: print shape and storage of what your pack hook is given there.{freed}"


def _slips_that_give(totals: list[Any]) -> tuple[str, ...]:
    """The fewest slips that together give these totals; none where none do."""
    seen = [(_seen(case.loss, case.model, case.batch), case.model, case.batch) for case in _cases()]
    for count in range(1, 6):
        for slips in itertools.combinations(_SLIPS, count):
            if all(_total(*one, slips) == total for one, total in zip(seen, totals, strict=True)):
                return slips
    return ()


_ledger = Exercise(
    number="2.3",
    kind="write",
    task="Return the bytes that `loss_fn(model, batch)` leaves stored for backward: each storage once and at its full "
    "size, no parameters, no buffers, no batch.",
    difficulty=2,
    minutes=8,
    objective=HOOKS,
    run=_ledgers,
    truth=_recorded,
    mistakes=(
        *(Mistake(_with_slips(slip), hint) for hint, slip in {hint: slip for slip, hint in _SLIPS.items()}.items()),
        *(Mistake(answer, hint) for answer, hint in _OTHERS),
    ),
    diagnose=_about_ledger,
)

# -- 2.4: what a leaky ReLU must keep ----------------------------------------------------------------------------------

_SLOPE = 0.1


def _inputs() -> list[Tensor]:
    draw = torch.Generator().manual_seed(4)
    return [torch.randn(3, 8, generator=draw), torch.randn(5, generator=draw, dtype=torch.float64)]


def _bytes_kept(kept: Any) -> int:
    if isinstance(kept, dict):
        kept = list(kept.values())
    tensors = [kept] if isinstance(kept, Tensor) else [t for t in kept if isinstance(t, Tensor)] if kept else []
    return sum({_address(t): t.untyped_storage().nbytes() for t in tensors}.values())


def _leaky(answer: Any) -> list[dict[str, Any]] | None:
    """For each input the result, the gradient, and the bytes kept: a byte an element, or all that is above it."""
    results = []
    for x in _inputs():
        given = x.clone()
        y, kept = answer.forward(given)
        if kept is ...:
            return None
        dy = torch.linspace(1, 2, x.numel(), dtype=x.dtype).view_as(x)
        dx = answer.backward(dy, kept)
        if dx is None or dx is ...:
            return None
        results.append({"y": y, "dx": dx, "kept": max(_bytes_kept(kept), x.numel())})
    return results


def _leaky_by_autograd() -> list[dict[str, Any]]:
    results = []
    for x in _inputs():
        y = F.leaky_relu(x.requires_grad_(), _SLOPE)
        dy = torch.linspace(1, 2, x.numel(), dtype=x.dtype).view_as(x)
        (dx,) = torch.autograd.grad(y, x, dy)
        results.append({"y": y.detach(), "dx": dx, "kept": x.numel() * torch.bool.itemsize})
    return results


@dataclass(frozen=True)
class _Leaky:
    """A wrong answer, of what it keeps and what it makes of it."""

    keep: Callable[[Tensor, Tensor], Any]
    backward: Callable[[Tensor, Any], Tensor]

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        y = torch.where(x > 0, x, _SLOPE * x)
        return y, self.keep(x, y)


def _by_sign(dy: Tensor, kept: Tensor) -> Tensor:
    return torch.where(kept > 0, dy, _SLOPE * dy)


def _about_leaky(result: list[dict[str, Any]], truth: list[dict[str, Any]]) -> str | None:
    if not all(same(mine["y"], right["y"]) for mine, right in zip(result, truth, strict=True)):
        return "The result `y` has changed: only what is kept is to be chosen."
    for mine, right in zip(result, truth, strict=True):
        if not isinstance(mine["dx"], Tensor) or mine["dx"].shape != right["dx"].shape:
            return "The gradient must have the input's shape."
        if not same(mine["dx"].to(right["dx"].dtype), right["dx"]):
            return "The gradient is not PyTorch's: dx is dy times the slope, 1 or 0.1, of each element."
    if not all(same(mine["dx"], right["dx"]) for mine, right in zip(result, truth, strict=True)):
        return "The gradient is right, but for its type: it must have that of `dy`."
    each = result[0]["kept"] / truth[0]["kept"]
    return f"The gradient is right, and {each:.3g} bytes an element are kept: how many values can the slope have?"


_keep = Exercise(
    number="2.4",
    kind="fill",
    task="A leaky ReLU that keeps a quarter of the bytes that PyTorch's keeps: fill what it keeps, and its backward.",
    difficulty=2,
    minutes=5,
    objective=DERIVE,
    run=_leaky,
    truth=_leaky_by_autograd,
    mistakes=(
        Mistake(_Leaky(lambda x, y: x, _by_sign), "The gradient is right, and kept is what PyTorch keeps: the input. "
                "Which question does backward ask of it?"),
        Mistake(_Leaky(lambda x, y: (x, y), lambda dy, kept: _by_sign(dy, kept[0])), "The gradient is right, and two "
                "tensors are kept for it: which question does backward ask of each element?"),
        Mistake(_Leaky(lambda x, y: (x > 0).float(), _by_sign), "The gradient is right, and what is kept has two "
                "values: float32 takes four bytes for each. Which type takes one?"),
        Mistake(_Leaky(lambda x, y: x > 0, lambda dy, kept: dy * kept), "That is the gradient of a ReLU: what is the "
                "slope on the left side?"),
        Mistake(_Leaky(lambda x, y: x > 0, lambda dy, kept: torch.where(kept, 1, _SLOPE).to(dy.dtype)), "That is the "
                "derivative. Backward returns the vector-Jacobian product: where is `dy`?"),
        Mistake(_Leaky(lambda x, y: x <= 0, _by_sign), "The slopes are exchanged: on which side is it 1?"),
        Mistake(_Leaky(lambda x, y: x > 0, lambda dy, kept: _SLOPE * dy), "The slope is 0.1 on one side only."),
    ),
    diagnose=_about_leaky,
)  # fmt: skip

# -- shared ------------------------------------------------------------------------------------------------------------


def _number(value: Any) -> Any:
    """A number that came as a tensor, as a number."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _scaled(result: list[Any], truth: list[int]) -> str | None:
    """What to say to the right bytes in another unit."""
    for unit, scale in (("MiB", MiB), ("KiB", KiB), ("10**6 bytes", 10**6), ("bits", 1 / 8)):
        if all(isinstance(number, int | float) for number in result) and same(
            [float(number * scale) for number in result], [float(number) for number in truth]
        ):
            return f"The number is right in {unit}: give bytes."
    return None


EXERCISES = (_order, _distinct, _ledger, _keep)

# -- the quiz ----------------------------------------------------------------------------------------------------------

QUIZ = (
    Question(
        "A network ends in `F.cross_entropy(logits, targets)` with 8,192 tokens, a vocabulary of 32,768 and fp32: one "
        "tensor of logits takes 1 GiB. What does the loss keep of that size?",
        (
            Option("nothing: its gradient needs the targets only", "The gradient of the logits is softmax - target, "
                   "and softmax is not known from the targets."),
            Option("1 GiB: the log-probabilities", "softmax is exp of them, and the picking of the target's "
                   "log-probability saves the same storage.", right=True),
            Option("2 GiB: the logits and the log-probabilities", "log_softmax writes its derivative in terms of its "
                   "output: the logits can go."),
            Option("2 GiB: the log-probabilities, saved by two operators", "Two operators save them, on one storage."),
        ),
    ),
    Question(
        "In the net of this lesson, linear, GELU, linear, the first layer's weight and bias are frozen "
        "(`requires_grad=False`). Which of the large tensors is no longer kept?",
        (
            Option("none: all operators still run", "What is kept depends on who needs a gradient, not on what runs."),
            Option("z, which GELU was given", "Nothing before h needs a gradient, so that GELU has no "
                   "vector-Jacobian product to make.", right=True),
            Option("h, which the second layer was given", "The gradient of W2 is made with h, and W2 is trained."),
            Option("both", "The gradient of W2 is still made with h."),
        ),
    ),
    Question(
        "A pack hook returns `(t.detach(), t._version)` rather than `t`. What is the version for?",
        (
            Option("to tell views of one storage apart", "Views share their storage's version; the storage's address "
                   "tells what is one storage."),
            Option("to keep the tensor alive until backward", "The detached tensor does that."),
            Option("to notice that the tensor was changed in place before backward", "Under hooks autograd does not "
                   "look for it: unpack must.", right=True),
        ),
    ),
)  # fmt: skip
