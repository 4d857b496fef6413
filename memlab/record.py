"""The instruments joined: any code in, a `Trace` out.

With `record()` around a block one gets every storage the block made, when and where it lived, what autograd saved
for backward, and on request what the allocator handed out besides.

Rule 1. Nothing of the user's is changed or kept: global hooks, one dispatch mode and two functions of PyTorch's that
        are wrapped for the duration (`_engine_run_backward`, through which every backward goes, and `get_rng_state`,
        by which a checkpoint makes tensors that no operator shows). `stop` undoes all of it, also after an error.
Rule 2. The ledger is read when an outermost backward is entered: then the graph is whole and its roots are known.
Rule 3. Roles are given late, to storages: a gradient is what stands in `p.grad` after backward or when the optimizer
        starts, whatever it was when it was born; it keeps that role for its whole life.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from . import allocator as allocator_
from . import leaks, ledger, nest, release
from .accumulation import uses_by_engine
from .assemble import Recorded, Saved, assembled, is_number
from .clock import Clock, clean_name, unwrapped
from .errors import MemlabError
from .modes import level
from .trace import Growth, Trace
from .tracker import Storage, Tracker, parts


class record:  # a lower-case class: used like a function, as torch.no_grad is
    """Record the memory of any code: a context manager, or a decorator that puts the trace on the function.

    >>> import torch, memlab
    >>> model = torch.nn.Linear(8, 1)
    >>> with memlab.record() as trace:
    ...     model(torch.ones(4, 8)).sum().backward()
    >>> trace.by_phase().keys()
    dict_keys(['forward', 'backward'])

    Parameters
    ----------
    model:      the module, where names should be known before its first call; without it, modules are recognised as
                they are called and parameters by the graph
    optimizer:  the optimizer, where its state exists already and should be counted from the start
    batch:      any nest of tensors, to be listed as the batch
    allocator:  also listen to the device's allocator: workspace inside operators is seen, the peak is the truth
    sources:    also note the line of your code behind each allocation (slower)

    The trace is complete when the block ends, also by an exception, and says so if it is read before. With several
    optimizer steps in the block, `trace.steps` has one trace each (optimizers that step with no backward between them
    make one step); with three or more, `trace.growth` says what grows from step to step and who holds it. Call a
    compiled module once before: compiled within, it stays in pieces. Raises `MemlabError` under `torch.inference_mode`,
    and with `allocator=True` inside a running profiler.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        batch: Any = None,
        *,
        allocator: bool = False,
        sources: bool = False,
    ) -> None:
        if model is not None and not isinstance(model, nn.Module):
            raise MemlabError(
                f"record() takes a module, not {type(model).__name__}. As a decorator it needs its brackets: "
                "`@memlab.record()`."
            )
        self._make: Callable[[], Recorder] = functools.partial(
            Recorder, model, optimizer, batch, allocator=allocator, sources=sources
        )
        self._recorder: Recorder | None = None
        self._trace: Trace | None = None

    def __enter__(self) -> Trace:
        if self._recorder is not None:
            raise MemlabError("this record() is already recording: make a new one for the inner block")
        recorder = self._make()
        recorder.start()
        self._recorder = recorder
        self._trace = object.__new__(_Unfinished)
        return self._trace

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        recorder, trace = self._recorder, self._trace
        assert recorder is not None
        assert trace is not None
        self._recorder = self._trace = None
        recorder.stop()
        if kind is not None:
            release.queue()
        notes = () if kind is None else (f"the block ended early, by {kind.__name__}: the trace covers what ran",)
        trace.__dict__["finish"] = functools.partial(recorder.trace, notes=notes)

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            with self as trace:
                recorded.trace = trace  # type: ignore[attr-defined]
                return function(*args, **kwargs)

        return recorded


class _Unfinished(Trace):
    """What `record` yields: not to be read until the block ends, and put together when it first is."""

    def __getattribute__(self, name: str) -> Any:
        values: dict[str, Any] = object.__getattribute__(self, "__dict__")
        finish = values.pop("finish", None)
        if finish is not None:
            object.__setattr__(self, "__class__", Trace)
            values.update(finish().__dict__)
        elif name not in ("__class__", "__dict__"):
            raise MemlabError("this trace is not complete: it can be read after the `with` block has ended")
        return object.__getattribute__(self, name)

    def __repr__(self) -> str:
        recording = "finish" not in object.__getattribute__(self, "__dict__")
        return "<Trace: recording>" if recording else self.__repr__()  # to look it up puts it together

    __str__ = __repr__


