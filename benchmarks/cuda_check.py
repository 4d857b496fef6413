"""How near a real GPU's peaks the simulated ones are: four networks, eight sums of strategies.

    python benchmarks/cuda_check.py              on a machine with a GPU; under five minutes
    python benchmarks/cuda_check.py --dry-run    the simulated half alone, anywhere
    python benchmarks/cuda_check.py --small      networks of a few MiB: to try the script, not to judge by

The real peak is `torch.cuda.max_memory_allocated()` of a step in the steady state that nobody watches, nothing
subtracted. In it are the workspaces that cuBLAS takes at the first matrix product of each thread (forward and backward
have one each) and keeps: no simulation has them, so they have a column of their own. It is the allocator's sum of what
was asked for, between two steps, less the step's own tensors; a first matrix product in the fresh process, before and
after, says how large it has to be. `difference` leaves it out, `with workspace` does not.

`in tensors` holds the simulated tensor peak against that of `memlab.measure` on the GPU, where no rounding and no
workspace is. What remains of `difference` is then rounding: the allocator does not split the last 1 MiB off a block.

The result, with device, versions and date, is stored in `memlab/data/cuda_check.json`, which the package ships. Exit
status 1 if a row is more than 2 % off; 0 where there is no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _timing import publish, table
from torch import nn

import memlab
from memlab import nest, zoo
from memlab.cuda_check import Check, Peaks, Real, Row, stored
from memlab.measure import Stage, trace
from memlab.strategies import Strategy
from memlab.units import format_bytes

sys.path.append(str(Path(__file__).parent.parent))  # the tests are no package that is installed
from tests.cuda_reference.networks import Llama
from tests.truth import distinct_bytes, state_tensors

FILE = Path(memlab.__file__).parent / "data" / "cuda_check.json"
SECONDS = 280  # after which no new row is begun
STRATEGIES: list[Strategy] = [
    memlab.Baseline(),
    memlab.Checkpoint(),
    memlab.MicroBatch(count=4),
    memlab.OptimizerInBackward(),
    memlab.MixedPrecision("bf16"),
    memlab.MixedPrecision("fp16"),
    memlab.LowPrecision("bf16"),
    memlab.Checkpoint() + memlab.MicroBatch(count=4) + memlab.MixedPrecision("bf16"),
]


# -- the networks ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Network:
    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    loss: Callable[[Any, Any], torch.Tensor]

    def on(self, device: str) -> memlab.TrainingStep:
        """The step with its model there."""
        batch = tuple(tensor.to(device) for tensor in self.batch())
        return memlab.TrainingStep(self.build().to(device), batch, self.loss, torch.optim.AdamW)

    def to_be_simulated(self) -> memlab.TrainingStep:
        return memlab.TrainingStep(self.build, self.batch, self.loss, torch.optim.AdamW)


def networks(small: bool) -> dict[str, Network]:
    """Peaks of about 2 GiB in the plain step and of more than 100 MiB in every other; or of a few MiB."""
    size = 8 if small else 1
    width, layers, batch, context, vocab = 512 // size, 2 if small else 8, 8, 512 // size, 8192 // size

    def tokens() -> tuple[torch.Tensor, torch.Tensor]:
        shape = batch, context
        return torch.randint(vocab, shape), torch.randint(vocab, shape)

    def images() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.rand(64 // size, 3, 64 // size, 64 // size), torch.randint(10, (64 // size,))

    def encoder() -> nn.Module:
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.1, batch_first=True)
        stack = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        return nn.Sequential(nn.Embedding(vocab, width), stack, nn.Linear(width, vocab))

    return {
        "GPT": Network(lambda: zoo.GPT(vocab, context, width, layers, heads=8), tokens, zoo.gpt_loss),
        "Llama-shaped": Network(
            lambda: Llama(vocab=vocab, d=width, h=8, n=layers, ff=width * 8 // 3, T=context, kv=4),
            tokens,
            lambda model, batch: model(*batch),
        ),
        "ResNet": Network(lambda: zoo.ResNet(3, 64 // size, depth=6), images, zoo.classification_loss),
        "encoder with dropout": Network(
            encoder, tokens, lambda model, batch: F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())
        ),
    }


# -- the two halves ----------------------------------------------------------------------------------------------------


def simulated(network: Network) -> dict[str, Peaks | str]:
    """By strategy; a sentence for what cannot run."""
    rows = memlab.compare(network.to_be_simulated(), STRATEGIES, simulated=True).rows
    return {repr(row.strategy): peaks(row.trace) if row.trace else str(row.error) for row in rows}


def real(stage: Stage, strategy: Strategy) -> Real:
    """One strategy on a stage whose model is on the GPU."""
    with stage.applied(strategy) as runner:
        runner.run()  # libraries take their workspace
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        kept = torch.cuda.memory_stats()["requested_bytes.all.current"] - own_bytes(stage.step, runner.batch)
        runner.run()
        torch.cuda.synchronize()
        allocated = torch.cuda.max_memory_allocated()
        requested = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    measured = trace(stage, strategy)
    workspace = measured.by_category().get("workspace", 0)
    return Real(allocated, requested, kept, workspace, peaks(measured))


def own_bytes(step: memlab.TrainingStep, batch: Any) -> int:
    """Of the step's tensors that are there between two steps."""
    held = [*step.model.parameters(), *step.model.buffers(), *nest.tensors(batch), *state_tensors(step.optimizer)]
    return distinct_bytes([tensor for tensor in held if tensor.device == step.device])


