"""A `Trace` in words: the terminal's view, plain sentences, a caption; and the parts that all views' sentences share.

Every number comes from the values. A *bound* says what a technique could take off a peak at most: the trace again,
without the bytes that the technique acts on. What it adds and what it leaves are not in it.
"""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from ..roofline import Device, device_named
from ..trace import SAVED_CATEGORIES, Allocation, Growth, Peak, Place, Trace
from ..units import GiB, KiB, MiB, format_bytes, format_seconds

if TYPE_CHECKING:
    from ..compare import Comparison

_PASSES = {
    "start": "the state before the step",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "recompute": "the recomputation during backward",
    "optimizer": "the optimizer step",
}
_WIDE = 100  # characters of a line of sentences, which a notebook would break amid a word
_NOTHING = 0.001  # of a peak: less is not called a saving

# -- parts of sentences, for all views ---------------------------------------------------------------------------------


def percent(part: float, whole: float) -> str:
    """A share in per cent: `58 %`, `< 1 %`."""
    share = 100 * part / whole if whole else 0.0
    return "< 1 %" if 0 < share < 0.5 else f"{share:.0f} %"


def pass_name(place: Place) -> str:
    """The part of the step: `the backward pass of micro-batch 2`."""
    name = _PASSES.get(place.phase, place.phase)
    return f"{name} of micro-batch {place.micro_batch + 1}" if place.micro_batch else name


def operator_name(place: Place) -> str:
    """The operator without its namespace: `mm`."""
    return place.operator.rpartition("::")[2]


def listed(items: Iterable[str]) -> str:
    """`a, b and c`."""
    *most, end = list(items) or [""]
    return f"{', '.join(most)} and {end}" if most else end


def unit_for(nbytes: int) -> tuple[str, int]:
    """The unit to write a column or an axis in that reaches to `nbytes`: its name and its bytes."""
    if nbytes >= 8 * GiB:
        return "GiB", GiB
    return ("MiB", MiB) if nbytes >= MiB else ("KiB", KiB)


def wrapped(sentences: Iterable[str]) -> str:
    """Each sentence on lines of its own, those after its first indented; a number and its unit stay together."""
    fill = textwrap.TextWrapper(_WIDE, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False).fill
    tied = (re.sub(r"(\d) (?=%|[KMG]iB\b)", "\\1\N{NO-BREAK SPACE}", sentence) for sentence in sentences)
    return "\n".join(fill(sentence) for sentence in tied).replace("\N{NO-BREAK SPACE}", " ")


def figure_summary(value: Trace | Comparison) -> str:
    """What the figure of it shows, in one line: the figure's caption, and its text where there are no pictures."""
    if isinstance(value, Trace):
        return (
            f"Memory through one training step, {value.strategy}: "
            f"peak {format_bytes(value.peak_bytes)} in {pass_name(value.peak.place)}"
        )
    peaks = ", ".join(f"{row.label} {format_bytes(row.trace.peak_bytes)}" for row in value.rows if row.trace)
    return f"Peak memory by strategy: {peaks}"


# -- a trace -----------------------------------------------------------------------------------------------------------


def describe_trace(trace: Trace) -> str:
    """The trace in a terminal: the peak and what is alive there, each phase's highest point, what is not seen."""
    head = [trace.strategy, f"{trace.source} on {trace.provenance.get('device', 'cpu')}"]
    if len(trace.steps) > 1:
        head.append(f"{len(trace.steps)} steps")
    place = trace.peak.place
    where = ", ".join(filter(None, (place.module, operator_name(place))))
    head.append(f"peak {format_bytes(trace.peak_bytes)} in {pass_name(place)}" + (f" ({where})" if where else ""))
    lines = [" · ".join(head), "", f"{'alive at the peak':<20}{'bytes':>10}{'share':>8}"]
    for category, nbytes in trace.by_category().items():
        lines.append(f"  {category:<18}{format_bytes(nbytes):>10}{percent(nbytes, trace.peak_bytes):>8}")
    highest = (f"{phase} {format_bytes(nbytes)}" for phase, nbytes in trace.by_phase().items())
    lines += ["", f"{'highest in':<20}{', '.join(highest) or 'no operator ran'}"]
    lines.append(f"{'saved for backward':<20}{saved_text(trace)}")
    tensors = f"{format_bytes(trace.tensor_peak_bytes)} in {pass_name(trace.tensor_peak.place)}"
    if tensors != f"{format_bytes(trace.peak_bytes)} in {pass_name(place)}":
        lines.append(f"{'tensors alone':<20}peak {tensors}")
    if "max_memory_reserved" in trace.provenance:
        reserved = format_bytes(trace.provenance["max_memory_reserved"])
        lines.append(f"{'reserved':<20}{reserved} by the device's allocator, for what is allocated")
    for title, sentences in (("grows", growth(trace)), ("not seen", trace.absent), ("note", trace.notes)):
        lines += [f"{title:<20}{sentence}" for sentence in sentences]
    return "\n".join(lines)


