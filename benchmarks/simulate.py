"""What a simulation costs and how exact it is: a 7B and a 70B language model's training step on this machine's CPU.

    python benchmarks/simulate.py             about five minutes
    python benchmarks/simulate.py --quick     two layers and one network, nothing stored: a smoke test, too small to
                                              judge by

Three questions:

- *Speed.* `memlab.simulate` of a Llama-shaped 7B with AdamW, against as many steps (two: one makes the optimizer's
  state) on PyTorch's fake tensors with nobody watching, and against torch's MemTracker over the same two steps. Each
  builds its model anew; the bare steps and MemTracker's have the optimizer's form of the simulation beside them.
- *Size.* The resident memory of a process that does nothing but one simulation, and its seconds; for a 70B too.
- *Exactness.* The tensor peak simulated and measured, for the networks of the lessons under many strategies.

Exit status 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _timing import Timing, interleaved, publish, table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

import memlab
from memlab import zoo
from memlab.units import format_bytes

sys.path.append(str(Path(__file__).parent.parent))  # the tests are no package that is installed
from tests.cuda_reference.networks import Llama

STEPS = 2  # as many as a simulation runs
CONTEXT = 4096
SIZES: dict[str, dict[str, int]] = {
    "7B": {"vocab": 32000, "d": 4096, "h": 32, "n": 32, "ff": 11008},
    "70B": {"vocab": 32000, "d": 8192, "h": 64, "kv": 8, "n": 80, "ff": 28672},
}
MOST_RATIO, LEAST_SPEEDUP, MOST_RESIDENT, MOST_SECONDS = 1.5, 5.0, 500 * 10**6, 20.0


# -- the contenders ----------------------------------------------------------------------------------------------------


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(1, CONTEXT, dtype=torch.long), torch.zeros(1, CONTEXT, dtype=torch.long)


def loss(model: Any, batch: Any) -> Any:
    return model(*batch)


def simulated(sizes: dict[str, int], device: Any) -> memlab.Trace:
    step = memlab.TrainingStep(lambda: Llama(T=CONTEXT, **sizes), batch, loss, torch.optim.AdamW)
    return memlab.simulate(step, device=device)


def bare(sizes: dict[str, int], foreach: bool, tracker: MemTracker | None = None) -> None:
    """The same steps as a person writes them, on fake tensors; under `tracker` where there is one."""
    with FakeTensorMode():
        model, inputs = Llama(T=CONTEXT, **sizes), batch()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
        if tracker is None:
            train(model, optimizer, inputs)
        else:
            tracker.track_external(model, optimizer, *inputs)
            with tracker:
                train(model, optimizer, inputs, between=tracker.reset_mod_stats)  # or a second step is refused


def train(model: Any, optimizer: Any, inputs: Any, between: Callable[[], object] = lambda: None) -> None:
    for _ in range(STEPS):
        between()
        model(*inputs).backward()
        optimizer.step()
        optimizer.zero_grad()


def tracked(sizes: dict[str, int]) -> int:
    """MemTracker's answer: bytes at the peak."""
    tracker = MemTracker()
    bare(sizes, foreach=False, tracker=tracker)
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


BARE, CPU = "bare fake steps, optimizer in a loop", 'memlab.simulate, device="cpu"'
BARE_FOREACH, CUDA = "bare fake steps, optimizer foreach", 'memlab.simulate, device="cuda"'
TRACKER = f"MemTracker of torch {torch.__version__}"


Timings = dict[str, Timing]


def speed(sizes: dict[str, int], rounds: int) -> tuple[Timings, Timings, dict[str, int]]:
    """Seconds of each contender; MemTracker, which takes long, in fewer rounds beside a simulation; and the peaks of
    those that answer."""
    peaks: dict[str, int] = {}

    def answered(name: str, run: Callable[[], int]) -> Callable[[], object]:
        return lambda: peaks.update({name: run()})

    on_cpu = answered(CPU, lambda: simulated(sizes, "cpu").tensor_peak_bytes)
    timings = interleaved(
        {
            BARE: lambda: bare(sizes, foreach=False),
            CPU: on_cpu,
            BARE_FOREACH: lambda: bare(sizes, foreach=True),
            CUDA: answered(CUDA, lambda: simulated(sizes, "cuda").tensor_peak_bytes),
        },
        rounds,
    )
    beside = interleaved({CPU: on_cpu, TRACKER: answered(TRACKER, lambda: tracked(sizes))}, 2)
    return timings, beside, peaks


