"""What the commands of the command line do: each takes the words that were read, works, and prints."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path

from .compare import Comparison, Row, compare
from .errors import MemlabError
from .files.store import load
from .measure import measure
from .named import NETWORKS, step_named, users_code
from .roofline import DEVICES, Device, device_named
from .step import TrainingStep
from .strategies import parse
from .trace import Trace
from .units import GiB, format_bytes, format_seconds, parse_bytes
from .views.table import unit
from .views.words import ESTIMATE, estimate, percent

STRATEGIES = (
    "checkpoint",
    "micro-batch(4)",
    "bf16",
    "pure-bf16",
    "optimizer-in-backward",
    "checkpoint + micro-batch(4)",
    "checkpoint + bf16",
    "checkpoint + optimizer-in-backward",
    "checkpoint + micro-batch(4) + bf16",
)
FORMATS = (".json", ".json.gz", ".pickle", ".pkl", ".html", ".png")
_ROOM = 0.9  # of a device's memory: the CUDA context, ECC, libraries' workspaces and fragmentation take the rest


def comparing(options: argparse.Namespace) -> None:
    """`compare`: run each technique, or simulate it, and print the table and what it says."""
    if options.repeats < 0:
        raise MemlabError(f"--repeats {options.repeats}: give 0 or more")
    if options.device and not options.simulated:
        raise MemlabError("--device is for --simulated: what is measured is measured where your model lives")
    comparison = _compared(options, options.simulated, options.device or "cuda")
    print(comparison)
    print()
    print(comparison.explain())
    if options.output is not None:
        _listed(_comparison_files(comparison, options.output))


def simulating(options: argparse.Namespace) -> None:
    """`simulate`: what each technique would do on a GPU that is not here: its memory, whether it fits, its time."""
    if options.on and options.device == "cpu":
        raise MemlabError("--on is for a GPU, and --device cpu simulates the memory of a CPU: leave one of them out")
    devices = [device_named(name) for name in options.on or (["A100"] if options.device == "cuda" else [])]
    budgets = [] if options.budget is None else [parse_bytes(options.budget)]
    comparison = _compared(options, True, options.device)
    print(_simulation_table(comparison, budgets, devices))
    for row in comparison.rows:
        if row.error is not None:
            print(f"{row.label} could not run: {row.error}")
    if devices:
        print(ESTIMATE)
    if any(row.trace and "tight" in _verdicts(row.trace, budgets, devices) for row in comparison.rows):
        print(f"Tight: above {percent(_ROOM, 1)} of the memory, and the CUDA context needs some too.")
    plain = comparison.rows[0]
    assert plain.trace is not None  # or it would have raised
    print(f"\n{plain.label}, in words:\n{plain.trace.explain()}")
    for device in devices:
        print(estimate(plain.trace, device))
    if options.output is not None:
        _listed([*_comparison_files(comparison, options.output), *_trace_files(comparison, options.output)])


def explaining(options: argparse.Namespace) -> None:
    """`explain`: a file's trace in words, or that of a step that is measured now."""
    if options.what not in NETWORKS and Path(options.what).is_file():
        if options.strategy or options.set or options.batch:
            raise MemlabError(f"{options.what} is a file: --strategy, --set and --batch are for steps")
        trace = load(options.what)
    else:
        strategy = parse(options.strategy or "baseline")
        step = _found(options.what, options.set, options.batch)
        print(f"{step}\n", flush=True)
        with users_code("the step"):
            trace = measure(step, strategy)
    print(f"{trace.strategy}, {trace.source} on {trace.provenance.get('device', 'an unknown device')}\n")
    print(trace.explain())


def exporting(options: argparse.Namespace) -> None:
    """`export`: a file's trace in the form of another tool."""
    source, target = options.file, options.out
    if not target.name.lower().endswith(FORMATS):
        raise MemlabError(f"no form is known for {target.name!r}: the suffix decides, one of {', '.join(FORMATS)}")
    trace = load(source)
    if target.exists() and target.samefile(source):
        raise MemlabError(f"{target} is the file to be read: give another name to write to")
    try:
        _write(trace, target)
    except OSError as error:
        raise MemlabError(f"cannot write {target}: {error.strerror or error}") from None
    print(target)


