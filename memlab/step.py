"""What is trained: one training step, its parts, its micro-batches and its copy in another precision.

    step = TrainingStep(model, (inputs, target), nn.CrossEntropyLoss(), torch.optim.AdamW)
    step.loss().backward()

A `TrainingStep` runs nothing by itself: strategies run it, `loss` is the only thing they call.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from . import nest
from .clock import clean_name, unwrapped
from .copies import Recast, copied
from .errors import MemlabError
from .nest import kind
from .state import State, snapshot
from .walk import walk

Loss: TypeAlias = Callable[[Any, Any], Any]
Optimizer: TypeAlias = torch.optim.Optimizer

_PARTS = ("model", "batch", "device", "optimizer")
_MODELS = {"model", "net", "network", "module", "m"}
_OUTPUTS = {"input", "output", "outputs", "out", "pred", "preds", "prediction", "predictions", "logits", "scores"}
_OUTPUTS |= {"y_pred", "y_hat", "yhat"}
_TARGETS = {"target", "targets", "label", "labels", "truth", "ground_truth", "gt", "y", "y_true"}


@dataclass(frozen=True)
class MicroBatchPart:
    """One micro-batch: `share` times its loss is its part of the full batch's loss; `size` counts samples."""

    batch: Any
    share: float
    size: int | None


