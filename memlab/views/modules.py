"""The treemap: which module's bytes are alive at the peak, as areas.

Rule 1. An area is proportional to its bytes, and areas lie in those of the modules above them.
Rule 2. Within a module, areas are coloured by category. What belongs to no module stands beside the modules.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..errors import MemlabError
from ..trace import Trace
from ..units import format_bytes
from .blocks import block_names
from .canvas import WIDTH, canvas, shortened, title, write_within
from .colours import TOO_SMALL
from .plots import Box, look, peak_legend, rectangle
from .words import listed, pass_name

Path = tuple[str, ...]
_AREA = (12.0, 36.0, 705.0, 440.0)
_SHOWN = 4  # modules named in the summary


def plot_modules(trace: Trace, *, depth: int | None = None) -> Any:
    """Bytes alive at the peak as a treemap by module, coloured by category.

    `depth` cuts names to so many parts; None cuts them at the network's blocks (`blocks.3`, `model.layers.0`).
    Returns a figure. Raises MemlabError for a depth below 1.
    """
    if depth is not None and (not isinstance(depth, int) or depth < 1):
        raise MemlabError(f"depth={depth!r}: give the number of parts of a module's name to keep, from 1, or None")
    sizes = module_sizes(trace, depth)
    peak = f"{format_bytes(trace.peak_bytes)} alive at the peak, in {pass_name(trace.peak.place)}"
    picture, ax = canvas(_AREA[3] + 14, modules_summary(trace, depth))
    title(ax, trace, f": {peak if sizes else 'nothing was in memory'}")
    boxes = nested(sizes, _AREA)
    for path in sizes:
        rectangle(ax, boxes[path], **look(path[-1]))
    for path, box in boxes.items():
        edge = 4.0 if len(path) == 1 else 2.0 if path not in sizes else 0.7
        rectangle(ax, box, fill=False, edgecolor="white", linewidth=edge)
    regions = module_regions(sizes)
    for path, nbytes in regions.items():
        left, top, right, bottom = boxes[path]
        if right - left < 25 or bottom - top < 18:  # no text fits, and measuring takes time
            continue
        name, size = ".".join(path), format_bytes(nbytes)
        short = shortened(ax, name, right - left - 13, fontweight="bold", fontsize=7.5)
        texts = (f"{name}  {size}", f"{name}\n{size}", f"{short}\n{size}", name)
        ground = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 2}
        write_within(ax, boxes[path], texts, fontweight="bold", bbox=ground, linespacing=1.15)
    legend = picture.add_axes((_AREA[2] / WIDTH, 0, 0.001, 1 - 24 / (_AREA[3] + 14)))
    legend.set_axis_off()
    peak_legend(legend, trace, [c for c, n in trace.by_category().items() if n >= TOO_SMALL * trace.peak_bytes])
    return picture


def modules_summary(trace: Trace, depth: int | None = None) -> str:
    """What the treemap shows, in one line."""
    regions = module_regions(module_sizes(trace, depth))
    largest = sorted(regions.items(), key=lambda item: -item[1])
    shown = [f"{'.'.join(path)} {format_bytes(nbytes)}" for path, nbytes in largest[:_SHOWN]]
    more = [f"{len(largest) - _SHOWN} more"] if largest[_SHOWN:] else []
    peak = format_bytes(trace.peak_bytes)
    return f"Memory at the peak of {trace.strategy}, {peak}, by module: {listed([*shown, *more]) or 'nothing'}"


def module_sizes(trace: Trace, depth: int | None = None) -> dict[Path, int]:
    """Bytes alive at the peak, by the parts of the module's name and, last, the category."""
    blocks = block_names(trace)
    sizes: dict[Path, int] = {}
    for allocation in trace.peak.allocations:
        module, category = allocation.place.module, allocation.category
        parts = (module if depth else blocks[module]).split(".")[:depth] if module else [f"({category})"]
        path = (*parts, category)
        sizes[path] = sizes.get(path, 0) + allocation.nbytes
    return {path: nbytes for path, nbytes in sizes.items() if nbytes}


def module_regions(sizes: dict[Path, int]) -> dict[Path, int]:
    """The same by module alone."""
    regions: dict[Path, int] = {}
    for path, nbytes in sizes.items():
        regions[path[:-1]] = regions.get(path[:-1], 0) + nbytes
    return regions


def nested(sizes: dict[Path, int], box: Box, above: Path = ()) -> dict[Path, Box]:
    """A box for each path and for each start of one: each within that of the path above it, by the sum of its sizes."""
    groups: dict[str, dict[Path, int]] = {}
    for path, size in sizes.items():
        if len(path) > len(above):
            groups.setdefault(path[len(above)], {})[path] = size
    sums = {name: sum(group.values()) for name, group in groups.items()}
    largest = sorted(sums, key=lambda name: -sums[name])
    found: dict[Path, Box] = {}
    for name, inner in zip(largest, squarified([sums[name] for name in largest], box), strict=True):
        found[(*above, name)] = inner
        found |= nested(groups[name], inner, (*above, name))
    return found


def squarified(sizes: list[int], box: Box) -> list[Box]:
    """Boxes that fill `box` with areas proportional to the sizes (largest first), as near to squares as rows and
    columns make them (Bruls, Huizing and van Wijk 2000)."""
    left, top, right, bottom = box
    if len(sizes) < 2:
        return [box] * len(sizes)
    wide, high = right - left, bottom - top
    short = min(wide, high)
    scale = wide * high / sum(sizes)
    count = 1
    while count < len(sizes) and _worst(sizes[: count + 1], short, scale) <= _worst(sizes[:count], short, scale):
        count += 1
    thick = sum(sizes[:count]) * scale / short if short else 0.0
    row, at = [], 0.0
    for size in sizes[:count]:
        along = size * scale / thick if thick else 0.0
        if wide >= high:
            row.append((left, top + at, left + thick, top + at + along))
        else:
            row.append((left + at, top, left + at + along, top + thick))
        at += along
    rest = (left + thick, top, right, bottom) if wide >= high else (left, top + thick, right, bottom)
    return row + squarified(sizes[count:], rest)


def _worst(row: Iterable[int], short: float, scale: float) -> float:
    """The largest ratio of sides in a row along the short side."""
    areas = [size * scale for size in row]
    thick = sum(areas) / short if short else 0.0
    return max((max(thick * thick / area, area / (thick * thick)) for area in areas), default=0.0) if thick else 0.0