def peaks(made: memlab.Trace) -> Peaks:
    names = " ".join(sorted({operator.place.operator for operator in made.operators}))
    kernels = dict.fromkeys(re.findall(r"scaled_dot_product_(flash|efficient|cudnn)_attention", names))
    return Peaks(made.peak_bytes, made.tensor_peak_bytes, made.saved_bytes, ", ".join(kernels) or "none fused")


def rows(name: str, network: Network, device: str, until: float, left_out: list[str]) -> Iterator[Row]:
    """One network's rows; `left_out` gets a sentence for each that is missing."""
    foretold = simulated(network)
    with Stage(network.on(device)) as stage:
        for strategy in STRATEGIES:
            expected = foretold[repr(strategy)]
            if isinstance(expected, str):
                left_out.append(f"{name}, {strategy!r}: {expected}")
            elif time.monotonic() > until:
                left_out.append(f"{name}, {strategy!r}: the time was over")
            elif "bf16" in repr(strategy) and not torch.cuda.is_bf16_supported(including_emulation=False):
                left_out.append(f"{name}, {strategy!r}: this device only emulates bf16")
            else:
                yield Row(name, repr(strategy), expected, real(stage, strategy))


def cublas_workspace(device: str) -> int:
    """Bytes that first matrix products, forward and backward, leave allocated in a process that has made none."""
    before = torch.cuda.memory_allocated()
    for dtype in (torch.float32, torch.float16):
        factor = torch.ones(64, 64, device=device, dtype=dtype, requires_grad=True)
        F.linear(factor, factor, factor[0]).sum().backward()
        del factor
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() - before


def about(workspace: int) -> dict[str, Any]:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, check=True, capture_output=True, text=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        driver = "unknown"
    return {
        "device": torch.cuda.get_device_name(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "driver": driver,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "memlab": memlab.__version__,
        "date": datetime.date.today().isoformat(),
        "cublas_workspace": workspace,
    }


# -- the tables --------------------------------------------------------------------------------------------------------


def comparison(rows: list[Row]) -> str:
    header = ("network", "strategy", "real peak", "workspace kept", "simulated", "difference", "with workspace")
    header += ("in tensors", "saved", "in operators", "attention: real, simulated", "")
    return table(header, [_cells(row) for row in rows])


def _cells(row: Row) -> tuple[str, ...]:
    real, made = row.real, row.simulated
    return (
        row.network,
        row.strategy,
        format_bytes(real.allocated_peak),
        format_bytes(real.kept_workspace),
        format_bytes(made.peak),
        f"{row.difference:+.2%}",
        f"{row.whole_difference:+.2%}",
        f"{made.tensor_peak - real.measured.tensor_peak:+,} B",
        f"{made.saved - real.measured.saved:+,} B",
        format_bytes(real.operator_workspace),
        f"{real.measured.attention}, {made.attention}",
        "" if row.is_near else "FAR",
    )


def foretold(found: dict[str, dict[str, Peaks | str]]) -> str:
    """The simulated half."""
    header = ("network", "strategy", "simulated peak", "of it rounding", "saved for backward", "attention")
    cells = []
    for name, by_strategy in found.items():
        for strategy, said in by_strategy.items():
            shown = (said, "", "", "")
            if isinstance(said, Peaks):
                sizes = said.peak, said.peak - said.tensor_peak, said.saved
                shown = (*map(format_bytes, sizes), said.attention)
            cells.append((name, strategy, *shown))
    return table(header, cells)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dry-run", action="store_true", help="the simulated half alone")
    parser.add_argument("--small", action="store_true", help="networks of a few MiB; stores nothing")
    options = parser.parse_args(arguments)
    chosen = networks(options.small)

    if options.dry_run:
        print(foretold({name: simulated(network) for name, network in chosen.items()}))
        return 0
    if not torch.cuda.is_available():
        print(
            "There is no CUDA device here, so nothing was compared. Run this on a machine with a GPU; --dry-run shows "
            "the simulated half anywhere."
        )
        return 0

    until, left_out, found = time.monotonic() + SECONDS, [], []
    workspace = cublas_workspace("cuda")
    for name, network in chosen.items():
        found += rows(name, network, "cuda", until, left_out)
        torch.cuda.empty_cache()
    check = Check(about(workspace), tuple(found))
    report(check, left_out, store=not options.small)
    return 0 if all(row.is_near for row in check.rows) else 1


def report(check: Check, left_out: list[str], store: bool) -> None:
    """Print the result; and store it, for the package and with the other benchmarks."""
    words = ", ".join(f"{key} {value}" for key, value in check.about.items())
    missing = "".join(f"Left out: {sentence}\n\n" for sentence in left_out)
    text = f"## Simulated and real CUDA peaks\n\n{check.said()}\n\n{comparison(list(check.rows))}\n\n{missing}{words}."
    if store:
        FILE.parent.mkdir(exist_ok=True)
        FILE.write_text(check.to_json())
        assert stored() == check
    publish("cuda_check", text, {"left_out": left_out}, store=store)


if __name__ == "__main__":
    raise SystemExit(main())
