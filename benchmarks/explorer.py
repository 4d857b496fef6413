"""How long the explorer takes to answer when a control is moved: the teaching GPT, drawing included.

    python benchmarks/explorer.py             about a minute
    python benchmarks/explorer.py --quick     a few moves of each kind, nothing stored: a smoke test

An answer is all that happens between a control's new value and the page's new words and picture: simulation where the
choice was not asked for before (the plain step's besides, where the sizes are new), figure, PNG, sentences. What the
browser adds is not in it. Every move is made twice: the first time it is simulated, the second time it is known.

Targets are for the median over moves of all kinds. Exit status 1 if one is missed.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterable
from typing import Any

import torch
from _timing import Timing, publish, table

from memlab.notebook.explorer import Explorer, explore

NEW, KNOWN = 0.6, 0.3  # seconds: the targets

Values = dict[str, Any]


def moves(count: int) -> dict[str, list[Values]]:
    """For each kind of move, the values that a hand would set one after another."""
    techniques = itertools.product((False, True), (1, 4), ("fp32", "bf16 autocast", "pure bf16"))
    names = ("checkpoint", "micro_batches", "precision")
    plain = {"checkpoint": False, "micro_batches": 1, "precision": "fp32"}
    return {
        "a size, no technique on": [plain | {"batch": 8 + number} for number in range(count)],
        "a size, checkpointing on": [plain | {"batch": 32 + number, "checkpoint": True} for number in range(count)],
        "a technique": [{"batch": 64} | dict(zip(names, chosen, strict=True)) for chosen in techniques][1 : 1 + count],
    }


def answers(explorer: Explorer, several: list[Values]) -> Timing:
    """The seconds that the answer to each takes; on one thread the processor's."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds = []
    for values in several:
        start = clock()
        with explorer.hold():
            for name, value in values.items():
                explorer.controls[name].value = value
        seconds.append(clock() - start)
    return Timing(tuple(seconds))


def joined(timings: Iterable[Timing]) -> Timing:
    return Timing(tuple(second for timing in timings for second in timing.seconds))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default 1, the steadiest)")
    parser.add_argument("--quick", action="store_true", help="three moves of each kind")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    explorer = explore()
    kinds = moves(3 if options.quick else 11)
    timings = {kind: (answers(explorer, several), answers(explorer, several)) for kind, several in kinds.items()}
    every = joined(new for new, _ in timings.values()), joined(known for _, known in timings.values())
    timings["all"] = every

    rows = [
        (kind, f"{new.median * 1e3:.0f}", f"{new.least * 1e3:.0f}", f"{known.median * 1e3:.1f}")
        for kind, (new, known) in timings.items()
    ]
    missed = [
        f"{name}: {timing.median * 1e3:.0f} ms, target {target * 1e3:.0f}"
        for name, timing, target in zip(("simulated", "from the cache"), every, (NEW, KNOWN), strict=True)
        if timing.median > target
    ]
    rows.append(("target, of the median", f"{NEW * 1e3:.0f}", "", f"{KNOWN * 1e3:.0f}"))
    outcome = "\n".join(f"Missed: {line}." for line in missed) or "Both targets are met."
    sizes = ", ".join(f"{name} {explorer.values[name]}" for name in ("depth", "width", "context"))
    publish(
        "explorer",
        f"## How fast the explorer answers\n\nThe teaching GPT ({sizes}), on a simulated GPU; {len(kinds)} kinds of "
        f"moves, {len(every[0].seconds)} in all.\n\n"
        + table(("moved", "simulated: ms, median", "least", "from the cache: ms, median"), rows)
        + f"\n\n{outcome}",
        {kind: {"simulated": new.summary, "cached": known.summary} for kind, (new, known) in timings.items()},
        store=not options.quick,
    )
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
