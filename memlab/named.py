"""What a name on the command line means: memlab's own networks in any size, or a training step of the user's."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from . import zoo
from .errors import MemlabError
from .nest import kind
from .step import TrainingStep

NETWORKS: dict[str, tuple[Callable[..., TrainingStep], type[nn.Module]]] = {
    "gpt": (zoo.gpt_step, zoo.GPT),
    "resnet": (zoo.resnet_step, zoo.ResNet),
    "lstm": (zoo.lstm_step, zoo.LSTM),
    "mlp": (zoo.mlp_step, zoo.MLP),
}


def step_named(name: str, settings: Sequence[str] = (), batch: int | None = None, lazy: bool = False) -> TrainingStep:
    """The training step that a name means; `settings` such as "depth=24" and the size of the batch are for memlab's own
    networks, which with `lazy` are built when they are first needed."""
    if name in NETWORKS:
        make, network = NETWORKS[name]
        sizes = _sizes(name, {**_defaults(make), **_defaults(network)}, settings)
        return make(**sizes, **({} if batch is None else {"batch": batch}), lazy=lazy)
    where, colon, attribute = name.rpartition(":")
    if not colon:
        raise MemlabError(
            f"{name!r} is none of {', '.join(NETWORKS)}, and names no step of yours: write FILE.py:NAME or "
            "PACKAGE.MODULE:NAME"
        )
    for option in ["--set"] * bool(settings) + ["--batch"] * (batch is not None):
        raise MemlabError(f"{option} is for memlab's own networks: your step brings its own sizes and its own batch")
    module = _module(where)
    if not hasattr(module, attribute):
        raise MemlabError(f"{where} has no {attribute!r}")
    found: Any = getattr(module, attribute)
    if not isinstance(found, TrainingStep) and callable(found):
        with users_code(name):
            found = found()
    if not isinstance(found, TrainingStep):
        raise MemlabError(f"{name} is {kind(found)}: it must be a memlab.TrainingStep, or return one")
    return found


# -- sizes of memlab's own networks ------------------------------------------------------------------------------------


def _defaults(function: Callable[..., Any]) -> dict[str, int | float | bool]:
    """The sizes that a function takes, with their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if isinstance(p.default, int | float) and p.name != "seed"}


def _sizes(
    name: str, defaults: dict[str, int | float | bool], settings: Sequence[str]
) -> dict[str, int | float | bool]:
    found = {}
    for setting in settings:
        size, equals, text = (part.strip() for part in setting.partition("="))
        if not equals or size not in defaults:
            raise MemlabError(f"--set {setting}: write SIZE=VALUE, where the sizes of {name} are {', '.join(defaults)}")
        value = _READ[type(defaults[size])](text)
        if value is None:
            raise MemlabError(f"--set {setting}: give {_FORMS[type(defaults[size])]}, such as {size}={defaults[size]}")
        found[size] = value
    return found


def _whole(text: str) -> int | None:
    return int(text) if text.isdecimal() and int(text) else None


def _share(text: str) -> float | None:
    try:
        return float(text) if 0 <= float(text) <= 1 else None
    except ValueError:
        return None


_READ: dict[type, Callable[[str], int | float | bool | None]] = {
    int: _whole,
    float: _share,
    bool: lambda text: {"true": True, "false": False}.get(text.lower()),
}
_FORMS: dict[type, str] = {int: "a whole number from 1", float: "a number from 0 to 1", bool: "true or false"}


# -- the user's own code -----------------------------------------------------------------------------------------------


def _module(where: str) -> Any:
    if not where.endswith(".py"):
        sys.path.insert(0, "")
        with users_code(f"the import of {where}"):
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
    with users_code(f"the import of {where}"):
        spec.loader.exec_module(module)
    return module


_OURS = (os.path.dirname(__file__), contextlib.__file__, os.path.dirname(importlib.__file__), "<frozen importlib")


@contextlib.contextmanager
def users_code(what: str) -> Iterator[None]:
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
