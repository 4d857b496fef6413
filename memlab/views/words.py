"""A `Trace` or a `Comparison` in words: the terminal's view, plain sentences, a caption.

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
from ..units import GiB, KiB, MiB, format_bytes, format_ratio, format_seconds

if TYPE_CHECKING:
    from ..compare import Comparison, Row

_PASSES = {
    "start": "the state before the step",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "recompute": "the recomputation during backward",
    "optimizer": "the optimizer step",
}
_WIDE = 100  # characters of a line of sentences, which a notebook would break amid a word
_NOTHING = 0.001  # of a peak: less is not called a saving
_NEAR = 0.02  # peaks closer than this, relative, are called the same

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
    lines.append(f"{'saved for backward':<20}{format_bytes(trace.saved_bytes)}")
    tensors = f"{format_bytes(trace.tensor_peak_bytes)} in {pass_name(trace.tensor_peak.place)}"
    if tensors != f"{format_bytes(trace.peak_bytes)} in {pass_name(place)}":
        lines.append(f"{'tensors alone':<20}peak {tensors}")
    if "max_memory_reserved" in trace.provenance:
        reserved = format_bytes(trace.provenance["max_memory_reserved"])
        lines.append(f"{'reserved':<20}{reserved} by the device's allocator, for what is allocated")
    for title, sentences in (("grows", growth(trace)), ("not seen", trace.absent), ("note", trace.notes)):
        lines += [f"{title:<20}{sentence}" for sentence in sentences]
    return "\n".join(lines)


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
        yield f"When backward begins, autograd holds {format_bytes(trace.saved_bytes)} for it."
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
    yield "How far each technique could lower the peak, at most (a bound: all that it acts on gone, nothing added):"
    for technique in _TECHNIQUES:
        yield f"- {technique.names} ({technique.bytes_of}): {_bound(trace, technique)}"
    alive = trace.by_category()
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


# -- a comparison ------------------------------------------------------------------------------------------------------


def explain_comparison(comparison: Comparison) -> str:
    """Plain sentences: what moved the peak, at what price, what adds up and what does not, and the proof."""
    return wrapped(comparison_sentences(comparison))


Measured = list[tuple["Row", Trace]]  # a row and its trace, for rows that have one; the plain step first


def comparison_sentences(comparison: Comparison) -> Iterator[str]:
    """The same, sentence by sentence."""
    rows = comparison.rows
    measured = [(row, row.trace) for row in rows if row.trace is not None]
    if measured and measured[0][0] is rows[0]:
        yield from _where(*measured[0])
        if measured[1:]:
            yield from _lowest(measured)
            yield from _saved_against_peak(measured)
            yield from _in_the_optimizer(measured)
            yield from _sums(measured)
    yield from _verdicts(rows)
    yield from _precision(rows)
    for row in rows:
        if row.error is not None:
            yield f"{row.label} could not run: {_ended(row.error)}"


def _where(plain: Row, trace: Trace) -> Iterator[str]:
    peak = trace.peak
    where = pass_name(peak.place)
    yield f"{plain.label}: the peak is {format_bytes(peak.nbytes)}, in {where}. Alive there: {_largest(trace, 3)}."
    if peak.phase == "optimizer":
        yield "The peak is in the optimizer step, where nothing is saved for backward: checkpointing cannot move it."


def _largest(trace: Trace, count: int) -> str:
    """The largest categories at the peak: `activations 74 %, optimizer state 14 %`."""
    largest = sorted(trace.by_category().items(), key=lambda item: -item[1])[:count]
    return ", ".join(f"{category} {percent(nbytes, trace.peak_bytes)}" for category, nbytes in largest) or "nothing"


def _lowest(measured: Measured) -> Iterator[str]:
    plain = measured[0][1].peak_bytes
    best = min(trace.peak_bytes for _, trace in measured)
    raised = [(row.label, trace.peak_bytes) for row, trace in measured[1:] if trace.peak_bytes > plain * (1 + _NEAR)]
    if raised:
        yield f"Raise the peak: {listed(f'{label} ({percent(nbytes, plain)})' for label, nbytes in raised)}."
    stays = [row.label for row, trace in measured[1:] if abs(trace.peak_bytes - plain) <= plain * _NEAR]
    if stays:
        yield f"Leave the peak where it is, within 2 %: {listed(stays)}."
    if best >= plain * (1 - _NEAR):
        return
    near = [(row, trace) for row, trace in measured if trace.peak_bytes <= best * (1 + _NEAR)]
    row, trace = min(near, key=lambda item: (item[0].equivalent is False, len(item[0].strategy.parts)))
    yield f"Lowest: {_result(row, trace, plain)}"
    if len(near) > 1:
        yield f"Within 2 % of that: {listed(other.label for other, _ in near if other is not row)}."
    single = [(row, trace) for row, trace in measured[1:] if len(row.strategy.parts) == 1]
    same = [(row, trace) for row, trace in measured[1:] if row.equivalent]
    told = {row.label}
    for which, group in (("single techniques", single), ("those that train the same model", same)):
        row, trace = min(group, key=lambda item: item[1].peak_bytes, default=measured[0])
        if row.label not in told and trace.peak_bytes < plain * (1 - _NEAR):
            told.add(row.label)
            yield f"Lowest of {which}: {_result(row, trace, plain)}"


def _result(row: Row, trace: Trace, plain: int) -> str:
    """`checkpoint, 23.2 MiB (50 % of the plain step's), for 1.26x the time and 1.25x the FLOPs.`"""
    prices = [(row.time_ratio, "the time"), (row.flops_ratio, "the FLOPs")]
    paid = listed(f"{format_ratio(ratio)} {of}" for ratio, of in prices if ratio is not None)
    share = f"{format_bytes(trace.peak_bytes)} ({percent(trace.peak_bytes, plain)} of the plain step's)"
    other = " It does not train the same model." if row.equivalent is False else ""
    return f"{row.label}, {share}" + (f", for {paid}." if paid else ".") + other


def _saved_against_peak(measured: Measured) -> Iterator[str]:
    """Single techniques that cut what is saved for backward by far more than the peak, and what is in the way."""
    plain = measured[0][1]
    for row, trace in measured[1:]:
        saved = 1 - trace.saved_bytes / plain.saved_bytes if plain.saved_bytes else 0.0
        lower = 1 - trace.peak_bytes / plain.peak_bytes
        if len(row.strategy.parts) == 1 and saved > max(lower, 0) + 0.1:
            peak = "stayed" if abs(lower) < 0.005 else percent(lower, 1) if lower > 0 else f"rose {percent(-lower, 1)}"
            where = pass_name(trace.peak.place)
            yield (
                f"{row.label}: saved bytes fell {percent(saved, 1)}, the peak {peak}. "
                f"The peak is in {where}: {_largest(trace, 3)}."
            )


def _in_the_optimizer(measured: Measured) -> Iterator[str]:
    found = [row.label for row, trace in measured[1:] if trace.peak.phase == "optimizer"]
    if found and measured[0][1].peak.phase != "optimizer":
        peaks = f"The peak of {found[0]} is" if len(found) == 1 else f"The peaks of {listed(found)} are"
        yield f"{peaks} in the optimizer step: more checkpointing or more micro-batches cannot move it."


def _sums(measured: Measured) -> Iterator[str]:
    """Sums that are no better than some of their parts, and the one whose parts' savings add up least."""
    plain = measured[0][1].peak_bytes
    savings: dict[object, int] = {}
    for row, trace in measured[1:]:
        if len(row.strategy.parts) == 1:
            savings[row.strategy] = plain - trace.peak_bytes
    gaps: list[tuple[int, str]] = []
    for row, trace in measured[1:]:
        parts = row.strategy.parts
        smaller = [(other, its) for other, its in measured[1:] if _is_part(other, row)]
        if smaller:
            best, its = min(smaller, key=lambda item: item[1].peak_bytes)
            against = f"{format_bytes(trace.peak_bytes)} against {format_bytes(its.peak_bytes)}"
            if trace.peak_bytes > its.peak_bytes * (1 + _NEAR):
                yield f"{row.label} is worse than {best.label}: {against}."
            elif plain * (1 - _NEAR) > its.peak_bytes and trace.peak_bytes > its.peak_bytes * (1 - _NEAR):
                yield f"{row.label} is no better than {best.label}: {against}."
        if len(parts) > 1 and all(part in savings for part in parts):
            added, together = sum(savings[part] for part in parts), plain - trace.peak_bytes
            text = f"{format_bytes(added)} one by one, {format_bytes(together)} together"
            if added > 0:
                gaps.append((added - together, f"Savings do not add up. {row.label}: {text}."))
    gap, sentence = max(gaps, default=(0, ""))
    if gap > plain * _NEAR:
        yield sentence


