"""Simulated peaks held against a real GPU's: the result that this version ships.

`benchmarks/cuda_check.py` writes `data/cuda_check.json` on a machine with a GPU; `said()` is what documentation quotes
of it. There is no such file where no GPU was at hand.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
from dataclasses import dataclass
from typing import Any

TOLERANCE = 0.02  # of the real peak
_NOBODY = (
    "No GPU was at hand when this version was made. What it says of CUDA is checked against what CUDA's own dispatch "
    "keeps for backward, to the byte, but not against the peaks of a real device: `python benchmarks/cuda_check.py` "
    "does that on a machine with a GPU."
)


@dataclass(frozen=True)
class Peaks:
    """What memlab says of one step, simulated or measured: bytes, and the fused attention kernels that ran."""

    peak: int
    tensor_peak: int
    saved: int
    attention: str


@dataclass(frozen=True)
class Real:
    """One step on the GPU.

    The first three are the caching allocator's, of a step that nobody watches: `torch.cuda.max_memory_allocated()`,
    from which nothing is subtracted; the largest sum of what was asked for, before it was rounded to blocks; and the
    part of it that libraries keep from step to step and that is no tensor of the step's (cuBLAS's workspace).
    """

    allocated_peak: int
    requested_peak: int
    kept_workspace: int
    operator_workspace: int  # allocated inside one operator, at the measured peak
    measured: Peaks


@dataclass(frozen=True)
class Row:
    network: str
    strategy: str
    simulated: Peaks
    real: Real

    @property
    def difference(self) -> float:
        """Simulated (tensors and rounding) against real, without the workspace that libraries keep; 0.01 is 1 %."""
        return self.simulated.peak / self._expected - 1

    @property
    def whole_difference(self) -> float:
        """The same with all that the allocator counts."""
        return self.simulated.peak / self.real.allocated_peak - 1

    @property
    def is_near(self) -> bool:
        return abs(self.simulated.peak - self._expected) <= TOLERANCE * self._expected

    @property
    def _expected(self) -> int:
        return self.real.allocated_peak - self.real.kept_workspace


@dataclass(frozen=True)
class Check:
    """`about` has the device, its compute capability, versions and the date."""

    about: dict[str, Any]
    rows: tuple[Row, ...]

    def said(self) -> str:
        """The outcome in a sentence or two."""
        near, worst = sum(row.is_near for row in self.rows), max(self.rows, key=lambda row: abs(row.difference))
        about = self.about
        return (
            f"Checked on {about['device']} (compute capability {about['capability']}, torch {about['torch']}, CUDA "
            f"{about['cuda']}, {about['date']}): {near} of {len(self.rows)} simulated peaks are within "
            f"{TOLERANCE:.0%} of the real ones; the farthest, {worst.network} with {worst.strategy}, is "
            f"{worst.difference:+.1%} off. Left out on both sides is the workspace that cuBLAS keeps "
            f"({about['cublas_workspace'] / 2**20:.1f} MiB there)."
        )

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"


def from_json(text: str) -> Check:
    given = json.loads(text)
    return Check(given["about"], tuple(map(_row, given["rows"])))


def _row(given: dict[str, Any]) -> Row:
    real = given["real"]
    return Row(
        given["network"],
        given["strategy"],
        Peaks(**given["simulated"]),
        Real(**{**real, "measured": Peaks(**real["measured"])}),
    )


def stored() -> Check | None:
    """The check that this version ships, if one was made."""
    file = importlib.resources.files("memlab") / "data" / "cuda_check.json"
    return from_json(file.read_text()) if file.is_file() else None


def said() -> str:
    """What documentation says of it: on which device it was checked and how near it is, or that none was at hand."""
    check = stored()
    return _NOBODY if check is None else check.said()
