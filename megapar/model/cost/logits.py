"""Chunk size of the logits, for runs and plans."""

from __future__ import annotations


def rows_at_a_time(rows: int, row_bytes: int, held_bytes: int) -> int:
    """Return the rows of a chunk if ``rows`` are split evenly into chunks of at most ``held_bytes``; at least 1."""
    pieces = max(1, -(-rows // max(1, held_bytes // row_bytes)))
    return max(1, -(-rows // pieces))
