"""What recording costs: a training step of a GPT with and without instruments, as ratios to the plain step.

    python benchmarks/cost.py             both sizes; about four minutes
    python benchmarks/cost.py --quick     a tenth of the repeats, nothing stored: a smoke test, too noisy to judge by

Two sizes, both known by what torch's own MemTracker costs: *launch-bound*, where the step is so small that the program
and not the arithmetic takes the time (the worst case for every tool; MemTracker about 3.9 of the plain step), and
*mid-size* (MemTracker about 1.1; a second a step on one thread, half a second on two).

The targets are for what the step pays: starting, recording, stopping. The `Trace` is put together when it is first
read; the rows "and read" include that.

Exit status 1 if a target is missed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from _timing import Timing, interleaved, publish, table
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._tools.mem_tracker import MemTracker
from torch.profiler import ProfilerActivity, profile

import memlab
from memlab import zoo
from memlab.modes import LightMode

_NOISY = 0.15  # between the plain step's quartiles: measure again
_ATTEMPTS = 3


@dataclass(frozen=True)
class Target:
    """The largest ratio that is promised, and the one aimed at where there is such."""

    most: float
    aim: float | None = None


@dataclass(frozen=True)
class Size:
    """A network's arguments, how often its step is timed, and memlab's targets, by contender."""

    network: dict[str, int]
    repeats: int
    targets: dict[str, Target]


PLAIN, TENSORS, EXACT = "plain step", "memlab.record", "memlab.record, allocator=True"
SIZES = {
    "launch-bound": Size(
        {"batch": 8, "context": 72, "width": 128, "depth": 4, "heads": 4},
        repeats=60,
        targets={TENSORS: Target(1.4, aim=1.2), EXACT: Target(2.8, aim=2.0)},
    ),
    "mid-size": Size(
        {"batch": 16, "context": 128, "width": 512, "depth": 3, "heads": 4},
        repeats=12,
        targets={TENSORS: Target(1.05), EXACT: Target(1.1)},
    ),
}


class _Nothing(LightMode):
    """A dispatch mode that does nothing: the floor under every tool that is built on one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs) if kwargs else func(*args)


def contenders(network: dict[str, int]) -> dict[str, Callable[[], object]]:
    """One training step, alone and under each instrument."""
    step = zoo.gpt_step(**network)
    model, optimizer, batch = step.model, step.optimizer, step.batch
    assert optimizer is not None

    def plain() -> None:
        zoo.gpt_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    def recorded(allocator: bool) -> memlab.Trace:
        with memlab.record(model, optimizer, batch, allocator=allocator) as trace:
            plain()
        return trace

    def nothing() -> None:
        with _Nothing():
            plain()

    def mem_tracker() -> None:
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            plain()

    def profiler() -> None:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True):
            plain()

    def hooks() -> None:
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            plain()

    return {
        PLAIN: plain,
        TENSORS: lambda: recorded(allocator=False),
        f"{TENSORS}, and read": lambda: recorded(allocator=False).peak_bytes,
        EXACT: lambda: recorded(allocator=True),
        f"{EXACT}, and read": lambda: recorded(allocator=True).peak_bytes,
        "an empty dispatch mode (floor)": nothing,
        "torch MemTracker": mem_tracker,
        "torch.profiler, profile_memory": profiler,
        "identity saved-tensor hooks": hooks,
    }


def measured(size: Size, repeats: int) -> dict[str, Timing]:
    """The quietest of a few attempts; one is enough where the machine is quiet."""
    attempts = []
    for _ in range(_ATTEMPTS):
        attempts.append(interleaved(contenders(size.network), repeats))
        if attempts[-1][PLAIN].spread <= _NOISY:
            break
    return min(attempts, key=lambda timings: timings[PLAIN].spread)


def verdict(ratio: float, target: Target) -> str:
    """Of the ratio as the table shows it: the third decimal is noise."""
    shown = round(ratio, 2)
    if shown > target.most:
        return "MISSED"
    return "met" if target.aim is None or shown > target.aim else "met, aim too"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default 1, the steadiest)")
    parser.add_argument("--quick", action="store_true", help="a tenth of the repeats")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    missed, sections, values = [], [], {}
    for name, size in SIZES.items():
        timings = measured(size, max(size.repeats // 10, 3) if options.quick else size.repeats)
        plain = timings[PLAIN]
        rows = []
        for contender, timing in timings.items():
            median, least = timing.median / plain.median, timing.least / plain.least
            target = size.targets.get(contender)
            judged = verdict(median, target) if target else ""
            if judged == "MISSED":
                missed.append(f"{contender}, {name}: {median:.2f} of the plain step, target {target.most}")
            wanted = "" if target is None else f"{target.most}" + (f" (aim {target.aim})" if target.aim else "")
            milliseconds = f"{timing.median * 1e3:.1f}"
            rows.append((contender, milliseconds, f"{median:.2f}", f"{least:.2f}", wanted, judged))
            values.setdefault(name, {})[contender] = timing.summary | {"ratio": median, "ratio_of_minima": least}
        sizes = ", ".join(f"{key} {value}" for key, value in size.network.items())
        noise = f"{len(plain.seconds)} rounds; the plain step's quartiles lie {plain.spread:.0%} apart"
        header = ("", "ms, median", "ratio", "of minima", "target", "verdict")
        sections.append(f"**{name}** GPT ({sizes}), forward, backward, AdamW; {noise}.\n\n" + table(header, rows))
    outcome = "\n".join(f"Missed: {line}." for line in missed) or "Every target is met."
    text = "## What recording costs\n\n" + "\n\n".join(sections) + f"\n\n{outcome}"
    publish("cost", text, values, store=not options.quick)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
