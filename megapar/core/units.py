"""Units of bytes, and the type of a value that came from JSON."""

from __future__ import annotations

from typing import Any, TypeAlias

Json: TypeAlias = Any
MEGABYTE = 2**20
GIBIBYTE = 2**30


def billions(count: int) -> str:
    """A number of parameters, for people: billions from a tenth of one on, else millions."""
    return f"{count / 1e9:.4g} B" if count >= 1e8 else f"{count / 1e6:.4g} M"