def listing(options: argparse.Namespace) -> None:
    """`devices`: what the estimates of time know of each GPU."""
    kinds = ("float32", "tf32", "bfloat16", "float16", "float64")
    rows: list[tuple[str, ...]] = [("", "memory", "bandwidth", *kinds)]
    for device in DEVICES.values():
        peaks = (f"{device.flops[kind] / 1e12:.3g}" if kind in device.flops else "–" for kind in kinds)
        rows.append((device.name, f"{device.memory // GiB} GiB", f"{device.bandwidth / 1e9:.0f} GB/s", *peaks))
    print(_aligned(rows))
    print("\nPeaks in TFLOP/s, dense; what has none (–) computes at the peak of float32. Sources:")
    for device in DEVICES.values():
        print(f"  {device.name}: {device.source}")


# -- steps -------------------------------------------------------------------------------------------------------------


def _compared(options: argparse.Namespace, simulated: bool, device: str) -> Comparison:
    strategies = [parse(text) for text in options.strategy or STRATEGIES]
    if options.output is not None:
        _prepared(options.output)
    step = step_named(options.step, options.set, options.batch, lazy=simulated)
    if simulated:
        sizes = ", ".join([*options.set, *([f"batch={options.batch}"] if options.batch else [])])
        print(
            f"{options.step}{f' with {sizes}' if sizes else ''}, simulated on {device}: nothing is computed\n",
            flush=True,
        )
    else:
        print(f"{step}\n", flush=True)
    with users_code("the plain step"):
        return compare(step, strategies, simulated, options.repeats, device="cpu" if device == "cpu" else "cuda")


def _found(name: str, settings: Sequence[str], batch: int | None) -> TrainingStep:
    try:
        return step_named(name, settings, batch)
    except MemlabError as error:
        if ":" in name:
            raise
        raise MemlabError(f"there is no file {name}; and {error}") from None


# -- tables ------------------------------------------------------------------------------------------------------------


def _simulation_table(comparison: Comparison, budgets: Sequence[int], devices: Sequence[Device]) -> str:
    name, size = unit(comparison)
    heads = ["", f"peak {name}", f"saved {name}", "peak in", *(f"in {format_bytes(budget)}" for budget in budgets)]
    for device in devices:
        heads += [f"on {device.name}", "time (estimate)"]

    def cells(row: Row) -> list[str]:
        trace = row.trace
        if trace is None:
            return [row.label, *["–"] * (len(heads) - 1)]
        found = [row.label, f"{trace.peak_bytes / size:.2f}", f"{trace.saved_bytes / size:.2f}", trace.peak.phase]
        found += [_fits(trace, budget) for budget in budgets]
        for device in devices:
            found += [_fits(trace, device.memory), f"at least {format_seconds(trace.estimate_seconds(device))}"]
        return found

    return _aligned([heads, *(cells(row) for row in comparison.rows)])


def _verdicts(trace: Trace, budgets: Sequence[int], devices: Sequence[Device]) -> list[str]:
    return [_fits(trace, memory) for memory in (*budgets, *(device.memory for device in devices))]


def _fits(trace: Trace, memory: int) -> str:
    if trace.peak_bytes > memory:
        return "does not fit"
    return "fits" if trace.peak_bytes <= _ROOM * memory else "tight"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns of one width each: the first to the left, the others to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


# -- files -------------------------------------------------------------------------------------------------------------


def _prepared(folder: Path) -> None:
    """Make the folder, or tell why nothing can be written there, before long work begins."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MemlabError(f"cannot write into {folder}: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise MemlabError(f"cannot write into {folder}: permission denied")


def _comparison_files(comparison: Comparison, folder: Path) -> list[tuple[str, Path]]:
    figure, page, table = folder / "comparison.png", folder / "comparison.html", folder / "comparison.csv"
    comparison.plot().savefig(figure, dpi=120)
    page.write_text(comparison.to_html(), encoding="utf-8")
    comparison.to_frame().to_csv(table)
    return [("figure", figure), ("HTML page", page), ("table", table)]


def _trace_files(comparison: Comparison, folder: Path) -> list[tuple[str, Path]]:
    """Each trace in a file that `explain` and `export` read."""
    found = []
    for number, row in enumerate(comparison.rows):
        if row.trace is not None:
            label = re.sub("[^a-z0-9]+", "-", row.label.lower()).strip("-")
            found.append(("trace", row.trace.save(folder / f"{number}-{label}.trace.json.gz")))
    return found


def _listed(files: Sequence[tuple[str, Path]]) -> None:
    print()
    for what, path in files:
        print(f"{what:<10} {path}")


def _write(trace: Trace, path: Path) -> None:
    if path.suffix.lower() == ".html":
        path.write_text(trace.to_html(), encoding="utf-8")
    elif path.suffix.lower() == ".png":
        trace.plot().savefig(path, dpi=120)
    else:
        trace.export(path)
