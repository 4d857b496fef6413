"""How near the truth: memlab, torch's MemTracker, torchlens and torchinfo on the same four training steps.

    pip install torchlens torchinfo       the two peers that are not part of torch; without them their rows say so
    python benchmarks/peers.py

A transformer and a CNN, each plain and with its blocks checkpointed, every tool on the same object. Two truths, neither
of them memlab's:

- the *peak* of one step (forward, backward, AdamW; the optimizer's state exists): what is there at the start, plus the
  largest running sum of the CPU allocator's events under a plain profiler;
- what is *saved* for backward: the bytes allocated in the forward pass that are alive at its end, less the loss.

Tools answer different questions; the tables say what each number is meant to be.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _timing import publish, table
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._tools.mem_tracker import MemTracker
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import memlab
from memlab import zoo

sys.path.append(str(Path(__file__).parent.parent))  # the tests are no package that is installed
from tests.truth import allocator_peak, resident_bytes

MIB = 2**20


# -- the cases ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One training step, ready to run: its optimizer's state exists."""

    model: nn.Module
    batch: tuple[torch.Tensor, torch.Tensor]
    loss_fn: Callable[[nn.Module, Any], torch.Tensor]
    optimizer: torch.optim.Optimizer

    def loss(self) -> torch.Tensor:
        return self.loss_fn(self.model, self.batch)

    def run(self) -> None:
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def step(self) -> memlab.TrainingStep:
        return memlab.TrainingStep(self.model, self.batch, self.loss_fn, self.optimizer)


def _case(make: Callable[[], memlab.TrainingStep], loss_fn: Any, checkpointed: bool) -> Case:
    step = make()
    assert step.optimizer is not None
    if checkpointed:  # as a person writes it, so that every tool meets the same thing
        for block in step.model.blocks.children():  # type: ignore[union-attr,operator]
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    case = Case(step.model, step.batch, loss_fn, step.optimizer)
    case.run()
    return case


CASES: dict[str, Callable[[], Case]] = {
    "transformer": partial(_case, zoo.gpt_step, zoo.gpt_loss, False),
    "transformer, checkpointed": partial(_case, zoo.gpt_step, zoo.gpt_loss, True),
    "CNN": partial(_case, zoo.resnet_step, zoo.classification_loss, False),
    "CNN, checkpointed": partial(_case, zoo.resnet_step, zoo.classification_loss, True),
}


# -- the truth ---------------------------------------------------------------------------------------------------------


def true_peak(case: Case) -> int:
    return resident_bytes(case.model, case.optimizer, case.batch) + allocator_peak(case.run)


def true_saved(case: Case) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        loss = case.loss()
    events = profiled.profiler.kineto_results.events()
    return sum(event.nbytes() for event in events if event.name() == "[memory]") - loss.nbytes


# -- the tools ---------------------------------------------------------------------------------------------------------


def exact_peak(case: Case) -> int:
    return memlab.measure(case.step).peak_bytes


def tensor_peak(case: Case) -> int:
    return memlab.measure(case.step, allocator=False).peak_bytes


def ledger(case: Case) -> int:
    return memlab.measure(case.step, allocator=False).saved_bytes


def tracked_peak(case: Case) -> int:
    tracker = MemTracker()
    tracker.track_external(case.model, case.optimizer, *case.batch)
    with tracker:
        case.run()
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


def tracked_activations(case: Case) -> int:
    tracker = MemTracker()
    tracker.track_external(case.model, case.optimizer, *case.batch)
    with tracker:
        loss = case.loss()
        now = tracker.get_tracker_snapshot("current")[torch.device("cpu")]
        loss.backward()
    case.optimizer.zero_grad()
    return int(now["Activation"])


def naive_hooks(case: Case) -> int:
    seen: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.nbytes)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        case.loss().backward()
    total = sum(seen)
    case.optimizer.zero_grad()
    return total


