"""Attributes replaced for as long as a block is open."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any


@contextlib.contextmanager
def replaced(owner: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """`owner`'s attributes have these values; those that it does not have are left out."""
    before = {name: getattr(owner, name) for name in values if hasattr(owner, name)}
    try:
        for name in before:
            setattr(owner, name, values[name])
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