def saved_text(trace: Trace) -> str:
    """What is held for backward; a memory snapshot of another tool does not show it."""
    unseen = not trace.saved and any(operator.place.phase == "backward" for operator in trace.operators)
    return "not seen" if unseen else format_bytes(trace.saved_bytes)


@dataclasses.dataclass(frozen=True)
class _Technique:
    """What a technique acts on, for its bound."""

    names: str
    bytes_of: str
    acts_on: Callable[[Allocation], bool]


def _in_optimizer(allocation: Allocation) -> bool:
    return allocation.place.phase == "optimizer" and allocation.category in ("temporaries", "workspace")


def _of_samples(allocation: Allocation) -> bool:
    passing = allocation.category in ("temporaries", "workspace") and not _in_optimizer(allocation)
    return passing or allocation.category in SAVED_CATEGORIES


_TECHNIQUES = (
    _Technique("Checkpoint", "activations", lambda a: a.category in SAVED_CATEGORIES),
    _Technique(
        "MicroBatch, MixedPrecision", "activations, temporaries and workspace of forward and backward", _of_samples
    ),
    _Technique(
        "OptimizerInBackward",
        "gradients, temporaries and workspace of the optimizer",
        lambda a: a.category == "gradients" or _in_optimizer(a),
    ),
    _Technique("a fused optimizer", "temporaries of the optimizer", _in_optimizer),
)


def explain_trace(trace: Trace) -> str:
    """Plain sentences: which phase holds the peak, what is alive there, which technique can move it, which cannot."""
    return wrapped(trace_sentences(trace))


def trace_sentences(trace: Trace) -> Iterator[str]:
    """The same, sentence by sentence; those that begin with a dash belong to the one before them."""
    yield from findings(trace)
    if trace.peak_bytes:
        yield from bounds(trace)
        yield from _asides(trace)


def findings(trace: Trace) -> Iterator[str]:
    """Where the peak is, what is alive there, how high the next one is, what is saved, what grows."""
    if not trace.peak_bytes:
        yield "Nothing was in memory, and nothing ran."
        return
    peak, place = trace.peak, trace.peak.place
    where = f", in {place.module}" if place.module else ""
    where += f", while {operator_name(place)} runs" if place.operator else ""
    where += f" ({place.source})" if place.source else ""
    yield f"The peak, {format_bytes(peak.nbytes)}, is in {pass_name(place)}{where}."
    yield f"Alive then: {_holders(trace)}."
    others = {phase: nbytes for phase, nbytes in trace.by_phase().items() if phase != place.phase}
    if others:
        phase = max(others, key=lambda name: others[name])
        yield f"The next highest is {_PASSES[phase]}, with {format_bytes(others[phase])}."
    if trace.saved:
        yield f"When backward begins, autograd holds {saved_text(trace)} for it."
    yield from growth(trace)


def growth(trace: Trace) -> Iterator[str]:
    """What grows from step to step, who holds it and what to do: a sentence for each holder, the largest first."""
    held: dict[tuple[str, bool], list[Growth]] = {}
    for part in trace.growth:
        held.setdefault((part.holder, part.through_graph), []).append(part)
    for (holder, through_graph), parts in sorted(held.items(), key=lambda item: -_per_step(item[1])):
        largest = parts[0]
        made = f"{largest.operator.rpartition('::')[2]}" + (f" in {largest.module}" if largest.module else "")
        made += f" ({largest.source})" if largest.source else ""
        graphs, share = (" with their graphs" if through_graph else ""), "the largest " if parts[1:] else ""
        remedy = "loss.item() or loss.detach()" if through_graph else "numbers (.item()), or only what is still needed"
        yield (
            f"Memory grows by {format_bytes(_per_step(parts))} a step: tensors of past steps are kept{graphs} by "
            f"{holder}, {share}made by {made}. Keep {remedy} instead."
        )