# -- a process of its own ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Alone:
    """One simulation in a process that does nothing else."""

    seconds: float
    resident_bytes: int
    tensor_peak_bytes: int


def alone(sizes: dict[str, int], device: str) -> Alone:
    command = [sys.executable, __file__, "--alone", json.dumps(sizes), device]
    return Alone(**json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def print_alone(sizes: str, device: str) -> None:
    """What that process does."""
    start = time.process_time()
    trace = simulated(json.loads(sizes), device)
    seconds = time.process_time() - start
    print(json.dumps(vars(Alone(seconds, most_resident(), trace.tensor_peak_bytes))))


def most_resident() -> int:
    """Bytes of this process's peak resident memory. `ru_maxrss`, which other systems have, may on Linux be that of the
    process that started this one."""
    status = Path("/proc/self/status")
    if not status.exists():
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


# -- exactness ---------------------------------------------------------------------------------------------------------

_PRECISIONS = [
    memlab.Baseline(),
    memlab.MixedPrecision("bf16"),
    memlab.MixedPrecision("fp16"),
    memlab.LowPrecision("bf16"),
]
_HOW = [
    memlab.Baseline(),
    memlab.Checkpoint(),
    memlab.MicroBatch(count=4),
    memlab.OptimizerInBackward(),
    memlab.Checkpoint() + memlab.MicroBatch(count=4),
    memlab.Checkpoint() + memlab.OptimizerInBackward(),
]
NETWORKS: dict[str, Callable[[], memlab.TrainingStep]] = {
    "GPT": lambda: zoo.gpt_step(batch=8, context=32, width=64, depth=2),
    "GPT with dropout": lambda: zoo.gpt_step(batch=8, context=32, width=64, depth=2, dropout=0.1),
    "ResNet": lambda: zoo.resnet_step(batch=16, width=16, depth=2),
    "MLP": lambda: zoo.mlp_step(batch=16),
    "LSTM": lambda: zoo.lstm_step(batch=8, context=16, width=32),
}


@dataclass(frozen=True)
class Pair:
    strategy: str
    measured: int
    simulated: int


def pairs(network: str) -> Iterator[Pair]:
    """Both tensor peaks, for each sum of strategies that can run there."""
    step = NETWORKS[network]()
    for precision in _PRECISIONS:
        for how in _HOW:
            try:
                strategy = precision + how
                real = memlab.measure(step, strategy, allocator=False)
            except (memlab.MemlabError, RuntimeError):  # an LSTM has no blocks, and no low precision on some CPUs
                continue
            fake = memlab.simulate(step, strategy, device="cpu")
            yield Pair(repr(strategy), real.tensor_peak_bytes, fake.tensor_peak_bytes)


# -- the tables --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    what: str
    found: str
    target: str
    met: bool

    @property
    def row(self) -> tuple[str, str, str, str]:
        return self.what, self.found, self.target, "met" if self.met else "MISSED"


def verdicts(timings: Timings, beside: Timings, processes: dict[tuple[str, str], Alone]) -> Iterator[Verdict]:
    for ours, theirs in ((CPU, BARE), (CUDA, BARE_FOREACH)):
        ratio = timings[ours].median / timings[theirs].median
        yield Verdict(f"{ours}, to as many {theirs}", f"{ratio:.2f}", f"at most {MOST_RATIO}", ratio <= MOST_RATIO)
    faster = beside[TRACKER].median / beside[CPU].median
    yield Verdict(f"{CPU}, faster than {TRACKER}", f"{faster:.1f} x", f"{LEAST_SPEEDUP:.0f} x", faster >= LEAST_SPEEDUP)
    for (size, device), one in processes.items():
        if size == "7B":
            found, most = (f"{nbytes / 10**6:.0f} MB" for nbytes in (one.resident_bytes, MOST_RESIDENT))
            yield Verdict(f"7B, {device}: resident memory", found, f"under {most}", one.resident_bytes < MOST_RESIDENT)
        else:
            seconds = f"{one.seconds:.1f}"
            yield Verdict(f"70B, {device}: seconds", seconds, f"under {MOST_SECONDS:.0f}", one.seconds < MOST_SECONDS)


def speed_table(timings: Timings, beside: Timings, peaks: dict[str, int]) -> str:
    rows = [(name, f"{timing.median:.2f}", _peak(peaks, name)) for name, timing in timings.items()]
    rows += [(f"{name}, beside", f"{timing.median:.2f}", _peak(peaks, name)) for name, timing in beside.items()]
    return table(("", "s, median", "tensor peak"), rows)


def _peak(peaks: dict[str, int], name: str) -> str:
    return f"{peaks[name]:,} B" if name in peaks else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two layers and one network, nothing stored")
    parser.add_argument("--alone", nargs=2, metavar=("SIZES", "DEVICE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.alone:
        print_alone(*options.alone)
        return 0
    sizes = {name: size | {"n": 2} if options.quick else size for name, size in SIZES.items()}

    timings, beside, peaks = speed(sizes["7B"], rounds=2 if options.quick else 6)
    processes = {(size, device): alone(sizes[size], device) for size in sizes for device in ("cpu", "cuda")}
    judged = list(verdicts(timings, beside, processes))
    exact = {network: list(pairs(network)) for network in list(NETWORKS)[: 1 if options.quick else None]}

    in_processes = [
        (
            f"{size}, {device}",
            f"{one.seconds:.1f}",
            f"{one.resident_bytes / 10**6:.0f} MB",
            format_bytes(one.tensor_peak_bytes),
        )
        for (size, device), one in processes.items()
    ]
    equal = {network: sum(pair.measured == pair.simulated for pair in found) for network, found in exact.items()}
    exactness = [
        (
            network,
            f"{equal[network]} of {len(found)}",
            f"{max(abs(pair.measured - pair.simulated) for pair in found)} B",
        )
        for network, found in exact.items()
    ]
    missed = [verdict for verdict in judged if not verdict.met]
    outcome = f"{sum(equal.values())} of {sum(map(len, exact.values()))} rows are equal to the byte."
    text = "\n\n".join(
        [
            "## What a simulation costs, and how exact it is",
            table(("", "found", "target", "verdict"), [verdict.row for verdict in judged]),
            f"**Speed**: a Llama-shaped 7B, context {CONTEXT}, AdamW, built and trained for {STEPS} steps; "
            f"{len(timings[BARE].seconds)} rounds, {len(beside[CPU].seconds)} with MemTracker. Each simulation is held "
            "against the bare steps whose optimizer has the same form.",
            speed_table(timings, beside, peaks),
            "**One simulation in a process of its own** (the processor's seconds, on one thread; Python and torch are "
            "in the memory).",
            table(("", "s", "resident memory", "tensor peak"), in_processes),
            "**Exactness**: the tensor peak simulated, against the measured one, for each precision (fp32, autocast to "
            "bf16 and fp16, pure bf16) with each of: nothing, checkpoints, 4 micro-batches, the optimizer in backward, "
            f"and their sums; those that can run. {outcome}",
            table(("", "rows equal", "largest difference"), exactness),
        ]
    )
    values = {
        "speed": {name: timing.summary for name, timing in timings.items()},
        "beside MemTracker": {name: timing.summary for name, timing in beside.items()},
        "peaks": peaks,
        "alone": {f"{size}, {device}": vars(one) for (size, device), one in processes.items()},
        "exactness": {network: [vars(pair) for pair in found] for network, found in exact.items()},
        "verdicts": [vars(verdict) for verdict in judged],
    }
    publish("simulate", text, values, store=not options.quick)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