class TrainingStep:
    """One step of training: forward, backward, `optimizer.step()`, gradients set to None.

    Parameters
    - model: a module, or a callable without arguments that builds one. It is called when the model is first needed, and
      by `simulate` on tensors without data, so that a model too large for this machine is never built.
    - batch: any nest of tensors (see `memlab.nest`), or a callable that makes one.
    - loss_fn: `loss_fn(model, batch)` returns a scalar tensor. Two habits are met half-way. A *criterion*, called as
      `criterion(output, target)`, goes with a batch `(inputs, target)`. None is for models whose output has `.loss`.
      In both, a mapping is passed as `model(**inputs)`, a plain tuple as `model(*inputs)`, anything else as it is.
      A criterion is: an `nn.Module`; a function of PyTorch's own; a function whose first argument is named like an
      output (`input`, `output`, `pred`, `logits`, ...) or whose second like a target (`target`, `labels`, `y`, ...).
      Where the first argument is named like a model (`model`, `net`, `m`, ...) it is no criterion in any case.
    - optimizer: an optimizer over the model's parameters, a callable `params -> optimizer`, or None.
    - weight: `weight(batch)` is how many loss terms a batch holds (default: its samples), so that micro-batches of a
      mean loss add up to the full batch's gradient; e.g. its unmasked tokens.
    - split: `split(batch, n)` returns the n micro-batches, where the default cannot.
    - reduction: "mean", or "sum" for a loss that is a sum: micro-batches then simply add.

    A model with lazy parameters is run once (forward only), so that all strategies share one initialisation;
    everything else that this changes is put back. Raises MemlabError for what cannot be trained so.
    """

    model: nn.Module
    batch: Any
    device: torch.device
    optimizer: Optimizer | None

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        batch: Any,
        loss_fn: Loss | None = None,
        optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
        *,
        weight: Callable[[Any], Any] | None = None,
        split: Callable[[Any, int], Any] | None = None,
        reduction: Literal["mean", "sum"] = "mean",
    ) -> None:
        if reduction not in ("mean", "sum"):
            raise MemlabError(f"reduction is {reduction!r}: give 'mean' or 'sum'")
        if loss_fn is not None and not callable(loss_fn):
            raise MemlabError(f"loss_fn is {kind(loss_fn)}: give a function of (model, batch), a criterion, or None")
        if not callable(model):  # a module is
            raise MemlabError(f"model is {kind(model)}: give an nn.Module, or a function that builds one")
        self.loss_fn = loss_fn
        self.weight, self.split, self.reduction = weight, split, reduction
        self._loss = _as_function(loss_fn)
        self._given = model, batch, optimizer
        if isinstance(model, nn.Module):
            self._build()

    def __getattr__(self, name: str) -> Any:
        if name not in _PARTS:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        self._build()
        return vars(self)[name]

    @property
    def is_built(self) -> bool:
        """Whether the model exists: one given as a callable is built when it is first needed."""
        return "model" in vars(self)

    def _build(self) -> None:
        model, batch, optimizer = self._given
        model = model if isinstance(model, nn.Module) else _built(model)
        batch = batch() if callable(batch) and not isinstance(batch, Mapping) else batch
        device = _device(model, batch)
        self.model, self.batch, self.device, self.optimizer = model, batch, device, None
        try:
            for name, parameter in self.named_parameters():
                if not is_lazy(parameter) and parameter.is_inference():
                    raise MemlabError(
                        f"parameter {name} was made under torch.inference_mode(): build the model outside it"
                    )
            _materialise(self)
            self.optimizer = _optimizer(optimizer, model)
        except BaseException:
            del self.model, self.batch, self.device, self.optimizer  # the next use tries again
            raise

    def __repr__(self) -> str:
        if not self.is_built:
            return f"TrainingStep(a model that {getattr(self._given[0], '__name__', 'a callable')} builds)"
        count = sum(0 if is_lazy(p) else p.numel() for _, p in self.named_parameters())
        optimizer = "no optimizer" if self.optimizer is None else type(self.optimizer).__name__
        name = type(unwrapped(self.model)).__name__
        return f"TrainingStep({name} of {count:,} parameters on {self.device}, {optimizer})"

    # ---------------------------------------------------------------------------------------------------------- loss

    def loss(self, batch: Any = None) -> torch.Tensor:
        """The loss of `batch` (default: the whole batch), a tensor of one element that requires grad.

        The user's own exceptions pass unchanged; a loss that cannot be trained on raises MemlabError.
        """
        batch = self.batch if batch is None else batch
        self.check(batch)
        loss = self._loss(self.model, batch)
        if not isinstance(loss, torch.Tensor):
            remedy = "is a `return` missing?" if loss is None else "return the loss itself, not its .item()"
            raise MemlabError(f"loss_fn returned {kind(loss)}, not a tensor: {remedy}")
        if loss.numel() != 1:
            shape = tuple(loss.shape)
            raise MemlabError(f"the loss has shape {shape}, it is not a scalar: call .mean() or .sum() on it")
        if loss.is_complex():
            raise MemlabError("the loss is complex, and only a real number can be minimised: take its .abs() or .real")
        if not loss.requires_grad:
            raise MemlabError(f"the loss does not require grad: {self._why_no_grad()}")
        return loss

    def check(self, batch: Any = None) -> None:
        """Raise MemlabError where nothing can be trained: in inference mode, or on tensors made in it."""
        if torch.is_inference_mode_enabled():
            raise MemlabError("torch.inference_mode() is on, and nothing can be trained under it: leave that block")
        if any(tensor.is_inference() for tensor in nest.tensors(self.batch if batch is None else batch)):
            raise MemlabError(
                "the batch holds inference tensors (made under torch.inference_mode()), which autograd cannot save: "
                "clone() them outside inference_mode, or make them under torch.no_grad()"
            )

        if batch is None and any(tensor.grad_fn is not None for tensor in nest.tensors(self.batch)):
            raise MemlabError(
                "a tensor of the batch is the result of a computation that autograd recorded, and each run would go "
                "back through that graph, which the first one frees: detach() it, or compute it in loss_fn"
            )

    def _why_no_grad(self) -> str:
        if not torch.is_grad_enabled():
            return "gradients are switched off here (torch.no_grad or set_grad_enabled(False)); leave that block"
        if not any(p.requires_grad for p in self.model.parameters()):
            return "no parameter of the model does; call requires_grad_() on those to train"
        return (
            "something between the model's output and the loss cuts the graph (.detach(), .item(), torch.no_grad, or a "
            "reentrant checkpoint whose inputs need no gradient: pass use_reentrant=False)"
        )

    # --------------------------------------------------------------------------------------------------------- parts

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Each distinct parameter once, under its first name, without what wrappers add to names."""
        return [(clean_name(name), parameter) for name, parameter in unwrapped(self.model).named_parameters()]

    @property
    def roots(self) -> dict[str, nn.Module]:
        """The model under "", and what modules it or `loss_fn` holds unregistered (a teacher in a list, a criterion),
        each under its class's name and a dot: a prefix for names."""
        found, known = {"": unwrapped(self.model)}, {id(module) for module in self.model.modules()}
        for module in walk(self.model, self.loss_fn):
            if isinstance(module, nn.Module) and id(module) not in known:
                known |= {id(inner) for inner in module.modules()}
                kinds = sum(type(root) is type(module) for root in found.values())
                found[f"{type(unwrapped(module)).__name__}{kinds or ''}."] = unwrapped(module)
        return found

    @property
    def module_names(self) -> dict[int, str]:
        """`id(module)` to its name: the first alias, the root's is its class name, wrappers named as what they wrap."""
        root = unwrapped(self.model)
        names = {id(self.model): type(root).__name__}
        for name, module in root.named_modules():
            names[id(module)] = clean_name(name) if name else type(root).__name__
        return names

    @property
    def batch_size(self) -> int:
        """The first dimension that most of the batch's tensors share; MemlabError where there is no such."""
        return nest.batch_size(self.batch)

    def snapshot(self) -> State:
        """Everything that running this step can change, to be put back by `.restore()`."""
        return snapshot(self.model, self.batch, self.loss_fn, self.optimizer, self.weight, self.split)

    # ------------------------------------------------------------------------------------------------- micro-batches

    def micro_batches(self, count: int | None = None, size: int | None = None) -> list[MicroBatchPart]:
        """The batch in `count` micro-batches of near-equal size (10 in 4: 3, 3, 2, 2), or of `size` samples each and
        a rest (10 by 4: 4, 4, 2; a size above the batch's is one micro-batch).

        A micro-batch without loss terms (`weight` 0) has share 0: its loss may be NaN and is not part of the sum.
        """
        sizes = self.micro_batch_sizes(count, size)
        if self.split is None:
            batches = nest.split(self.batch, sizes)
            return self._shared(batches, list(sizes))
        batches = list(self.split(self.batch, len(sizes)))
        if len(batches) != len(sizes):
            raise MemlabError(f"split(batch, {len(sizes)}) returned {len(batches)} micro-batches: return {len(sizes)}")
        return self._shared(batches, [_size_or_none(batch) for batch in batches])

    def micro_batch_sizes(self, count: int | None = None, size: int | None = None) -> list[int]:
        """The samples in each micro-batch of the default split (0 where only the user's `split` knows)."""
        if (count is None) == (size is None):
            raise MemlabError(f"give either count or size of the micro-batches, not {count=} and {size=}")
        name, wanted = ("count", count) if size is None else ("size", size)
        if not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 1:
            raise MemlabError(f"{name} of the micro-batches is {wanted!r}: give a whole number from 1")
        if count is not None and self.split is not None and _size_or_none(self.batch) is None:
            return [0] * count
        whole = self.batch_size
        if not whole:
            raise MemlabError("the batch holds no samples: give one that does")
        if count is None:
            return [min(wanted, whole - start) for start in range(0, whole, wanted)]
        if count > whole:
            raise MemlabError(f"{count} micro-batches asked, but the batch holds {whole} sample(s): give 1 to {whole}")
        return nest.near_equal(whole, count)

    def _shared(self, batches: list[Any], sizes: list[int | None]) -> list[MicroBatchPart]:
        shares = [1.0] * len(batches) if self.reduction == "sum" else self._shares(batches, sizes)
        return [MicroBatchPart(*part) for part in zip(batches, shares, sizes, strict=True)]

    def _shares(self, batches: list[Any], sizes: list[int | None]) -> list[float]:
        weights = []
        for number, (batch, size) in enumerate(zip(batches, sizes, strict=True), start=1):
            weight = size if self.weight is None else self.weight(batch)
            if weight is None:
                raise MemlabError(f"micro-batch {number} has no batch size to be weighted by: pass `weight=`")
            try:
                value = float(weight)
            except (TypeError, ValueError, RuntimeError):
                raise MemlabError(f"weight of micro-batch {number} is {weight!r}: return one number") from None
            if not math.isfinite(value) or value < 0:
                raise MemlabError(f"weight of micro-batch {number} is {value}: return a number from 0 up")
            weights.append(value)
        total = math.fsum(weights)
        if total == 0:
            raise MemlabError(f"the {len(batches)} micro-batches weigh nothing in all: `weight` returned 0 for each")
        return [weight / total for weight in weights]

    # ---------------------------------------------------------------------------------------------------------- copy

    def copy(self, twins: Recast) -> TrainingStep:
        """The same step on copies, whose tensors are the originals' twins (`copies.py`), tied as those are; wrappers
        (compilation, data-parallel) are left off.

        Tensors, modules and containers that `loss_fn` holds in its closure or names as globals are copied too, so that
        a teacher network or class weights follow. Raises MemlabError where something cannot be copied.
        """
        try:
            model, batch, loss_fn, optimizer = copied(self.model, self.batch, self.loss_fn, self.optimizer, twins=twins)
        except MemlabError:
            raise
        except Exception as error:
            raise MemlabError(f"the step cannot be copied: {type(error).__name__}: {error}") from error
        return self._like(model, lambda: batch, loss_fn, optimizer)

    def rebuilt(self) -> TrainingStep:
        """The same step anew from what it was given: callables are called again."""
        model, batch, optimizer = self._given
        return self._like(model, batch, self.loss_fn, optimizer)

    def _like(self, model: Any, batch: Any, loss_fn: Any, optimizer: Any) -> TrainingStep:
        return TrainingStep(
            model, batch, loss_fn, optimizer, weight=self.weight, split=self.split, reduction=self.reduction
        )


