"""Attributes replaced for as long as a block is open."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

_INHERITED = object()


@contextlib.contextmanager
def replaced(owner: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """`owner`'s attributes have these values; those that it does not have are left out."""
    before = {name: vars(owner).get(name, _INHERITED) for name in values if hasattr(owner, name)}
    try:
        for name in before:
            setattr(owner, name, values[name])
        yield
    finally:
        for name, value in before.items():
            if value is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