class _WithLoss(nn.Module):
    """Model and loss as one module, for tools that look at a module's forward pass."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.model, self.loss_fn = case.model, case.loss_fn

    def forward(self, inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.loss_fn(self.model, (inputs, target))


def torchlens_saved(case: Case) -> int:
    import torchlens
    from torchlens.observe import memory_timeline_v2

    trace = torchlens.trace(_WithLoss(case), case.batch)
    return int(memory_timeline_v2(trace)["saved_band"]["stackable_newly_saved_activation"])


def _torchinfo(case: Case) -> Any:
    import torchinfo

    return torchinfo.summary(case.model, input_data=case.batch[0], mode="train", verbose=0)


def torchinfo_total(case: Case) -> int:
    summary = _torchinfo(case)
    return int(summary.total_input + summary.total_output_bytes + summary.total_param_bytes)


def torchinfo_forward(case: Case) -> int:
    return int(_torchinfo(case).total_output_bytes) // 2


@dataclass(frozen=True)
class Tool:
    """A tool's answer: what it is called, what it is meant to be, and how to get it."""

    name: str
    meant: str
    answer: Callable[[Case], int]
    package: str | None = None


PEAK = (
    Tool("memlab.measure", "the allocator's peak of the step", exact_peak),
    Tool("memlab.measure, allocator=False", "the peak of tensors, without workspace inside operators", tensor_peak),
    Tool("torch MemTracker", "peak `Total` of the step: tensors, without workspace", tracked_peak),
    Tool(
        "torchinfo",
        "`Estimated Total Size`: input + 2 x outputs of layers with parameters + parameters",
        torchinfo_total,
        "torchinfo",
    ),
)
SAVED = (
    Tool("memlab's ledger", "`saved_bytes`: storages that autograd holds, each once", ledger),
    Tool("torch MemTracker", "`Activation` at the end of the forward pass, the loss included", tracked_activations),
    Tool("sum over saved-tensor hooks", "every saved tensor's bytes, as tutorials add them up", naive_hooks),
    Tool("torchlens", "`stackable_newly_saved_activation` of its memory timeline", torchlens_saved, "torchlens"),
    Tool("torchinfo", "half its `Forward/backward pass size`: outputs of layers", torchinfo_forward, "torchinfo"),
)


# -- the tables --------------------------------------------------------------------------------------------------------


def answered(tool: Tool, case: Case) -> int | str:
    """The tool's answer in bytes, or what it raised."""
    quiet = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
            warnings.simplefilter("ignore")
            return tool.answer(case)
    except Exception as error:
        said = " ".join(str(error).split()).replace("|", "/")
        return f"raised {type(error).__name__}: {said[:70]}{'...' if len(said) > 70 else ''}"
    finally:
        case.optimizer.zero_grad()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cell(answer: int | str, truth: int) -> str:
    if isinstance(answer, str):
        return answer
    if abs(answer - truth) < 1024:
        return "exact" if answer == truth else f"{answer - truth:+} B"
    return f"{answer / truth - 1:+.1%}"


def _rows(tools: tuple[Tool, ...], truths: dict[str, int], found: dict[str, Any]) -> Iterator[list[str]]:
    yield ["the truth", "", *(f"{truth / MIB:.2f} MiB" for truth in truths.values())]
    for tool in tools:
        version = _version(tool.package) if tool.package else None
        if tool.package and version is None:
            yield [tool.name, tool.meant, *("not installed" for _ in truths)]
            continue
        # Each tool on networks of its own: torchlens wraps functions of torch, MemTracker those of modules.
        answers = {name: answered(tool, CASES[name]()) for name in truths}
        found[tool.name] = answers
        name = f"{tool.name} {version}" if version else tool.name
        yield [name, tool.meant, *(_cell(answers[case], truth) for case, truth in truths.items())]


def main() -> None:
    torch.set_num_threads(1)
    memlab.measure(zoo.mlp_step())  # the first profiler of a process is slow, and noisy on stderr
    values: dict[str, Any] = {}
    sections = []
    for title, truth, tools in (
        ("Peak of one training step", true_peak, PEAK),
        ("Saved for backward", true_saved, SAVED),
    ):
        truths = {name: truth(make()) for name, make in CASES.items()}
        found: dict[str, Any] = {"the truth": truths}
        rows = list(_rows(tools, truths, found))
        values[title] = found
        sections.append(f"**{title}**: error against the truth.\n\n" + table(["", "is meant to be", *truths], rows))
    publish("peers", "## How near the truth\n\n" + "\n\n".join(sections), values)


if __name__ == "__main__":
    main()