# ------------------------------------------------------------------------------------------------ reading the arguments


def _built(build: Any) -> nn.Module:
    model = build()
    if not isinstance(model, nn.Module):
        raise MemlabError(f"model() returned {kind(model)}: the function must build an nn.Module")
    return model


def _device(model: nn.Module, batch: Any) -> torch.device:
    """Where the model lives; a model without parameters lives with its batch."""
    homes: dict[torch.device, str] = {}
    for name, parameter in unwrapped(model).named_parameters():
        homes.setdefault(parameter.device, clean_name(name))
    if len(homes) > 1:
        (one, here), (two, there), *_ = homes.items()
        raise MemlabError(
            f"the model is on two devices, {here} on {one} and {there} on {two}: "
            f"move it to one, e.g. model.to({str(one)!r})"
        )
    first = next(iter(homes), None) or next((tensor.device for tensor in nest.tensors(batch)), None)
    return first or torch.device("cpu")


def _optimizer(optimizer: Any, model: nn.Module) -> Optimizer | None:
    if optimizer is None:
        return None
    if not isinstance(optimizer, Optimizer):
        if not callable(optimizer):
            raise MemlabError(f"optimizer is {kind(optimizer)}: give an optimizer, or a function of the parameters")
        optimizer = optimizer(list(model.parameters()))
        if not isinstance(optimizer, Optimizer):
            raise MemlabError(f"optimizer(params) returned {kind(optimizer)}: it must return a torch.optim.Optimizer")
    name = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise MemlabError(f"{name}.step needs a closure, which memlab's step does not give: pass optimizer=None")
    mine = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in mine for group in optimizer.param_groups for parameter in group["params"]):
        raise MemlabError(
            f"the {name} holds none of the model's parameters: give an optimizer over this model, "
            f"or a function, e.g. lambda params: torch.optim.{name}(params)"
        )
    return optimizer