def _per_step(parts: Iterable[Growth]) -> int:
    return sum(part.bytes_per_step for part in parts)


def bounds(trace: Trace) -> Iterator[str]:
    """What each technique could take off the peak at most, or why it cannot move it: a line for each."""
    alive = trace.by_category()
    if alive.get("other", 0) > trace.peak_bytes / 2:
        yield "What each technique could lower is not known: most of the peak has no category here."
        return
    yield "How far each technique could lower the peak, at most (a bound: all that it acts on gone, nothing added):"
    for technique in _TECHNIQUES:
        yield f"- {technique.names} ({technique.bytes_of}): {_bound(trace, technique)}"
    fixed = alive.get("parameters", 0) + alive.get("optimizer state", 0) + alive.get("buffers", 0)
    if fixed:
        yield (
            "Of all techniques only LowPrecision makes parameters, buffers and optimizer state smaller as well: "
            f"{format_bytes(fixed)} ({percent(fixed, trace.peak_bytes)}) at the peak."
        )


ESTIMATE = "Times are estimates by a roofline: at least that long, every operator at the device's peak."


def estimate(trace: Trace, device: str | Device = "A100") -> str:
    """How long the step takes on a device, at least, and what of that is recomputation: see `memlab.roofline`."""
    device = device_named(device)
    whole, again = trace.estimate_seconds(device), trace.estimate_seconds(device, "recompute")
    recomputed = f"; recomputation adds at least {format_seconds(again)} of that, {percent(again, whole - again)}"
    return f"An estimate for {device.name}: at least {format_seconds(whole)} a step{recomputed if again else ''}."


def _holders(trace: Trace) -> str:
    """The categories alive at the peak, largest first; those below 1 % in one sum."""
    largest = sorted(trace.by_category().items(), key=lambda item: -item[1])
    shown = [(name, nbytes) for name, nbytes in largest if nbytes >= 0.01 * trace.peak_bytes]
    rest = trace.peak_bytes - sum(nbytes for _, nbytes in shown)
    parts = [f"{name} {format_bytes(nbytes)} ({percent(nbytes, trace.peak_bytes)})" for name, nbytes in shown]
    return listed([*parts, f"{format_bytes(rest)} of others"] if rest else parts)


def _without(trace: Trace, gone: Callable[[Allocation], bool]) -> Peak:
    """The peak that would be left without those allocations."""
    return dataclasses.replace(trace, allocations=tuple(a for a in trace.allocations if not gone(a))).peak


def _bound(trace: Trace, technique: _Technique) -> str:
    left, whole = _without(trace, technique.acts_on), trace.peak_bytes
    saving = whole - left.nbytes
    if saving >= _NOTHING * whole:
        rest = f"{format_bytes(left.nbytes)}, in {pass_name(left.place)}"
        return f"{format_bytes(saving)} ({percent(saving, whole)}). Without them the peak would be {rest}."
    there = sum(allocation.nbytes for allocation in trace.peak.allocations if technique.acts_on(allocation))
    if there >= _NOTHING * whole:
        return f"cannot move it. {_upper(pass_name(left.place))} is as high without them."
    alive = f"only {format_bytes(there)} of them is alive" if there else "none of them is alive"
    return f"cannot move it. The peak is in {pass_name(trace.peak.place)}, where {alive}."


def _asides(trace: Trace) -> Iterator[str]:
    """What the bounds leave open."""
    alive = trace.by_category()
    if alive.get("weight copies"):
        yield (
            f"At the peak autocast keeps {format_bytes(alive['weight copies'])} of weight copies: weights once more, "
            "in low precision."
        )
    if alive.get("workspace", 0) >= 0.01 * trace.peak_bytes:
        yield "Workspace is the operators' own: it varies with the processor and the number of threads."
    if trace.absent:
        yield f"Not in these figures: {'; '.join(trace.absent)}."


def _upper(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]
