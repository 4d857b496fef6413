"""The command line: `python -m memlab compare` runs the main job and prints what it found."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from . import __version__, zoo
from .compare import Comparison, compare
from .errors import MemlabError
from .nest import kind
from .step import TrainingStep
from .strategies import parse

NETWORKS: dict[str, Callable[..., TrainingStep]] = {
    "gpt": zoo.gpt_step,
    "resnet": zoo.resnet_step,
    "lstm": zoo.lstm_step,
    "mlp": zoo.mlp_step,
}
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status (0 done, 1 it could not be done, 2 wrong words)."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except MemlabError as error:
        print(f"memlab: {error}", file=sys.stderr)
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
    command = commands.add_parser(
        "compare",
        help="compare the techniques on one training step, with proof that each trains the same model",
        description="Compare the techniques on one training step: bytes by category, price in time, and the proof that "
        "each trains the same model. Prints a table and what it says.",
        epilog="example: python -m memlab compare my_training.py:make_step --strategy checkpoint "
        "--strategy 'checkpoint + micro-batch(8)' --output report",
    )
    command.add_argument(
        "step",
        nargs="?",
        default="gpt",
        help=f"what to train: {', '.join(NETWORKS)} (memlab's own networks on real data; default gpt), or "
        "FILE.py:NAME or PACKAGE.MODULE:NAME of a memlab.TrainingStep, or of a function that returns one",
    )
    command.add_argument(
        "--strategy",
        action="append",
        metavar="S",
        help=f"a technique or a sum of them; repeat for several. Default: {'; '.join(STRATEGIES)}",
    )
    command.add_argument("--batch", type=_count, metavar="N", help="batch size, for memlab's own networks")
    command.add_argument(
        "--repeats", type=int, default=5, metavar="N", help="timed steps of each technique (default 5; 0: no times)"
    )
    command.add_argument(
        "--output", type=Path, metavar="DIR", help="also write the table, the figure and an HTML page into this folder"
    )
    command.set_defaults(run=_compare)
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no batch size: give a whole number from 1")
    return int(text)


def _compare(options: argparse.Namespace) -> None:
    strategies = [parse(text) for text in options.strategy or STRATEGIES]
    if options.repeats < 0:
        raise MemlabError(f"--repeats {options.repeats}: give 0 or more")
    folder = options.output
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MemlabError(f"cannot write into {folder}: {error.strerror}") from None
        if not os.access(folder, os.W_OK):
            raise MemlabError(f"cannot write into {folder}: permission denied")
    step = _step(options.step, options.batch)
    print(f"{step}\n", flush=True)
    with _users_code("the plain step"):
        comparison = compare(step, strategies, repeats=options.repeats)
    print(comparison)
    print()
    print(comparison.explain())
    if folder is not None:
        print()
        for what, path in _write(comparison, folder):
            print(f"{what:<10} {path}")


def _write(comparison: Comparison, folder: Path) -> list[tuple[str, Path]]:
    figure, page, table = folder / "comparison.png", folder / "comparison.html", folder / "comparison.csv"
    comparison.plot().savefig(figure, dpi=120)
    page.write_text(comparison.to_html(), encoding="utf-8")
    comparison.to_frame().to_csv(table)
    return [("figure", figure), ("HTML page", page), ("table", table)]


def _step(name: str, batch: int | None) -> TrainingStep:
    """The training step that a name on the command line means."""
    if name in NETWORKS:
        return NETWORKS[name]() if batch is None else NETWORKS[name](batch=batch)
    where, colon, attribute = name.rpartition(":")
    if not colon:
        raise MemlabError(
            f"{name!r} is none of {', '.join(NETWORKS)}, and names no step of yours: write FILE.py:NAME or "
            "PACKAGE.MODULE:NAME"
        )
    if batch is not None:
        raise MemlabError("--batch is for memlab's own networks: your step brings its own batch")
    module = _module(where)
    if not hasattr(module, attribute):
        raise MemlabError(f"{where} has no {attribute!r}")
    found: Any = getattr(module, attribute)
    if not isinstance(found, TrainingStep) and callable(found):
        with _users_code(name):
            found = found()
    if not isinstance(found, TrainingStep):
        raise MemlabError(f"{name} is {kind(found)}: it must be a memlab.TrainingStep, or return one")
    return found


def _module(where: str) -> Any:
    if not where.endswith(".py"):
        sys.path.insert(0, "")
        with _users_code(f"the import of {where}"):
            return importlib.import_module(where)
    path = Path(where)
    if not path.is_file():
        raise MemlabError(f"there is no file {where}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent))
    with _users_code(f"the import of {where}"):
        spec.loader.exec_module(module)
    return module


_OURS = (os.path.dirname(__file__), contextlib.__file__, os.path.dirname(importlib.__file__), "<frozen importlib")


@contextlib.contextmanager
def _users_code(what: str) -> Iterator[None]:
    """An error of the user's own code becomes its traceback, from that code on, and one sentence."""
    try:
        yield
    except MemlabError:
        raise
    except (Exception, SystemExit) as error:
        theirs = error.__traceback__
        while theirs is not None and theirs.tb_frame.f_code.co_filename.startswith(_OURS):
            theirs = theirs.tb_next
        if theirs is not None or isinstance(error, ImportError | SyntaxError):  # else it is an error of memlab's
            error = error.with_traceback(theirs)
        traceback.print_exception(error)
        raise MemlabError(f"{what} failed: {type(error).__name__}: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
