"""Memory of an interrupted block, let go although something still refers to it.

An exception's traceback keeps every frame below it alive with its variables (in a notebook until the next error), and
a `loss` that the block had assigned keeps its whole graph. Both are let go here:

Rule 1. The traceback is cut where the block is: the calls below it have ended, and go with their variables. The
        frame that holds the block runs on, and keeps its own.
Rule 2. Of a graph made in the block goes what autograd saved in it. Whoever holds one of its tensors keeps the value;
        a backward pass through it is refused, by name.
Rule 3. A node belongs to the block if autograd numbered it after the block began. Older ones, and the leaves, which
        outlive every graph, are left alone.
Rule 4. What hooks of the user's own packed, and what nodes hold that Python cannot see, stays with the graph.
Rule 5. What a failed backward pass still had to do waits in autograd's queue, tensors and all, until the next one.
"""

from __future__ import annotations

import gc
import inspect
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.utils import checkpoint as torch_checkpoint

from .clock import line_of
from .errors import MemlabError
from .modes import unseen

_CHECKPOINT = getattr(torch_checkpoint, "_CheckpointFrame", ())


def frames(error: BaseException, tb: TracebackType | None) -> None:
    """Rule 1: end the traceback with its first frame, and note in words what it was."""
    if tb is None or tb.tb_next is None:
        return
    lines = [line_of(frame.f_code, number) for frame, number in traceback.walk_tb(tb.tb_next)]
    tb.tb_next = None  # to clear the frames is not enough: they hold their functions, and these their closures
    if any(lines):
        made = ", ".join(filter(None, lines))
        error.add_note(f"The calls that the block had made are released, with their variables: {made}")


@unseen()
def queue() -> None:
    """Rule 5: an empty backward pass is the next one."""
    with torch.enable_grad():
        torch.zeros((), requires_grad=True).backward()


def graph_tensors(since: int) -> list[torch.Tensor]:
    """The tensors alive whose graph was made from autograd's sequence number `since` on."""
    with torch._C.DisableTorchFunctionSubclass():
        tensors = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
        return [tensor for tensor in tensors if _made_since(since, _grad_fn(tensor))]


def graphs(since: int) -> None:
    """Empty every graph made from that sequence number on."""
    for node in _nodes(since):
        node.register_prehook(_refuse)
        for name in dir(type(node)):
            if name.startswith("_raw_saved_"):
                _empty(node, name)
        getattr(node, "__dict__", {}).clear()  # what a Python function put on its ctx


def _grad_fn(tensor: torch.Tensor) -> Node | None:
    try:
        return tensor.grad_fn
    except RuntimeError:  # a view that an in-place operation made unusable
        return None


def _made_since(since: int, node: Node | None) -> bool:
    """Rule 3; leaves carry the largest number of all."""
    return node is not None and not hasattr(node, "variable") and node._sequence_nr() >= since


def _nodes(since: int) -> Iterator[Node]:
    pending = [tensor.grad_fn for tensor in graph_tensors(since)]
    seen = set(pending)
    while pending:
        node = pending.pop()
        assert node is not None
        yield node
        for following, _ in node.next_functions:
            if following not in seen and _made_since(since, following):
                seen.add(following)
                pending.append(following)


def _empty(node: Node, name: str) -> None:
    try:
        raw = getattr(node, name)
    except RuntimeError:  # already released by a backward pass
        return
    for item in raw if isinstance(raw, list | tuple) else [raw]:
        hook = getattr(item, "unpack_hook", None)
        if hook is not None:
            _empty_checkpoint(hook)
        elif item is not None:
            try:
                item.register_hooks(_nothing, _nothing)  # autograd keeps what the first returns, in the tensor's place
            except RuntimeError:  # None was saved, or hooks of the user's have it
                continue


def _empty_checkpoint(hook: Any) -> None:
    """Let go of a checkpointed region's inputs and of what it recomputed, found through its unpack hook."""
    try:
        region = inspect.getclosurevars(hook).nonlocals.get("frame")
    except (TypeError, ValueError):  # no Python function
        return
    if isinstance(region, _CHECKPOINT):
        vars(region).clear()


def _nothing(_: Any) -> None:
    return None


def _refuse(_: Any) -> None:
    raise MemlabError(
        "this graph was made inside a memlab.limit block that ran out of memory, and was released with it: run the "
        "forward pass again before calling backward"
    )
