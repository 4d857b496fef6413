"""Where the program was, from the stack that a memory snapshot keeps with an allocation.

The stack tells the line of the user's code, the operator where C++ frames were recorded, and the phase: PyTorch's own
functions are in it. A snapshot that memlab wrote tells its places in words.

Rule 1. Frames go from the innermost outwards.
Rule 2. Library code is what lies in a folder `torch`, `site-packages`, `dist-packages` or `python3.x`.
Rule 3. Optimizer: inside a function of `torch/optim`. A module that runs there is a closure's: forward.
Rule 4. Backward: inside autograd's functions or its engine; with a module running, or a checkpoint's function:
        recompute.
Rule 5. On CUDA backward runs in a thread of the engine's, where Python's stack is empty or begins in PyTorch.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from ..trace import PHASES, Place
from .checks import WrongError, get, get_number, shown

_LIBRARY = re.compile(r"torch|(site|dist)-packages|python3\.\d+t?")
_OPERATOR = re.compile(r"at::_ops::(?!empty)(\w+)::")
_CHECKPOINT = {"unpack_hook", "recompute_fn", "backward"}
_AUTOGRAD = {"backward", "grad", "_engine_run_backward"}
_OURS = "memlab/"  # begins the file names of the frames that memlab writes
_LONGEST = 1000  # characters of a name


class _Frame(NamedTuple):
    name: str
    source: str  # `file.py:12 in function`
    mine: bool  # whether that is the user's code
    kind: str  # what it tells of the phase
    operator: str
    field: str  # which one of a place, in a frame that memlab wrote


class Stacks:
    """Reads the stacks of one snapshot, each list and each frame once, however often they are shared."""

    def __init__(self, recorded: bool) -> None:
        self._recorded = recorded  # whether any stack has frames; if not, an empty one tells nothing
        self._places: dict[int, tuple[Place, bool, Any]] = {}  # by the list's `id`; with the list, so that it stays
        self._frames: dict[int, tuple[_Frame, Any]] = {}

    def place(self, row: Any, where: str) -> tuple[Place, bool]:
        """Where an event's or a block's stack is, and whether it says that it was there before the step."""
        if "frames" not in row:
            return Place("forward"), False
        frames = get(row, "frames", list, where)
        if id(frames) not in self._places:
            self._places[id(frames)] = (*self._read(frames, f'{where}["frames"]'), frames)
        return self._places[id(frames)][:2]

    def _read(self, rows: list[Any], where: str) -> tuple[Place, bool]:
        frames = []
        for number, row in enumerate(rows):
            if id(row) not in self._frames:
                self._frames[id(row)] = _frame(row, f"{where}[{number}]"), row
            frames.append(self._frames[id(row)][0])
        told = {frame.field: frame.name for frame in frames if frame.field}
        if told:
            source = next((frame.source for frame in frames if not frame.field), told.get("source"))
            return _told(told, source), "resident" in told
        source = next((frame.source for frame in frames if frame.mine), None)
        operator = next((frame.operator for frame in frames if frame.operator), "")
        phase = _phase(frames) if self._recorded else "forward"
        return Place(phase, operator=operator, source=source), False


def _frame(row: Any, where: str) -> _Frame:
    filename, name = get(row, "filename", str, where)[:_LONGEST], get(row, "name", str, where)[:_LONGEST]
    python = filename.endswith(".py") or filename.startswith(("<ipython", "<stdin>"))
    parts = re.split(r"[\\/]", filename)
    operator = None if python else _OPERATOR.search(name)
    return _Frame(
        name=name,
        source=f"{parts[-1]}:{get_number(row, 'line', where)} in {name}",
        mine=python and not any(map(_LIBRARY.fullmatch, parts)),
        kind=_kind(parts, name, python),
        operator=f"aten::{operator[1]}" if operator else "",
        field=filename.removeprefix(_OURS) if filename.startswith(_OURS) else "",
    )


def _kind(parts: list[str], name: str, python: bool) -> str:
    """What a frame tells: "optimizer", "module", "recompute", "backward", other "torch" code, "c++", or nothing."""
    if not python:
        return "backward" if "torch::autograd::Engine::" in name else "c++"
    if "torch" not in parts:
        return ""
    inside = parts[len(parts) - parts[::-1].index("torch") :]
    if inside[:1] == ["optim"] and inside[1:] != ["lr_scheduler.py"]:
        return "optimizer"
    if inside[:2] == ["nn", "modules"]:
        return "module"
    if inside == ["utils", "checkpoint.py"] and name in _CHECKPOINT:
        return "recompute"
    if inside[:1] in (["autograd"], ["_tensor.py"]) and name in _AUTOGRAD:
        return "backward"
    return "torch"


def _phase(frames: list[_Frame]) -> str:
    """The phase by what the frames tell, innermost first (Rules 3 to 5)."""
    module, outermost = False, "torch"
    for kind in (frame.kind for frame in frames):
        if kind == "optimizer":
            return "forward" if module else "optimizer"
        if kind in ("backward", "recompute"):
            return "recompute" if module else kind
        module |= kind == "module"
        if kind != "c++":
            outermost = kind
    return "forward" if outermost == "" else "backward"


def _told(told: dict[str, str], source: str | None) -> Place:
    """The place that memlab wrote."""
    phase = told.get("phase", "forward")
    if phase not in ("start", *PHASES):
        raise WrongError(f"a frame of memlab/phase says {shown(phase)}, none of start, {', '.join(PHASES)}")
    numbers = [told.get(field, "1") for field in ("micro_batch", "step")]
    for text in numbers:
        if not re.fullmatch(r"[1-9][0-9]{0,8}", text):
            raise WrongError(f"a frame of memlab counts {shown(text)}, where a number from 1 should stand")
    micro_batch, step = (int(text) - 1 for text in numbers)
    return Place(phase, told.get("module", ""), told.get("operator", ""), micro_batch, step, source)
