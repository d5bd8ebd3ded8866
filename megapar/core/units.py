"""Units of bytes and of parameter counts, and the type of a JSON value.

Tested in ``tests/planning/test_plan.py``.
"""

from __future__ import annotations

from typing import Any, TypeAlias

Json: TypeAlias = Any
MEGABYTE = 2**20
GIBIBYTE = 2**30


def billions(count: int) -> str:
    """Format a number of parameters for people: in billions from 0.1 B on, else in millions."""
    return f"{count / 1e9:.4g} B" if count >= 1e8 else f"{count / 1e6:.4g} M"
