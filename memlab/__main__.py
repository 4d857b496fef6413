"""The command line: which commands there are, and which words each takes. `python -m memlab --help` lists them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from . import __version__
from .commands import FORMATS, STRATEGIES, comparing, explaining, exporting, listing, simulating
from .errors import MemlabError
from .named import NETWORKS

_STEP = (
    f"what to train: {', '.join(NETWORKS)} (memlab's own networks on real data; default gpt), or FILE.py:NAME or "
    "PACKAGE.MODULE:NAME of a memlab.TrainingStep, or of a function that returns one"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its status: 0 done, 1 it could not be done, 2 wrong words, 130 interrupted."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
        sys.stdout.flush()
    except MemlabError as error:
        print(f"memlab: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever reads has read enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter flushes once more
        return 1
    except KeyboardInterrupt:
        print("memlab: interrupted", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="memlab", description="See every byte of a training step, before and after each memory-saving technique."
    )
    parser.add_argument("--version", action="version", version=f"memlab {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="command")

    def command(
        name: str, run: Callable[[argparse.Namespace], None], does: str, epilog: str
    ) -> argparse.ArgumentParser:
        """`does`: what it is for; up to its first colon or full stop that is also its line in the list of commands."""
        brief = does.partition(":")[0].partition(". ")[0].rstrip(".")
        made = commands.add_parser(
            name, help=brief[0].lower() + brief[1:], description=does, epilog=f"example: {epilog}"
        )
        made.set_defaults(run=run)
        return made

    added = command(
        "compare",
        comparing,
        "Compare the techniques on one training step, with proof that each trains the same model: bytes by category, "
        "price in time, and the proof. Prints a table and what it says.",
        "python -m memlab compare my_training.py:make_step --strategy checkpoint "
        "--strategy 'checkpoint + micro-batch(8)' --output report",
    )
    _step_and_strategies(added, "also write the table, the figure and an HTML page into this folder")
    added.add_argument(
        "--repeats", type=int, default=5, metavar="N", help="timed steps of each technique (default 5; 0: no times)"
    )
    added.add_argument("--simulated", action="store_true", help="run nothing: simulate each, without times and proofs")
    added.add_argument("--device", choices=("cuda", "cpu"), help="of what to simulate the memory (default cuda)")

    added = command(
        "simulate",
        simulating,
        "Simulate the techniques on one training step, for a GPU that is not here: peak memory, whether it fits, and "
        "an estimate of the least time. Nothing is computed and no weights are made, so that any size will do.",
        "python -m memlab simulate gpt --set depth=24 --set width=1024 --set heads=16 --set context=1024 --batch 8 "
        "--on T4 --on 'A100 80GB'",
    )
    _step_and_strategies(added, "also write the table, the figure, an HTML page and each trace into this folder")
    added.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="of what to simulate the memory (default cuda)"
    )
    added.add_argument(
        "--on",
        action="append",
        metavar="GPU",
        help="a GPU to fit into and to estimate the time on (default A100; `memlab devices` lists them); repeatable",
    )
    added.add_argument("--budget", metavar="SIZE", help="a memory size to fit into, such as 16GiB")
    added.set_defaults(repeats=0)

    added = command(
        "explain",
        explaining,
        "Explain one training step in plain sentences: which phase holds the peak, what is alive there, which "
        "technique can move it. Reads a saved trace or a CUDA memory snapshot, or measures a step.",
        "python -m memlab explain snapshot.pickle",
    )
    added.add_argument("what", metavar="FILE|STEP", help=f"a file to read, or {_STEP}")
    added.add_argument("--strategy", metavar="S", help="the technique or sum of techniques to measure (default: none)")
    _sizes(added)

    added = command(
        "export",
        exporting,
        "Convert a saved trace or a CUDA memory snapshot for another tool: Perfetto and chrome://tracing (.json, "
        ".json.gz), PyTorch's memory viewer (.pickle, .pkl), a browser (.html), a figure (.png).",
        "python -m memlab export snapshot.pickle report.html",
    )
    added.add_argument("file", type=Path, metavar="FILE", help="what Trace.save or PyTorch's _dump_snapshot wrote")
    added.add_argument(
        "out", type=Path, metavar="OUT", help=f"the file to write; its suffix decides: {', '.join(FORMATS)}"
    )

    command(
        "devices",
        listing,
        "List the GPUs that times are estimated for. Memory, bandwidth and peaks of arithmetic are NVIDIA's figures.",
        "python -m memlab devices",
    )
    return parser


def _step_and_strategies(command: argparse.ArgumentParser, output: str) -> None:
    command.add_argument("step", nargs="?", default="gpt", help=_STEP)
    command.add_argument(
        "--strategy",
        action="append",
        metavar="S",
        help=f"a technique or a sum of them; repeat for several. Default: {'; '.join(STRATEGIES)}",
    )
    _sizes(command)
    command.add_argument("--output", type=Path, metavar="DIR", help=output)


def _sizes(command: argparse.ArgumentParser) -> None:
    command.add_argument("--batch", type=_count, metavar="N", help="batch size, for memlab's own networks")
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SIZE=VALUE",
        help="a size of memlab's own networks, such as depth=24; repeat for several",
    )


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no batch size: give a whole number from 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
