"""The random numbers of the checks."""

from __future__ import annotations

import torch
from torch import Tensor


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random numbers, the same for the same seed, that disturb nobody's random stream."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