class Recorder:
    """`start`, run the code, `stop`, then `trace()`. Users want `record`."""

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        batch: Any = None,
        *,
        allocator: bool = False,
        sources: bool = False,
        device: torch.device | None = None,
        measures: Callable[..., Any] | None = None,
        host: str = "cpu",
    ) -> None:
        self.device = device or _device_of(model)
        self.clock = Clock(sources)
        self.tracker = Tracker(self.clock, marks=allocator, measures=measures)
        self._host = host  # where the states of random streams are: not on a GPU that is simulated on the CPU
        self._listener = allocator_.Listener(self.device) if allocator else None
        self._events: list[allocator_.Event] | None = None
        self._thread = threading.get_ident()
        self._level = level()
        self._parameters: dict[int, tuple[weakref.ref[torch.Tensor], str, str]] = {}
        self._saved: list[Saved] = []
        self._opaque: set[str] = set()
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()  # whose state has been found once
        self._entered = 0
        self._backward_since_step = False
        self._stepped_in_backward = False
        self._undo = contextlib.ExitStack()
        self._batch_given = batch is not None
        self._start_ns = 0
        self._reserved = 0
        self._growth: tuple[Growth, ...] = ()
        self._given: tuple[nn.Module | None, Any, Any] = model, optimizer, batch

    # -- starting and stopping -----------------------------------------------------------------------------------

    def start(self) -> None:
        if torch.is_inference_mode_enabled():
            raise MemlabError(
                "torch.inference_mode is on: nothing is saved for backward there and tensors made in it cannot be "
                "trained on. Leave the block, or use torch.no_grad for a forward pass without gradients."
            )
        if self._listener is not None:
            allocator_.refuse_running_profiler()
        self.clock.on_new_root = self._new_root
        self.clock.before_optimizer = self._optimizer_begins
        self.clock.after_optimizer = self._optimizer_ends
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        uses_by_engine()  # before backward is wrapped: it looks at one of its own
        try:
            self._wrap(torch.autograd, "_engine_run_backward", self._run_backward)
            self._wrap(torch, "get_rng_state", self._get_rng_state)
            if self._listener is not None:
                self._listener.start()
                self._undo.callback(self._stop_listening)
            self._register(*self._given)
            self._given = None, None, None  # the trace may be put together much later, and holds none of them
            self.clock.start()
            self._undo.callback(self.clock.stop)
            self._start_ns = time.perf_counter_ns()
            self._undo.enter_context(self.tracker)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self._reserved = torch.cuda.max_memory_reserved(self.device)
        self._undo.close()
        self.tracker.forget()
        self._growth = leaks.growth(self.tracker, self.clock)

    def _stop_listening(self) -> None:
        assert self._listener is not None
        events = self._listener.stop()
        if sum(event.nbytes == 0 for event in events) != len(self.tracker.mark_of):
            raise MemlabError(
                "a profiler was started while memlab listened to the allocator, and took the allocator's events away: "
                "leave it out, or pass allocator=False"
            )
        self._events = events

    def _sees(self) -> bool:
        """Whether what happens now is the recorded thread's, and no work of memlab's own."""
        return threading.get_ident() == self._thread and level() == self._level

    def _wrap(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        wrapped = functools.wraps(original)(functools.partial(replacement, original))
        setattr(owner, name, wrapped)
        self._undo.callback(setattr, owner, name, original)

    # -- who is who ----------------------------------------------------------------------------------------------

    def _register(self, model: nn.Module | None, optimizer: Any, batch: Any) -> None:
        if model is not None:
            self.adopt(model)
        if optimizer is not None:
            self._find_state(optimizer)
        for index, tensor in enumerate(nest.tensors(batch)):
            self._give(tensor, "batch", f"batch[{index}]", "")

    def adopt(self, root: nn.Module) -> None:
        """Know a module and all that it holds by name before its first call."""
        self.clock.adopt(root)
        self._new_root(root)

    def _new_root(self, root: nn.Module) -> None:
        inner = unwrapped(root)
        for path, module in inner.named_modules():
            owner, prefix = self.clock.names.get(id(module), ""), clean_name(path) + "." if path else ""
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self._parameter(parameter, prefix + name, owner)
            for name, buffer in module._buffers.items():
                if buffer is not None and not is_lazy(buffer):
                    self._give(buffer, "buffers", prefix + name, owner)

    def _parameter(self, parameter: torch.Tensor, name: str = "", owner: str = "") -> None:
        known = self._parameters.get(id(parameter))
        new = known is None or known[0]() is not parameter  # ids are used again
        if new and not is_lazy(parameter):
            self._parameters[id(parameter)] = weakref.ref(parameter), name, owner
            self._give(parameter, "parameters", name, owner)
            if parameter.grad is not None:
                self._give(parameter.grad, "gradients", name, owner)

    def _give(self, tensor: torch.Tensor, role: str, name: str, owner: str) -> None:
        for storage in self.tracker.meet_outside(tensor):
            if not storage.role:
                storage.role, storage.name, storage.owner = role, name, owner

    def _find_gradients(self, parameters: Iterable[int]) -> None:
        for key in parameters:
            reference, name, owner = self._parameters[key]
            parameter = reference()
            if parameter is not None and parameter.grad is not None:
                self._give(parameter.grad, "gradients", name, owner)

    # -- what the program does -----------------------------------------------------------------------------------

    def _run_backward(self, original: Callable[..., Any], roots: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._sees() or torch._C._current_graph_task_id() != -1:
            return original(roots, *args, **kwargs)
        self._read_ledger(roots)
        accumulates = kwargs.get("accumulate_grad", False)
        self.clock.backward_begins(create_graph=bool(args[2]) if len(args) > 2 else False)
        try:
            return original(roots, *args, **kwargs)
        finally:
            self.clock.backward_over()
            if accumulates:
                self.clock.backward_ends.append(len(self.tracker.operators))
                self._find_gradients(self._parameters)
                self._backward_since_step = True
                if self._stepped_in_backward:
                    self._stepped_in_backward = False
                    self._step_ended()

    def _read_ledger(self, roots: Any) -> None:
        graph = ledger.walk([root for root in roots if isinstance(root, torch.Tensor)])
        self._opaque.update(graph.opaque)
        for leaf in graph.leaves:
            if isinstance(leaf, nn.Parameter):
                self._parameter(leaf)
        unknown = "other" if self._batch_given else "batch"
        for entry in graph.entries:
            module, source = self.clock.module_of(entry.sequence), self.clock.source_of(entry.sequence)
            tensor, found = entry.tensor, []
            if tensor is not None:
                before = len(self.tracker.storages)
                found = self.tracker.meet_outside(tensor)
                for storage in self.tracker.storages[before:]:
                    storage.role = "workspace" if is_number(storage) else unknown
            light = ledger.without_tensor(entry)
            nbytes = 0 if tensor is None else sum(p.numel() * p.element_size() for p in parts(tensor))
            number = len(self.tracker.operators)
            holders: list[Storage | None] = [*found] or [None]
            for holder in holders:
                self._saved.append(Saved(light, holder, nbytes, number, self._entered, module, source))
        if graph.opaque:
            self._assume_saved(graph.opaque, roots)
        self._entered += 1

    def _assume_saved(self, nodes: Iterable[str], roots: Iterable[Any]) -> None:
        """Nodes that show nothing of what they saved hold, as far as we can tell, what is alive for no other reason."""
        known = [self.tracker.find(root) for root in roots]
        known += [saved.storage for saved in self._saved if saved.entered == self._entered]
        told, name, number = {id(storage) for storage in known}, " or ".join(nodes), len(self.tracker.operators)
        for storage in self.tracker.alive():
            if storage.operator >= 0 and storage.shape and not storage.role and id(storage) not in told:
                _, place, line = self.tracker.operators[min(storage.operator, number - 1)][1]
                module, source = self.clock.resolved(place, line)
                dtype = str(storage.dtype).removeprefix("torch.")
                entry = ledger.Entry(name, f"{name}.unseen", -1, None, "unseen", shape=storage.shape, dtype=dtype)
                self._saved.append(Saved(entry, storage, storage.nbytes, number, self._entered, module, source))

    def _optimizer_begins(self, optimizer: Any) -> None:
        if optimizer not in self._optimizers:
            self._find_state(optimizer)
        self._find_gradients([id(p) for group in optimizer.param_groups for p in group["params"]])

    def _find_state(self, optimizer: Any) -> None:
        self._optimizers.add(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._parameter(parameter)
                _, name, owner = self._parameters[id(parameter)]
                for tensor in nest.tensors(optimizer.state.get(parameter)):
                    self._give(tensor, "optimizer state", name, owner)

    def _optimizer_ends(self, optimizer: Any) -> None:
        self._find_state(optimizer)
        if torch._C._current_graph_task_id() != -1:
            self._stepped_in_backward = True
        else:
            self._step_ended()

    def _step_ended(self) -> None:
        """Optimizer steps with no backward between them belong to one training step."""
        ends = self.clock.step_ends
        if ends and not self._backward_since_step:
            ends.pop()
        ends.append(len(self.tracker.operators))
        self._backward_since_step = False

    def _get_rng_state(self, original: Callable[[], torch.Tensor]) -> torch.Tensor:
        state = original()
        if self._sees():
            for storage in self.tracker.made_outside(state):
                storage.device = self._host
        return state

    # -- the trace -----------------------------------------------------------------------------------------------

    def trace(self, strategy: str = "baseline", notes: Iterable[str] = (), absent: Iterable[str] = ()) -> Trace:
        """What was recorded, as a value. `stop` comes first."""
        recorded = Recorded(
            device=self.device,
            clock=self.clock,
            tracker=self.tracker,
            events=self._events,
            saved=self._saved,
            opaque=self._opaque,
            growth=self._growth,
            start_ns=self._start_ns,
            reserved=self._reserved,
        )
        return assembled(recorded, strategy, notes, absent)


def _device_of(model: nn.Module | None) -> torch.device:
    """Where the model's parameters are; without a model or parameters, the GPU if this process uses one."""
    for tensor in () if model is None else itertools.chain(model.parameters(), model.buffers()):
        return tensor.device
    uses_cuda = model is None and torch.cuda.is_available() and torch.cuda.is_initialized()
    return torch.device("cuda" if uses_cuda else "cpu")
