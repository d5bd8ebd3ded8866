"""How wide a row of a dispatch is. Standard library only, so that plans count as the run does."""

from __future__ import annotations

ALIGNED_BYTES = 16  # from which NCCL copies whole vectors


def row_columns(hidden: int, weight_bytes: int, item_bytes: int) -> int:
    """Elements of a token of ``hidden`` elements, the bits of its weight, and what fills up to 16 bytes."""
    unit = max(1, ALIGNED_BYTES // item_bytes)
    wanted = hidden + weight_bytes // item_bytes
    return -(-wanted // unit) * unit
