"""What `import memlab` costs on top of `import torch`, in fresh processes.

    python benchmarks/import_time.py

Each process imports torch, then times `import memlab`. Two more run under `-X importtime`, which says which modules the
time goes to. Exit status 1 if the median is above the target.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass

from _timing import Timing, publish, table

TARGET = 0.1  # seconds
_PROCESSES = 11
_TIMED = """
import time, torch
start = time.process_time()
import memlab
print(time.process_time() - start)
"""


@dataclass(frozen=True)
class Imported:
    """One module as `-X importtime` lists it: seconds of its own, and with what it imported first."""

    name: str
    own: float
    total: float


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], check=True, capture_output=True, text=True)


def timing() -> Timing:
    _python("-c", "import memlab")  # writes the byte code, which every later import finds
    return Timing(tuple(float(_python("-c", _TIMED).stdout) for _ in range(_PROCESSES)))


def imported_beyond_torch() -> list[Imported]:
    """The modules that `import memlab` brings in after torch, the costliest first."""
    listing = _python("-X", "importtime", "-c", "import torch; import memlab").stderr
    rows = re.findall(r"^import time:\s+(\d+) \|\s+(\d+) \|\s+(\S+)$", listing, re.MULTILINE)
    found = [Imported(name, int(own) / 1e6, int(total) / 1e6) for own, total, name in rows]
    torch_ended = next(number for number, module in enumerate(found) if module.name == "torch")
    return sorted(found[torch_ended + 1 :], key=lambda module: -module.own)


def main() -> int:
    taken = timing()
    _, modules = imported_beyond_torch(), imported_beyond_torch()  # the first warms the disk's cache
    verdict = "met" if taken.median <= TARGET else "MISSED"
    summary = table(
        ("", "ms, median", "ms, least", "target", "verdict"),
        [("import memlab", f"{taken.median * 1e3:.0f}", f"{taken.least * 1e3:.0f}", f"{TARGET * 1e3:.0f}", verdict)],
    )
    costliest = table(
        ("module", "ms of its own", "ms with what it imports"),
        [(module.name, f"{module.own * 1e3:.1f}", f"{module.total * 1e3:.1f}") for module in modules[:10]],
    )
    publish(
        "import_time",
        f"## What `import memlab` costs beyond torch\n\n{_PROCESSES} fresh processes, processor time.\n\n{summary}\n\n"
        f"Where it goes ({len(modules)} modules; `-X importtime`, which itself costs time):\n\n{costliest}",
        taken.summary | {"modules": [vars(module) for module in modules[:10]]},
    )
    return 0 if verdict == "met" else 1


if __name__ == "__main__":
    raise SystemExit(main())
