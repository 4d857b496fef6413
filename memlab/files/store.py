"""A `Trace` in one small file, and back; and in the files of other tools.

With `save` and `load` a trace outlives the process that made it: compressed JSON, a table for each kind of row in it
and a list for each of the table's columns, so that any program can read it. With `export` it opens in Perfetto and in
PyTorch's memory viewer, and `load` reads that viewer's files too, the memory snapshots.

Rule 1. Reading runs nothing that a file says: it is text, numbers and lists of them, in a pickle too (`pickles.py`).
Rule 2. Everything is checked before a `Trace` is made of it: the type of each value, and that numbers of ticks, places
        and operators are within bounds. What is wrong is named, with its table, column and row.
Rule 3. A file is written beside its final place and then moved there: it is whole or it is not there.
Rule 4. The columns are the fields of the dataclasses in `trace.py`. Whoever changes those raises `_VERSION`.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ..errors import MemlabError
from ..trace import CATEGORIES, PHASES, Allocation, Growth, Operator, Place, SavedTensor, Trace
from .checks import WrongError
from .perfetto import perfetto_json
from .pickles import BEGINNING, LONGEST
from .snapshot import snapshot_pickle
from .snapshot_reader import snapshot_trace

_VERSION = 2
_KEY = "memlab_trace"  # first in the file, so that its kind and version show
_TABLES: dict[str, type] = {"allocations": Allocation, "operators": Operator, "saved": SavedTensor, "growth": Growth}
_LONGEST = 2**27  # bytes of JSON: about a million allocations
_MOST_TICKS = 2**26  # a trace keeps a number for each tick, so that one false tick could fill the memory

_EXPORTS: dict[str, Callable[[Trace], bytes]] = {
    ".json": perfetto_json,
    ".json.gz": lambda trace: gzip.compress(perfetto_json(trace), mtime=0),
    ".pickle": snapshot_pickle,
    ".pkl": snapshot_pickle,
}

Rows = list[dict[str, Any]]


def save(trace: Trace, path: str | Path) -> Path:
    """Write the trace to one file and return its path; `load` gives an equal trace back.

    Any suffix will do, or none; a file that is there is replaced. Of the provenance, what JSON does not know is written
    as text. Raises MemlabError where the file cannot be written.
    """
    path = Path(path)
    places: dict[Place, int] = {}
    values: dict[str, Any] = {_KEY: _VERSION}
    values |= {f.name: getattr(trace, f.name) for f in dataclasses.fields(Trace) if f.name not in _TABLES}
    for name, kind in _TABLES.items():
        values[name] = _columns(getattr(trace, name), kind, places)
    values["places"] = _columns(places, Place, places)
    try:
        text = json.dumps(values, allow_nan=False, default=str, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise MemlabError(f"the trace cannot be saved to {path}: its provenance is no JSON ({error})") from None
    if len(text) > _LONGEST:
        raise MemlabError(f"the trace is too long to be saved: {len(text):,} bytes of JSON, where {_LONGEST:,} may be")
    return _write(path, gzip.compress(text.encode("ascii"), mtime=0))


def export(trace: Trace, path: str | Path) -> Path:
    """Write the trace to a file for another tool, by its suffix, and return its path; a file that is there is replaced.

    `.json`, `.json.gz`:   trace events, for Perfetto and chrome://tracing
    `.pickle`, `.pkl`:     a memory snapshot, for pytorch.org/memory_viz and `torch.cuda._memory_viz`

    Raises MemlabError for another suffix, and where the file cannot be written.
    """
    path = Path(path)
    form = next((of for suffix, of in _EXPORTS.items() if path.name.lower().endswith(suffix)), None)
    if form is None:
        raise MemlabError(
            f"no tool is known for {path.name!r}. The suffix decides: {', '.join(_EXPORTS)}. "
            "For a file that memlab.load reads back, all of it, there is Trace.save(path); for a page Trace.to_html(), "
            "for a picture Trace.plot().savefig(path)."
        )
    try:
        content = form(trace)
    except (TypeError, ValueError) as error:
        raise MemlabError(f"the trace cannot be exported to {path}: its provenance is no JSON ({error})") from None
    return _write(path, content)


def load(path: str | Path) -> Trace:
    """Read a trace that `Trace.save` wrote, or a CUDA memory snapshot (`torch.cuda.memory._dump_snapshot(path)`).

    Nothing that a file says is run, also in a pickle. Raises MemlabError for a file that is not there, is no such file,
    is damaged or of another version; the message says what is wrong with it.
    """
    path = Path(path)
    try:
        content, longest = _content(path)
        if len(content) > longest:
            raise WrongError(f"it is longer than {longest:,} bytes")
        return snapshot_trace(content) if content.startswith(BEGINNING) else _trace(content)
    except WrongError as wrong:
        reason = str(wrong)
    except (EOFError, zlib.error):
        reason = "it is cut short or damaged"
    except OSError as error:
        raise MemlabError(f"no trace can be read from {path}: {error.strerror or error}") from None
    raise MemlabError(
        f"{path} holds no trace that this memlab can read: {reason}. "
        "Trace.save(path) and torch.cuda.memory._dump_snapshot(path) write such files."
    )


# -- writing -----------------------------------------------------------------------------------------------------------


def _columns(rows: Iterable[Any], kind: type, places: dict[Place, int]) -> dict[str, list[Any]]:
    """Rows as a list for each field; a place, which many rows share, as its number among `places`."""
    columns: dict[str, list[Any]] = {f.name: [] for f in dataclasses.fields(kind)}
    for row in rows:
        for name, column in columns.items():
            value = getattr(row, name)
            column.append(places.setdefault(value, len(places)) if isinstance(value, Place) else value)
    return columns


def _write(path: Path, content: bytes) -> Path:
    """Write the file, whole or not at all (Rule 3)."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            beside.write_bytes(content)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise MemlabError(f"the trace cannot be saved to {path}: {error.strerror}. {_remedy(path)}") from None
    return path


