"""A `Difference` of two traces in words, as a table, in HTML and as a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from html import escape
from typing import TYPE_CHECKING, Any, Literal

from ..contrast import Difference
from ..errors import MemlabError
from ..held import Held, counted_bytes
from ..trace import SAVED_CATEGORIES, Trace
from ..units import MiB, format_bytes
from .blocks import NOWHERE, block_names, pattern, runs, span
from .saved import slot_name
from .words import listed, pass_name, percent, wrapped

if TYPE_CHECKING:
    import pandas as pd

Parts = dict[str, int]  # bytes by category
_LITTLE = 0.005  # of the larger peak: less is not called a change
_NAMED = 3  # things named in a sentence
_PANEL = 12  # rows of a picture's lower part before blocks that are alike are one

# -- words -------------------------------------------------------------------------------------------------------------


def labels(difference: Difference) -> tuple[str, str]:
    """What to call the two: by strategy, with the source or a letter where that does not tell them apart."""
    first, second = difference.first, difference.second
    if first.strategy != second.strategy:
        return first.strategy, second.strategy
    if first.source != second.source:
        return f"{first.strategy} ({first.source})", f"{second.strategy} ({second.source})"
    return f"A ({first.strategy})", f"B ({second.strategy})"


def explain_difference(difference: Difference) -> str:
    """Plain sentences: what the peak does, which categories make it, what is saved in one and not in the other."""
    return wrapped(difference_sentences(difference))


def difference_sentences(difference: Difference) -> Iterator[str]:
    """The same, sentence by sentence."""
    (a, b), first, second = labels(difference), difference.first, difference.second
    change = difference.peak_bytes
    little = _LITTLE * max(first.peak_bytes, second.peak_bytes, 1)
    where = f"{_at(first)} with {a}, {_at(second)} with {b}"
    if abs(change) < little:
        yield f"The peak stays, within {100 * _LITTLE:g} %: {where}."
    else:
        share = percent(abs(change), first.peak_bytes) if first.peak_bytes else "from nothing"
        yield f"The peak {'rises' if change > 0 else 'falls'} by {format_bytes(abs(change))} ({share}): {where}."
    changes = {name: new - old for name, (old, new) in difference.by_category().items()}
    for word, sign in (("less", -1), ("more", 1)):
        moved = sorted((sign * nbytes, name) for name, nbytes in changes.items() if sign * nbytes >= little)[::-1]
        if moved:
            parts = listed(f"{format_bytes(nbytes)} of {name}" for nbytes, name in moved[:_NAMED])
            yield f"At the peak there is {word} with {b} than with {a}: {parts}."
    yield from _saved_sentences(difference, a, b)


def _at(trace: Trace) -> str:
    return f"{format_bytes(trace.peak_bytes)} in {pass_name(trace.peak.place)}"


def _saved_sentences(difference: Difference, a: str, b: str) -> Iterator[str]:
    first, second = difference.first.saved_bytes, difference.second.saved_bytes
    if not (difference.only_first or difference.only_second):
        if difference.both:
            yield f"Both save the same tensors for backward, {format_bytes(second)}."
        return
    yield f"Saved for backward: {format_bytes(first)} with {a}, {format_bytes(second)} with {b}."
    for name, other, items in ((a, b, difference.only_first), (b, a, difference.only_second)):
        if items:
            named = _by_pattern(items)
            largest = listed(f"{where} {format_bytes(nbytes)}" for where, nbytes in named[:_NAMED])
            lead = "the largest are " if len(named) > _NAMED else ""
            size = f"{_tensors(items)}, {format_bytes(counted_bytes(items))}"
            yield f"Saved with {name} and not with {other}: {size}; {lead}{largest}."
    if resized := difference.resized():
        old, new = resized[0]
        sizes = (format_bytes(sum(pair[side].nbytes for pair in resized)) for side in (0, 1))
        yield (
            f"Of these, {_tensors(resized)} {'is' if len(resized) == 1 else 'are'} in both, in another shape or type, "
            f"{' against '.join(sizes)}: "
            f"{old.first.slot}, for one, is {_shape(old)} with {a} and {_shape(new)} with {b}."
        )


def _tensors(items: tuple[Any, ...]) -> str:
    return f"{len(items)} tensor{'s' if len(items) > 1 else ''}"


def _shape(item: Held) -> str:
    return f"{' x '.join(map(str, item.first.shape)) or 'one number'} {item.first.dtype}"


def _by_pattern(items: Iterable[Held]) -> list[tuple[str, int]]:
    """Bytes by operator and slot, in which modules: `GeluBackward0.self in blocks.*.mlp.1`, the largest first."""
    sums: dict[str, int] = {}
    for item in items:
        module = pattern(item.first.module)
        name = item.first.slot + (f" in {module}" if module else "")
        sums[name] = sums.get(name, 0) + item.nbytes
    return sorted(sums.items(), key=lambda entry: -entry[1])


# -- tables ------------------------------------------------------------------------------------------------------------


def difference_frame(difference: Difference, of: Literal["categories", "saved"] = "categories") -> pd.DataFrame:
    """A row per category and one for the peak, or a row per storage held for backward, in MiB."""
    import pandas as pd

    a, b = labels(difference)
    if of == "categories":
        rows = {"peak": (difference.first.peak_bytes, difference.second.peak_bytes)} | difference.by_category()
        body = [[round(n / MiB, 3) for n in (old, new, new - old)] for old, new in rows.values()]
        return pd.DataFrame(body, index=pd.Index(list(rows), name="alive at the peak"), columns=[a, b, "difference"])
    if of != "saved":
        raise MemlabError(f'to_frame(of={of!r}): there are "categories" and "saved"')
    pairs: list[tuple[str, Held | None, Held | None]] = [
        *((f"only {a}", item, None) for item in difference.only_first),
        *((f"only {b}", None, item) for item in difference.only_second),
        *(("both", old, new) for old, new in difference.both),
    ]
    found = []
    for where, old, new in pairs:
        item = old or new
        assert item is not None
        sizes = [0.0 if one is None else round(one.nbytes / MiB, 3) for one in (old, new)]
        first = item.first
        found.append((where, first.module, first.operator, slot_name(item), first.shape, first.dtype, *sizes))
    columns = ["in", "module", "operator", "slot", "shape", "dtype", f"{a} MiB", f"{b} MiB"]
    return pd.DataFrame(found, columns=columns)


def _rows(difference: Difference) -> list[tuple[str, int, int]]:
    """What the tables show: a name, the first's bytes, the second's."""
    categories = [(f"  {name}", old, new) for name, (old, new) in difference.by_category().items()]
    old_both, new_both = (counted_bytes(tuple(pair[side] for pair in difference.both)) for side in (0, 1))
    a, b = labels(difference)
    return [
        ("peak", difference.first.peak_bytes, difference.second.peak_bytes),
        *categories,
        ("saved for backward", difference.first.saved_bytes, difference.second.saved_bytes),
        ("  in both", old_both, new_both),
        (f"  only {a}", counted_bytes(difference.only_first), 0),
        (f"  only {b}", 0, counted_bytes(difference.only_second)),
    ]


def signed(nbytes: int) -> str:
    """`+12.3 MiB`, `-1.50 GiB`, `0 B`."""
    return f"+{format_bytes(nbytes)}" if nbytes > 0 else format_bytes(nbytes)


def difference_text(difference: Difference) -> str:
    """The tables in a terminal."""
    a, b = labels(difference)
    body = [("", a, b, "difference")]
    body += [(name, format_bytes(old), format_bytes(new), signed(new - old)) for name, old, new in _rows(difference)]
    widths = [max(len(row[column]) for row in body) for column in range(4)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in body
    )


def difference_html(difference: Difference) -> str:
    """The tables in a notebook's cell, and below them what they say."""
    from .html import bullets, table_of, table_row

    a, b = map(escape, labels(difference))
    body = [table_row("th", "", a, b, "difference")]
    for name, old, new in _rows(difference):
        indent = f"&emsp;{escape(name.strip())}" if name.startswith(" ") else f"<b>{escape(name)}</b>"
        body.append(table_row("td", indent, format_bytes(old), format_bytes(new), signed(new - old)))
    return f"<div>{table_of(body)}{bullets(difference_sentences(difference))}</div>"


