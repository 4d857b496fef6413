"""A `Comparison` in words: what moved the peak, at what price, what adds up and what does not, and the proof."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..trace import Trace
from ..units import format_bytes, format_ratio
from .words import listed, pass_name, percent, wrapped

if TYPE_CHECKING:
    from ..compare import Comparison, Row

_NEAR = 0.02  # peaks closer than this, relative, are called the same


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
    if unproven and all(row.trace is not None and row.trace.source == "simulated" for row in rows if not row.error):
        yield "Simulated: nothing was computed, so nothing is proven about the models and nothing was timed."
    elif unproven:
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
