"""A batch is a nest: tensors in tuples, lists, mappings, named tuples and dataclasses, to any depth.

With this one can list a nest's tensors, rebuild it, find its batch size and cut it into micro-batches. Rules:

1. The batch size is the first dimension that most tensors (and numpy arrays) share; a tie is an error.
2. Tensors (and numpy arrays) of that first dimension are sliced, as views. A slice of a tensor that requires grad
   requires grad itself, so that a loss can differentiate with respect to it.
3. Lists and tuples of that length hold one entry a sample and are sliced, unless they hold tensors of rule 2: in a
   batch of two, `[inputs, target]` is a pair, not two samples.
4. Everything else (None, numbers, strings, 0-d tensors, tensors of another first dimension) passes through whole.
5. What holds tensors that these rules cannot cut is an error that asks for `split`, never a silent whole.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from .errors import MemlabError

_ASK = "pass `split=` to TrainingStep: a function of (batch, n) that returns the n micro-batches"


def kind(value: Any) -> str:
    """`a Tensor`, `an int`: a value's type as errors name it."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def leaves(nest: Any) -> Iterator[Any]:
    """Everything in the nest that is no container."""
    opened = None if isinstance(nest, torch.Tensor) else _opened(nest)
    if opened is None:
        yield nest
    else:
        for child in opened[0]:
            yield from leaves(child)


def tensors(nest: Any) -> list[torch.Tensor]:
    """The nest's tensors, each object once, in order."""
    found = {id(leaf): leaf for leaf in leaves(nest) if isinstance(leaf, torch.Tensor)}
    return list(found.values())


def rebuilt(nest: Any) -> Any:
    """The same leaves in new containers: who pops an entry from the copy leaves the original whole."""
    return _mapped(nest, lambda node: None)


def batch_size(batch: Any) -> int:
    """Rule 1. Raises MemlabError where there is no answer or more than one."""
    votes: Counter[int] = Counter()
    for leaf in leaves(_checked(batch)):
        if _is_array(leaf) and len(leaf.shape):
            votes[leaf.shape[0]] += 1
    if len(votes) > 1:
        del votes[0]  # an empty selection beside samples
    if not votes:
        raise MemlabError(f"the batch, {kind(batch)}, holds no tensor with a first dimension to split along: {_ASK}")
    (size, count), *others = votes.most_common()
    if others and others[0][1] == count:
        tied = " and ".join(str(s) for s, c in votes.items() if c == count)
        raise MemlabError(
            f"the batch size is ambiguous: first dimensions {tied} are shared by {count} tensor(s) each; {_ASK}"
        )
    for length in _lists_of_mappings(batch):
        if length != size:
            raise MemlabError(
                f"the batch size is ambiguous: most tensors have first dimension {size}, "
                f"but a list of {length} mappings looks like {length} samples; {_ASK}"
            )
    return size


def split(batch: Any, sizes: list[int]) -> list[Any]:
    """The batch in consecutive parts of `sizes` samples (their sum is the batch size)."""
    whole = sum(sizes)
    bounds = itertools.pairwise(itertools.accumulate(sizes, initial=0))
    _checked(batch)

    def part(start: int, stop: int) -> Any:
        def cut(node: Any) -> list[Any] | None:
            if _is_array(node):
                return [_sliced(node, start, stop)] if _splits(node, whole) else [node]
            if type(node) in (list, tuple) and len(node) == whole and not _holds_batch(node, whole):
                return [node[start:stop]]
            return None

        return _mapped(batch, cut)

    return [part(start, stop) for start, stop in bounds]


def near_equal(whole: int, count: int) -> list[int]:
    """`whole` in `count` parts, the larger first: 10 in 4 is 3, 3, 2, 2, as torch.tensor_split has it."""
    return [whole // count + (number < whole % count) for number in range(count)]


# -------------------------------------------------------------------------------------------------- one level of a nest


def _opened(nest: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """A container's children and the way to build one like it from others; None for a leaf."""
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return list(nest), type(nest)._make  # type: ignore[attr-defined]
    if isinstance(nest, list | tuple):
        return list(nest), type(nest)
    if isinstance(nest, Mapping):
        keys = list(nest.keys())
        return [nest[key] for key in keys], lambda new: _like_mapping(nest, dict(zip(keys, new, strict=True)))
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        names = [field.name for field in dataclasses.fields(nest) if field.init]
        children = [getattr(nest, name) for name in names]
        return children, lambda new: dataclasses.replace(nest, **dict(zip(names, new, strict=True)))
    return None


def _like_mapping(nest: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of the nest's own type (UserDict, a tokenizer's output) with these items."""
    if type(nest) is dict:
        return items
    if not isinstance(nest, MutableMapping):
        return type(nest)(items)  # type: ignore[call-arg]
    new = copy.copy(nest)
    for key, value in items.items():
        new[key] = value
    return new


def _mapped(nest: Any, replace: Callable[[Any], list[Any] | None]) -> Any:
    """The nest with every node for which `replace` returns `[new]` replaced; containers are new, leaves the same."""
    replaced = replace(nest)
    if replaced is not None:
        return replaced[0]
    opened = _opened(nest)
    if opened is None:
        return nest
    children, build = opened
    new = [_mapped(child, replace) for child in children]
    try:
        return build(new)
    except Exception as error:
        raise MemlabError(
            f"{kind(nest)} in the batch cannot be rebuilt from its parts ({type(error).__name__}: {error}): {_ASK}"
        ) from None


# ------------------------------------------------------------------------------------------------------ what can be cut


def _checked(batch: Any) -> Any:
    """Rule 5."""
    pending = [batch]
    while pending:
        node = pending.pop()
        if isinstance(node, PackedSequence):
            raise MemlabError(
                "PackedSequence cannot be split: rows of its .data are time steps of several samples. "
                f"Give the padded batch and pack it inside the model, or {_ASK}"
            )
        if isinstance(node, torch.Tensor):
            if node.is_nested or node.layout is not torch.strided:
                layout = "nested" if node.is_nested else str(node.layout).removeprefix("torch.")
                raise MemlabError(f"a {layout} tensor of the batch cannot be sliced along its first dimension: {_ASK}")
            continue
        opened = _opened(node)
        if opened is not None:
            pending += opened[0]
        elif any(isinstance(value, torch.Tensor) for value in getattr(node, "__dict__", {}).values()):
            raise MemlabError(f"{kind(node)} in the batch holds tensors that memlab cannot split: {_ASK}")
    return batch


def is_numpy(node: Any) -> bool:
    """Whether it is a numpy array; numpy need not be there."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(node, numpy.ndarray)


def _is_array(node: Any) -> bool:
    return isinstance(node, torch.Tensor) or is_numpy(node)


def _splits(leaf: Any, whole: int) -> bool:
    return _is_array(leaf) and len(leaf.shape) > 0 and leaf.shape[0] == whole


def _holds_batch(node: Any, whole: int) -> bool:
    return any(_splits(leaf, whole) for leaf in leaves(node))


def _sliced(leaf: Any, start: int, stop: int) -> Any:
    part = leaf[start:stop]
    if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
        return part.detach().requires_grad_()
    return part


def _lists_of_mappings(nest: Any) -> Iterator[int]:
    opened = _opened(nest)
    if opened is None:
        return
    if isinstance(nest, list) and nest and all(isinstance(child, Mapping) for child in nest):
        yield len(nest)
    for child in opened[0]:
        yield from _lists_of_mappings(child)
