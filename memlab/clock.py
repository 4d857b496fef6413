"""Where the program is: phase, micro-batch, step, module, source line, with no help from the user's code.

With a `Clock` running one can ask, at any operator, in which phase of training and in which module it runs; and
afterwards, for any node of autograd's graph, in which module it was made.

Rule 1. Optimizer: between the global optimizer hooks, also inside backward (optimizer in backward). What a closure runs
        there (LBFGS), in modules and in backward, is forward and backward.
Rule 2. Backward: while autograd's engine runs a graph task in this thread.
Rule 3. Recompute: in backward with gradients enabled although the engine did not ask for a graph of the gradients
        (`create_graph`), or with a module's forward running that began in backward.
Rule 4. The micro-batch number is the number of backward passes since the last optimizer step.
Rule 5. A node's module is the innermost module whose forward was running when autograd gave out the node's sequence
        number; module hooks note that number at each entry and exit, so the answer is one bisection.
Rule 6. Hooks are PyTorch's own global ones; `Clock.stop` removes every one.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import warnings
import weakref
from bisect import bisect_right
from collections.abc import Iterator
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks

from .modes import level

FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER = range(4)

_sequence_number = torch._C._autograd._get_sequence_nr
_graph_task = torch._C._current_graph_task_id
_current_node = torch._C._current_autograd_node
_grad_enabled = torch.is_grad_enabled
_LEAF = 2**63  # gradient accumulators carry the largest sequence number: they belong to no module

_running: list[Clock] = []


@contextlib.contextmanager
def region(module: nn.Module) -> Iterator[None]:
    """Say that `module`'s code runs although it was not called as a module: a region that is being recomputed."""
    clock = _running[-1] if _running and _graph_task() != -1 else None
    if clock is None:
        yield
        return
    clock.enter(module)
    try:
        yield
    finally:
        clock.leave()