# -- the picture -------------------------------------------------------------------------------------------------------


def difference_summary(difference: Difference) -> str:
    """What the picture shows, in one line."""
    a, b = labels(difference)
    first, second = (counted_bytes(items) for items in (difference.only_first, difference.only_second))
    return (
        f"{a} against {b}: the peak goes from {format_bytes(difference.first.peak_bytes)} to "
        f"{format_bytes(difference.second.peak_bytes)}; {format_bytes(first)} is saved only with the first, "
        f"{format_bytes(second)} only with the second"
    )


def plot_difference(difference: Difference) -> Any:
    """Both timelines to one scale; below, by block, what is saved in one alone, the first's to the left and the
    second's to the right. Returns a figure."""
    from .canvas import WIDTH, bar, canvas, shortened, write
    from .plots import plot_trace

    rows = _panel(difference)
    row, timeline, top = 26.0, 345.0, 2 * 345.0 + 24
    height = top + 40 + row * max(len(rows), 1) + 14
    picture, ax = canvas(height, difference_summary(difference))
    for number, trace in enumerate((difference.first, difference.second)):
        above = number * timeline
        place = (0.075, 1 - (above + timeline - 48) / height, 0.665, (timeline - 100) / height)
        scale = max(difference.first.peak_bytes, difference.second.peak_bytes)
        plot_trace(trace, ax=picture.add_axes(place), scale=scale).axes[-1].set_title(
            labels(difference)[number], loc="left", fontsize=11, pad=20, parse_math=False
        )
    middle, longest = WIDTH / 2, 210.0
    a, b = labels(difference)
    for items, name, x, side in (
        (difference.only_first, a, middle - 110, "right"),
        (difference.only_second, b, middle + 110, "left"),
    ):
        text = f"saved only with {name}: {format_bytes(counted_bytes(items))}"
        write(ax, x, top + 18, shortened(ax, text, 350, fontweight="bold"), ha=side, fontweight="bold")
    if not rows:
        write(ax, middle, top + 48, "nothing is saved in one of them alone", ha="center")
    largest = max((sum(part.values()) for _, *both in rows for part in both), default=1)
    for number, (name, old, new) in enumerate(rows):
        y = top + 40 + row * (number + 0.5)
        write(ax, middle, y, shortened(ax, name, 204), ha="center")
        for parts, x, sign in ((old, middle - 110, -1), (new, middle + 110, 1)):
            if parts:
                end = bar(ax, x, y, {kind: sign * nbytes * longest / largest for kind, nbytes in parts.items()})
                size = format_bytes(sum(parts.values()))
                write(ax, end + 6 * sign, y, size, ha="left" if sign > 0 else "right")
    return picture


def _panel(difference: Difference) -> list[tuple[str, Parts, Parts]]:
    """By block, in forward order: the name, bytes by category only the first saves, and only the second. In a long
    chain, neighbours that are alike are one row with the sums."""
    names = block_names(difference.second) | block_names(difference.first)
    order = dict.fromkeys([*block_names(difference.first).values(), *block_names(difference.second).values()])
    sums: dict[str, tuple[Parts, Parts]] = {block: ({}, {}) for block in order}
    for side, items in enumerate((difference.only_first, difference.only_second)):
        for item in items:
            parts = sums[names[item.first.module]][side]
            parts[item.first.kind] = parts.get(item.first.kind, 0) + item.nbytes
    blocks = [(block, old, new) for block, (old, new) in sums.items() if old or new]
    blocks.sort(key=lambda block: block[0] == NOWHERE)
    together = runs(blocks, lambda block: (pattern(block[0]), str(block[1:])), _PANEL)
    return [
        (span(name for name, _, _ in run), _sum(old for _, old, _ in run), _sum(new for _, _, new in run))
        for run in together
    ]


def _sum(parts: Iterable[Parts]) -> Parts:
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return {category: total[category] for category in SAVED_CATEGORIES if total[category]}
