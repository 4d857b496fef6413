"""How far apart two steps' outcomes are.

Rule 1. Of gradients: max over parameters of ||g - g0|| / max(||g0||, 1e-3 sqrt(n_p / n) ||all g0||). The floor is there
        because some gradients are zero in mathematics (an attention key's bias) and noise in arithmetic. Of updated
        parameters the same with 1 for 1e-3: a bias that starts at zero may hold nothing but such noise.
Rule 2. Of the loss: relative to the losses of micro-batches, which may cancel (advantages, a critic's scores).
Rule 3. What nothing trains (buffers, frozen parameters) is the same within `STATE` or is listed by name. Infinities
        that are equal (a mask's) are no distance; a NaN is far from all but a NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from .kept import LENGTH, Kept
from .outcome import Outcome, Tensors

_Named: TypeAlias = Mapping[str, torch.Tensor | None]

STATE = 1e-9
_FLOOR = 1e-3
_ONE_FACTOR = 1e-6


@dataclass(frozen=True)
class Difference:
    """loss, gradient, parameter: relative distances; `worst`, `worst_parameter` are whose gradient and whose updated
    parameter differs most. `buffers` names what ends differently and nothing trains; `kept` the same for what modules
    keep elsewhere; `grown` their lists of other lengths, perhaps mere logs."""

    loss: float
    gradient: float
    parameter: float
    buffers: tuple[str, ...]
    kept: tuple[str, ...]
    grown: tuple[str, ...]
    worst: str
    worst_parameter: str

    def within(self, tolerance: float) -> bool:
        apart = (self.loss, self.gradient, self.parameter)  # one by one: NaN is within nothing
        return all(distance <= tolerance for distance in apart) and not self.buffers and not self.kept


def difference(outcome: Outcome, plain: Outcome) -> Difference:
    """How far an outcome is from the plain one."""
    gradient, worst = _furthest(outcome.gradients, plain.gradients, _FLOOR)
    (trained, state), (trained0, state0) = _parted(outcome, plain.trained), _parted(plain, plain.trained)
    parameter, worst_parameter = _furthest(trained, trained0, 1.0)
    elsewhere = sorted(changed(outcome.kept, plain.kept))
    return Difference(
        loss=abs(outcome.loss - plain.loss) / max(plain.loss_scale, outcome.loss_scale, 1e-300),
        gradient=gradient,
        parameter=parameter,
        buffers=_differing(state, state0),
        kept=tuple(name for name in elsewhere if not name.startswith(LENGTH)),
        grown=tuple(name for name in elsewhere if name.startswith(LENGTH)),
        worst=worst,
        worst_parameter=worst_parameter,
    )


def changed(one: Kept, other: Kept) -> set[str]:
    """The names in both under which they differ."""
    return {name for name in one.keys() & other.keys() if not _same(one[name], other[name])}


def _same(one: complex | torch.Tensor, other: complex | torch.Tensor) -> bool:
    return _state_apart(torch.as_tensor(one), torch.as_tensor(other)) <= STATE


def _parted(outcome: Outcome, trained: frozenset[str]) -> tuple[Tensors, Tensors]:
    """The parameters that are trained; all else that is registered."""
    parameters = {name: p for name, p in outcome.parameters.items() if name in trained}
    frozen = {name: p for name, p in outcome.parameters.items() if name not in trained}
    return parameters, {**frozen, **outcome.buffers}


def _differing(found: Tensors, reference: Tensors) -> tuple[str, ...]:
    both = found.keys() & reference.keys()
    apart = {name for name in both if not _state_apart(found[name], reference[name]) <= STATE}
    return tuple(sorted(apart | (found.keys() ^ reference.keys())))


def _furthest(found: _Named, reference: _Named, share: float) -> tuple[float, str]:
    """The largest distance and whose it is: relative to the reference's norm, or to a share of what all have for its
    size."""
    present = [tensor for tensor in reference.values() if tensor is not None]
    usual = math.sqrt(sum(_norm(t) ** 2 for t in present) / max(sum(t.numel() for t in present), 1))
    furthest, whose = 0.0, ""
    for name, tensor in reference.items():
        other = found.get(name)
        if tensor is None and other is None:
            continue
        if tensor is None or other is None:
            apart = math.inf
        else:
            apart = _apart(other, tensor, share * usual * math.sqrt(tensor.numel()))
        if math.isnan(apart):
            return apart, name
        if apart > furthest:
            furthest, whose = apart, name
    return furthest, whose


def _norm(tensor: torch.Tensor) -> float:
    """Of the finite elements: an infinite one would make every distance small."""
    return float(torch.linalg.vector_norm(tensor[tensor.isfinite()]))


def _apart(found: torch.Tensor, reference: torch.Tensor, floor: float = 0.0) -> float:
    """Relative distance; infinite where shapes differ."""
    if found.shape != reference.shape:
        return math.inf
    off = found != reference  # equal infinities are not
    distance = float(torch.linalg.vector_norm(found[off] - reference[off]))
    return 0.0 if distance == 0 else distance / max(_norm(reference), floor, 1e-300)


def _state_apart(found: torch.Tensor, reference: torch.Tensor) -> float:
    """The same where a NaN is no further from another."""
    wide = torch.complex128 if found.is_complex() or reference.is_complex() else torch.float64
    one, other = found.to(wide), reference.to(wide)
    if one.shape == other.shape:
        neither = one.isnan() & other.isnan()
        one, other = one.masked_fill(neither, 0.0), other.masked_fill(neither, 0.0)
    return _apart(one, other)


def factor(outcome: Outcome, plain: Outcome) -> float | None:
    """The one number that an outcome's gradients are times the plain ones, where there is one."""
    pairs = [(outcome.gradients.get(name), gradient) for name, gradient in plain.gradients.items()]
    both = [(g, g0) for g, g0 in pairs if g is not None and g0 is not None and g.shape == g0.shape]
    square = sum(_norm(g0) ** 2 for _, g0 in both)
    if not square:
        return None
    times = sum(float((g * g0.conj()).real.sum()) for g, g0 in both) / square
    scaled = {name: None if g0 is None else g0 * times for name, g0 in plain.gradients.items()}
    return times if _furthest(outcome.gradients, scaled, _FLOOR)[0] <= _ONE_FACTOR else None