def _remedy(path: Path) -> str:
    if not path.parent.is_dir():
        return f"Make the folder first: {path.parent}"
    return "Choose a file in a folder that you may write to"


# -- reading -----------------------------------------------------------------------------------------------------------


def _content(path: Path) -> tuple[bytes, int]:
    """What the file holds, up to a byte more than may be, and how much may be."""
    with path.open("rb") as file:
        first = file.read(2)
        file.seek(0)
        if first.startswith(BEGINNING):
            return file.read(LONGEST + 1), LONGEST
        if first != b"\x1f\x8b":
            raise WrongError(
                "it is neither compressed as a saved trace nor a pickle as a memory snapshot (what Trace.export writes "
                "for Perfetto cannot be read back)"
            )
        with gzip.open(file) as packed:
            return packed.read(_LONGEST + 1), _LONGEST


def _trace(text: bytes) -> Trace:
    try:
        values = json.loads(text, parse_constant=_no_number, parse_float=_finite)
    except (ValueError, RecursionError):
        raise WrongError("its content is no JSON") from None
    if not isinstance(values, dict) or _KEY not in values:
        raise WrongError(f'it has no "{_KEY}"')
    if values[_KEY] != _VERSION:
        raise WrongError(f"it is of version {str(values[_KEY])[:20]}, and this memlab reads version {_VERSION}")
    places = [Place(**row) for row in _rows(values, "places", Place, [])]
    for number, place in enumerate(places):
        _among(("start", *PHASES), place.phase, f"places.phase[{number}]")
    read: dict[str, Any] = {}
    for field in dataclasses.fields(Trace):
        name, kind = field.name, _TABLES.get(field.name)
        if kind is None:
            read[name] = _read(str(field.type), values.get(name, _MISSING), name, places)
        else:
            read[name] = tuple(kind(**row) for row in _rows(values, name, kind, places))
    trace = Trace(**read)
    _check(trace)
    return trace


def _rows(values: dict[str, Any], table: str, kind: type, places: list[Place]) -> Rows:
    """The rows of one table, as keyword arguments of its dataclass."""
    columns = values.get(table)
    fields = dataclasses.fields(kind)
    if not isinstance(columns, dict) or columns.keys() != {f.name for f in fields}:
        raise WrongError(f'"{table}" should have the columns {", ".join(f.name for f in fields)}')
    lengths = {len(column) if isinstance(column, list) else None for column in columns.values()}
    if len(lengths) != 1 or None in lengths:
        raise WrongError(f'the columns of "{table}" should be lists of one length')
    read = {
        f.name: [_read(str(f.type), v, f"{table}.{f.name}[{n}]", places) for n, v in enumerate(columns[f.name])]
        for f in fields
    }
    return [dict(zip(read, row, strict=True)) for row in zip(*read.values(), strict=True)]


def _read(annotation: str, value: Any, where: str, places: list[Place]) -> Any:
    """The value of a field with that annotation, from what JSON has for it."""
    if annotation == "Place":
        if type(value) is int and 0 <= value < len(places):
            return places[value]
        annotation = f"the number of a place, from 0 to {len(places) - 1}"
    elif annotation.startswith("tuple[") and isinstance(value, list):
        inner = annotation.removeprefix("tuple[").removesuffix(", ...]")
        return tuple(_read(inner, item, where, places) for item in value)
    elif annotation in _FITS and _FITS[annotation](value):
        return value
    shown = "missing" if value is _MISSING else f"{value!r:.40}"
    raise WrongError(f"{where} is {shown}, where {annotation} should stand")


_MISSING = object()
_FITS: dict[str, Callable[[Any], bool]] = {
    "str": lambda value: isinstance(value, str),
    "str | None": lambda value: value is None or isinstance(value, str),
    "bool": lambda value: isinstance(value, bool),
    "int": lambda value: type(value) is int and -1 <= value < 2**62,
    "int | None": lambda value: value is None or (type(value) is int and -1 <= value < 2**62),
    "float": lambda value: type(value) in (int, float) and abs(value) < 2**62,
    "dict[str, Any]": lambda value: isinstance(value, dict),
}


def _check(trace: Trace) -> None:
    """That ticks and numbers of operators lead somewhere (Rule 2)."""
    for number, allocation in enumerate(trace.allocations):
        where = f"allocations[{number}]"
        _among(CATEGORIES, allocation.category, f"{where}.category")
        if allocation.nbytes < 0:
            raise WrongError(f"{where}.nbytes is {allocation.nbytes}")
        freed = allocation.born if allocation.freed is None else allocation.freed
        if not 0 <= allocation.born <= freed < _MOST_TICKS:
            raise WrongError(f"{where} should be born before it is freed, from tick 0 to {_MOST_TICKS:,}")
    ticks = [0, *(operator.tick for operator in trace.operators), _MOST_TICKS]
    if ticks != sorted(ticks):
        raise WrongError(f"the ticks of operators should not fall, from 0 to {_MOST_TICKS:,}")
    ends = [0, *trace.step_ends, len(trace.operators)]
    if ends != sorted(ends):
        raise WrongError("step_ends should be rising numbers of operators")


def _among(known: tuple[str, ...], value: str, where: str) -> None:
    if value not in known:
        raise WrongError(f"{where} is {value!r:.40}, none of {', '.join(known)}")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _no_number(text)


def _no_number(text: str) -> float:
    raise WrongError(f"{text:.40} is no number")
