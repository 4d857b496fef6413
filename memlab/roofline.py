"""How long a step takes on a device at least: an estimate from its arithmetic and its traffic, without the device.

The roofline model (Williams, Waterman and Patterson 2009): an operator takes the longer of two times, that of its
floating-point operations at the device's peak and that of the bytes it moves at the memory's bandwidth. A step takes
the sum over its operators. No kernel reaches the roof, small ones wait for their launch, and nothing here overlaps or
stays in a cache: as a rule the truth is above, and the ratio of two estimates is nearer to it than either.

Rule 1. Peaks are those of datasheets, dense: NVIDIA's figures "with sparsity" are twice as high.
Rule 2. Precision is PyTorch's default: matrix products of float32 in full precision, convolutions and recurrent layers
        in TF32 where there are tensor cores for it.
Rule 3. A type without a figure computes at the peak of float32.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import MemlabError
from .trace import PHASES, Trace
from .units import GiB


@dataclass(frozen=True)
class Device:
    """What the roofline needs to know of a device.

    memory:       bytes
    bandwidth:    of that memory, bytes a second
    flops:        peak floating-point operations a second, by type: "float32", and "bfloat16", "float16", "float64",
                  "tf32" where they have a peak of their own
    source:       where the figures are from
    """

    memory: int
    bandwidth: float
    flops: Mapping[str, float]
    name: str = "a device of your own"
    source: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.flops, Mapping) or "float32" not in self.flops:
            raise MemlabError(f"flops is {self.flops!r}: give peaks by type, {{'float32': 19.5e12, ...}}")
        for what, value in (("memory", self.memory), ("bandwidth", self.bandwidth), *self.flops.items()):
            if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
                raise MemlabError(f"{what} of {self.name} is {value!r}: give a number above 0")

    def seconds(self, flops: int, moved_bytes: int, kind: str) -> float:
        """The least time for so many operations on numbers of that kind, and for moving so many bytes."""
        return max(flops / self.flops.get(kind, self.flops["float32"]), moved_bytes / self.bandwidth)


def _device(name: str, gib: int, gigabytes: float, source: str, **teraflops: float) -> Device:
    return Device(gib * GiB, gigabytes * 1e9, {kind: tera * 1e12 for kind, tera in teraflops.items()}, name, source)


def _of_hopper(name: str, gib: int, gigabytes: float, source: str) -> Device:
    return _device(
        name, gib, gigabytes, source, float32=67, tf32=494.7, bfloat16=989.4, float16=989.4, float64=67
    )  # fmt: skip


# Of float16 and bfloat16 the figure is that of tensor cores that add up in float32, as PyTorch has them do; of float64
# it is that of tensor cores where they have it. Where the sheet has no float64, it follows from the whitepaper's ratio
# of units: a 32nd of float32 in Turing, a 64th in GA102 and Ada.
DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        _device("T4", 16, 320, "NVIDIA T4 datasheet, 2019; float64: Turing architecture whitepaper, 2018",
                float32=8.1, float16=65, float64=8.1 / 32),
        _device("V100 16GB", 16, 900, "NVIDIA V100 datasheet, 2020: SXM2",
                float32=15.7, float16=125, float64=7.8),
        _device("V100 32GB", 32, 900, "NVIDIA V100 datasheet, 2020: SXM2",
                float32=15.7, float16=125, float64=7.8),
        _device("L4", 24, 300, "NVIDIA L4 datasheet, 2023; float64: Ada architecture whitepaper, 2022",
                float32=30.3, tf32=60, bfloat16=121, float16=121, float64=30.3 / 64),
        _device("A10", 24, 600, "NVIDIA A10 datasheet, 2021; float64: GA102 architecture whitepaper, 2020",
                float32=31.2, tf32=62.5, bfloat16=125, float16=125, float64=31.2 / 64),
        _device("A100 40GB", 40, 1555, "NVIDIA A100 datasheet, 2021: SXM",
                float32=19.5, tf32=156, bfloat16=312, float16=312, float64=19.5),
        _device("A100 80GB", 80, 2039, "NVIDIA A100 datasheet, 2021: SXM",
                float32=19.5, tf32=156, bfloat16=312, float16=312, float64=19.5),
        _of_hopper("H100 SXM", 80, 3350, "NVIDIA H100 datasheet, 2023: SXM5"),
        _device("H100 PCIe", 80, 2000, "NVIDIA H100 datasheet, 2023: PCIe",
                float32=51, tf32=378, bfloat16=756, float16=756, float64=51),
        _of_hopper("H200", 141, 4800, "NVIDIA H200 datasheet, 2024: SXM"),
        _device("RTX 3090", 24, 936, "NVIDIA GA102 architecture whitepaper, 2020",
                float32=35.6, tf32=35.6, bfloat16=71, float16=71, float64=35.6 / 64),
        _device("RTX 4090", 24, 1008, "NVIDIA Ada architecture whitepaper, 2022",
                float32=82.6, tf32=82.6, bfloat16=165.2, float16=165.2, float64=82.6 / 64),
    )
}  # fmt: skip
_SHORT = {"v100": "V100 16GB", "a100": "A100 40GB", "h100": "H100 SXM", "3090": "RTX 3090", "4090": "RTX 4090"}
_IN_TF32 = re.compile("convolution|rnn")  # operators of cuDNN


def device_named(device: str | Device) -> Device:
    """A device of the table, by its name in any case, with or without blanks and dashes (`"a100-80gb"`); of several
    variants the first (`"A100"` has 40 GiB). A `Device` is returned as it is; MemlabError for what is neither."""
    if isinstance(device, Device):
        return device
    wanted = _squeezed(str(device))
    name = _SHORT.get(wanted) or next((name for name in DEVICES if _squeezed(name) == wanted), None)
    if name is None:
        raise MemlabError(
            f"{device!r} is no device that memlab knows: {', '.join(DEVICES)}; or give figures of your own, "
            "memlab.roofline.Device(memory, bandwidth, {'float32': ...})"
        )
    return DEVICES[name]


def _squeezed(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


def seconds(trace: Trace, device: str | Device = "A100", phase: str | None = None) -> float:
    """An estimate of how long the trace's operators take on a device, at least, in seconds; `phase` restricts it to one
    of `PHASES`."""
    device = device_named(device)
    if phase is not None and phase not in PHASES:
        raise MemlabError(f"phase is {phase!r}: there are {', '.join(PHASES)}")
    if not any(operator.moved_bytes for operator in trace.operators):
        raise MemlabError(
            "nobody counted the arithmetic of this trace, so that its time cannot be estimated: measure() and "
            "simulate() count it, record() and memory snapshots do not"
        )
    return math.fsum(
        device.seconds(operator.flops, operator.moved_bytes, _kind(operator.dtype, operator.place.operator))
        for operator in trace.operators
        if phase is None or operator.place.phase == phase
    )


def _kind(dtype: str, operator: str) -> str:
    return "tf32" if dtype == "float32" and _IN_TF32.search(operator) else dtype


def recompute_overhead(trace: Trace, device: str | Device = "A100") -> float:
    """An estimate of what recomputation adds to a step: its time over that of the rest (0.26: 26 % more)."""
    whole, again = seconds(trace, device), seconds(trace, device, "recompute")
    return again / (whole - again)
