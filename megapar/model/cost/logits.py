"""The rows of logits that the head makes at a time, in a run as in a plan. Standard library only."""

from __future__ import annotations


def rows_at_a_time(rows: int, row_bytes: int, held_bytes: int) -> int:
    """Rows of a piece where ``rows`` are split evenly into pieces of at most ``held_bytes``; at least 1."""
    pieces = max(1, -(-rows // max(1, held_bytes // row_bytes)))
    return max(1, -(-rows // pieces))