def _as_function(loss_fn: Loss | None) -> Loss:
    """The loss as a function of (model, batch)."""
    if loss_fn is None:
        return _loss_of_output
    if not _is_criterion(loss_fn):
        return loss_fn

    def criterion_loss(model: Any, batch: Any) -> Any:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
            what = f"{kind(batch)} of {len(batch)}" if isinstance(batch, tuple | list | Mapping) else kind(batch)
            raise MemlabError(
                f"{name} is a criterion and needs a batch (inputs, target), but the batch is {what}: "
                "give such a pair, or loss_fn=lambda model, batch: ..."
            )
        inputs, target = batch
        return loss_fn(_called(model, inputs), target)

    return criterion_loss


def _is_criterion(loss_fn: Loss) -> bool:
    """The rule in `TrainingStep`'s docstring."""
    module = isinstance(loss_fn, nn.Module)
    inner: Any = loss_fn
    while isinstance(inner, functools.partial):
        inner = inner.func
    if not module and (inner.__module__ or "").partition(".")[0] == "torch":
        return True
    try:
        parameters = inspect.signature(loss_fn.forward if module else loss_fn).parameters  # type: ignore[attr-defined]
    except (ValueError, TypeError):
        return True  # a builtin: the user's own functions have signatures
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    first, second, *_ = [*(name for name, p in parameters.items() if p.kind in kinds), "", ""]
    if first in _MODELS:
        return False
    return module or (second != "" and (first in _OUTPUTS or second in _TARGETS))


def _loss_of_output(model: Any, batch: Any) -> Any:
    output = _called(model, batch)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None:
        raise MemlabError(
            f"the model's output, {kind(output)}, has no loss: put the labels into the batch if the model computes "
            "its loss from them, or pass loss_fn=lambda model, batch: ..."
        )
    return loss


def _called(model: Any, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if type(inputs) is tuple else model(inputs)


def _materialise(step: TrainingStep) -> None:
    """Give lazy parameters their shape and first values by one forward pass that leaves nothing else behind."""
    lazy = [
        module
        for module in step.model.modules()
        if any(is_lazy(t) for t in (*module._parameters.values(), *module._buffers.values()) if t is not None)
    ]
    if not lazy:
        return
    streams, before = snapshot(), snapshot(step.model, step.batch, step.loss_fn)
    born: list[State] = []
    # A hook after the lazy module's own, which made its parameters, and before its forward, which changes buffers.
    handles = [m.register_forward_pre_hook(lambda module, inputs: born.append(snapshot(module))) for m in lazy]
    try:
        step.loss()
    finally:
        for handle in handles:
            handle.remove()
        for state in (before, *reversed(born), streams):
            state.restore()


def _size_or_none(batch: Any) -> int | None:
    try:
        return nest.batch_size(batch)
    except MemlabError:
        return None
