"""What the benchmarks share: contenders timed side by side, and results written down.

Rules:

1. Contenders take turns (A B C, A B C, ...), so that whatever else the machine does falls on all of them alike.
2. The garbage collector runs between the timed regions, never inside.
3. On one thread, seconds are the processor's (`time.process_time`): other programs then count only through the caches
   and the memory bus. On several threads they are the clock on the wall.
4. Results are ratios of one run. Neither machine nor paths are written down; versions, threads and processors are.
"""

from __future__ import annotations

import datetime
import gc
import json
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parent / "README.md"


@dataclass(frozen=True)
class Timing:
    """The seconds that one contender took, turn by turn."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def least(self) -> float:
        return min(self.seconds)

    @property
    def spread(self) -> float:
        """The distance between the quartiles, as a part of the median: how noisy the machine was."""
        first, _, third = statistics.quantiles(self.seconds)
        return (third - first) / self.median

    @property
    def summary(self) -> dict[str, float]:
        return {"rounds": len(self.seconds), "median": self.median, "least": self.least, "spread": self.spread}


def interleaved(contenders: dict[str, Callable[[], object]], repeats: int) -> dict[str, Timing]:
    """Each contender's timing over `repeats` rounds, after one round that is not counted (Rules 1 to 3)."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats + 1):
        for name, run in contenders.items():
            gc.collect()
            gc.disable()
            try:
                start = clock()
                run()
                seconds[name].append(clock() - start)
            finally:
                gc.enable()
    return {name: Timing(tuple(taken[1:])) for name, taken in seconds.items()}


def setting() -> dict[str, Any]:
    """What a reader must know of the run, and no more (Rule 4)."""
    return {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "processors": os.cpu_count(),
    }


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, padded so that it reads well in a terminal too."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    padded = [" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    rule = " | ".join("-" * width for width in widths)
    return "\n".join(f"| {line} |" for line in [padded[0], rule, *padded[1:]])


def publish(name: str, text: str, values: dict[str, Any], store: bool = True) -> None:
    """Print a result; and `store` it in `results/`, for people (.md) and programs (.json), and in the README."""
    about = setting()
    words = ", ".join(f"{key} {value}" for key, value in about.items())
    page = f"{text.strip()}\n\nSetting: {words}.\n"
    print(page)
    if store:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.md").write_text(page)
        (RESULTS / f"{name}.json").write_text(json.dumps({"setting": about} | values, indent=1) + "\n")
        between = re.compile(f"(?<=<!-- {name} -->\n).*?(?=<!-- end -->)", re.DOTALL)
        README.write_text(between.sub(lambda _: f"\n{page}\n", README.read_text()))