def _is_part(row: Row, whole: Row) -> bool:
    """Whether a row's techniques are some of another's."""
    return set(row.strategy.parts) < set(whole.strategy.parts)


def _verdicts(rows: tuple[Row, ...]) -> Iterator[str]:
    others = rows[1:]
    same = [row for row in others if row.equivalent]
    if same:
        who = "All" if len(same) == len(others) > 1 else listed(row.label for row in same)
        largest = max(row.gradient_difference or 0.0 for row in same)
        agree = "are identical" if largest == 0 else f"agree to {max(largest, 1e-12):.0e}"
        how = "in float64" if {row.proof for row in same} == {"float64"} else "in the precision they can be run in"
        train = "trains" if len(same) == 1 else "train"
        rounds = any("MixedPrecision" in repr(row.strategy) for row in same)
        apart = ", apart from the rounding of autocast, which leaves float64 alone" if rounds else ""
        yield f"{who} {train} the same model as {rows[0].label}: {how} the gradients {agree}{apart}."
    different: dict[str, list[str]] = {}
    for row in others:
        if row.equivalent is False:
            different.setdefault("; ".join(row.notes) or _distance(row), []).append(row.label)
    for why, labels in different.items():
        does = "does" if len(labels) == 1 else "do"
        yield f"{listed(labels)} {does} not train the same model: {_ended(why)}"
    unproven = [row.label for row in others if row.equivalent is None and row.error is None]
    if unproven:
        yield f"Not proven to train the same model: {listed(unproven)}."


def _distance(row: Row) -> str:
    if row.buffer_differences:
        return f"buffers end differently: {', '.join(row.buffer_differences)}"
    if row.gradient_difference is None:
        return "the results differ"
    return f"gradients differ by {row.gradient_difference:.2g}, relative"


def _precision(rows: tuple[Row, ...]) -> Iterator[str]:
    """Errors of gradients where rounding makes them, beside the plain step's; not again for sums of such."""
    floor = rows[0].gradient_error if rows else None
    if floor is None:
        return
    far = [row for row in rows[1:] if (row.gradient_error or 0.0) > 10 * floor and row.equivalent is not False]
    first = [row for row in far if not any(_is_part(other, row) for other in far)]
    if first:
        errors = ", ".join(f"{row.gradient_error:.0e} ({row.label})" for row in first)
        yield (
            "Rounding, which a proof in float64 leaves out: gradients are off, relative to exact ones, by "
            f"{floor:.0e} ({rows[0].label}), {errors}."
        )


def _ended(sentence: str) -> str:
    return sentence if sentence.endswith((".", "!", "?")) else f"{sentence}."