class Clock:
    """Follows the phases and modules of the code that runs between `start` and `stop`."""

    def __init__(self, sources: bool = False) -> None:
        self.sources = sources
        self.names: dict[int, str] = {}  # by the module's `id`
        self._alive: dict[int, weakref.ref[nn.Module]] = {}
        self.roots: list[weakref.ref[nn.Module]] = []
        self.optimizing = 0
        self._optimizer_depth = 0  # modules that were running when the optimizer began
        self._around_backward = 0  # `optimizing` when backward was entered: by a closure
        self.create_graph = False
        self.backward_ends: list[int] = []  # operator numbers, filled by the recorder
        self.step_ends: list[int] = []
        self._stack: list[str] = []
        self._backward_depth = 0  # modules that were running when backward was entered
        self._sequence = [-1]
        self._modules = [""]
        self._source_sequence = [-1]
        self._source_lines: list[str | None] = [None]
        self._handles: list[Any] = []
        self._filter: Any = None
        self._thread = threading.get_ident()
        self._level = level()
        self.on_new_root: Any = None
        self.before_optimizer: Any = None
        self.after_optimizer: Any = None

    # -- starting and stopping -----------------------------------------------------------------------------------

    def start(self) -> None:
        _running.append(self)
        self._handles = [
            module_hooks.register_module_forward_pre_hook(self._module_begins),
            module_hooks.register_module_forward_hook(self._module_ends, always_call=True),
            optimizer_hooks.register_optimizer_step_pre_hook(self._optimizer_begins),
            optimizer_hooks.register_optimizer_step_post_hook(self._optimizer_ends),
        ]
        if "torch._dynamo" in sys.modules:  # a compiled module warns of global hooks at each call; ours do no harm
            warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks")
            self._filter = warnings.filters[0]

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._filter in warnings.filters:
            warnings.filters.remove(self._filter)  # type: ignore[attr-defined]
        if self in _running:
            _running.remove(self)
        self.on_new_root = self.before_optimizer = self.after_optimizer = None

    # -- modules -------------------------------------------------------------------------------------------------

    def adopt(self, root: nn.Module) -> None:
        """Give every module below `root` its name: the root's is its class, the others' their path (the first alias;
        wrappers' prefixes left out). A second root's names begin with its class."""
        inner = unwrapped(root)
        kind = type(inner).__name__
        prefix = f"{kind}." if self.roots else ""
        self.roots.append(weakref.ref(root))
        self._name(root, kind)
        for name, module in inner.named_modules():
            self._name(module, prefix + clean_name(name) if name else kind)

    def _name(self, module: nn.Module, name: str) -> str:
        """Keep the module's name for as long as the module lives: its `id` may be another's afterwards."""
        key = id(module)
        if key not in self.names:
            self.names[key] = name
            self._alive[key] = weakref.ref(module, lambda _: (self.names.pop(key, None), self._alive.pop(key, None)))
        return self.names[key]

    def enter(self, module: nn.Module) -> None:
        name = self.names.get(id(module))
        if name is None:
            if self._stack:  # made on the fly, or hidden from its parent
                name = self._name(module, f"{self._stack[-1]}.{type(module).__name__}")
            else:
                self.adopt(module)
                if self.on_new_root is not None:
                    self.on_new_root(module)
                name = self.names[id(module)]
        self._stack.append(name)
        self._note(name)

    def leave(self) -> None:
        if self._stack:
            self._stack.pop()
            self._note(self._stack[-1] if self._stack else "")

    def _note(self, name: str) -> None:
        self._sequence.append(_sequence_number())
        self._modules.append(name)

    def _module_begins(self, module: nn.Module, inputs: Any) -> None:
        if self._is_followed():
            self.enter(module)

    def _module_ends(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._is_followed():
            self.leave()

    def _is_followed(self) -> bool:
        """Whether this is the thread that is recorded, or one of the engine's, and no work of memlab's own: hooks hear
        of all."""
        return level() == self._level and (threading.get_ident() == self._thread or _graph_task() != -1)

    def module_of(self, sequence: int) -> str:
        """The module that made the node with that sequence number ("" for none)."""
        return self._modules[bisect_right(self._sequence, sequence) - 1] if sequence < _LEAF else ""

    def source_of(self, sequence: int) -> str | None:
        """The line of the user's code that made the node with that sequence number, where sources are recorded."""
        return self._source_lines[bisect_right(self._source_sequence, sequence) - 1] if sequence < _LEAF else None

    def resolved(self, module: str | int, source: str | None) -> tuple[str, str | None]:
        """Module and line that `now` told, also where it told them by a node's number."""
        return (module, source) if isinstance(module, str) else (self.module_of(module), self.source_of(module))

    # -- phases --------------------------------------------------------------------------------------------------

    def _optimizer_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._is_followed():
            return
        self.optimizing += 1
        self._optimizer_depth = len(self._stack)
        if self.before_optimizer is not None:
            self.before_optimizer(optimizer)

    def _optimizer_ends(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._is_followed():
            return
        if self.after_optimizer is not None:
            self.after_optimizer(optimizer)
        self.optimizing = max(self.optimizing - 1, 0)

    def backward_begins(self, create_graph: bool) -> None:
        self.create_graph = create_graph
        self._backward_depth = len(self._stack)
        self._around_backward, self.optimizing = self.optimizing, 0

    def backward_over(self) -> None:
        """Also after an error in the middle, when modules that were being recomputed never left."""
        self.create_graph = False
        self.optimizing = self._around_backward
        del self._stack[self._backward_depth :]

    def now(self) -> tuple[int, str | int, str | None]:
        """(phase, module name or sequence number of the node that runs, source line)."""
        if self.optimizing and len(self._stack) <= self._optimizer_depth:
            return OPTIMIZER, "", user_line() if self.sources else None
        if _graph_task() == -1:
            source = user_line() if self.sources else None
            if self.sources:
                self._source_sequence.append(_sequence_number() - 1)
                self._source_lines.append(source)
            return FORWARD, self._stack[-1] if self._stack else "", source
        if len(self._stack) > self._backward_depth:
            return RECOMPUTE, self._stack[-1], user_line() if self.sources else None
        node = _current_node()
        phase = RECOMPUTE if _grad_enabled() and not self.create_graph else BACKWARD
        sequence = -1 if node is None else node._sequence_nr()
        return phase, sequence, None


def unwrapped(module: nn.Module) -> nn.Module:
    """The user's module inside `torch.compile`'s or a data-parallel wrapper."""
    wrapper = {"OptimizedModule": "_orig_mod", "DistributedDataParallel": "module", "DataParallel": "module"}
    name = wrapper.get(type(module).__name__)
    inner = None if name is None else module._modules.get(name)
    return module if inner is None else unwrapped(inner)


def clean_name(name: str) -> str:
    """A module's or parameter's dotted name without the parts that `torch.compile` puts in."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


_LIBRARIES = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)
_LESSONS = os.path.join(os.path.dirname(__file__), "zoo.py")  # read like a user's own code


def user_line() -> str | None:
    """`file.py:12 in function`: the innermost line that is neither PyTorch's nor memlab's."""
    frame = sys._getframe(1)
    while frame is not None:
        line = line_of(frame.f_code, frame.f_lineno)
        if line is not None:
            return line
        frame = frame.f_back  # type: ignore[assignment]
    return None


def line_of(code: CodeType, number: int) -> str | None:
    """`file.py:12 in function`; None for a line of PyTorch's or memlab's."""
    if code.co_filename != _LESSONS and code.co_filename.startswith(_LIBRARIES):
        return None
    return f"{os.path.basename(code.co_filename)}:{number} in {code.co_name}"
