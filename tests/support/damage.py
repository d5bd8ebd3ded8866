"""Damage to files, as by a faulty disk."""

from __future__ import annotations

from pathlib import Path


def flip_bit(path: Path, position: int | None = None, bit: int = 0) -> None:
    """Flip one bit of the byte at a position; None: of the byte in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if position is None else position] ^= 1 << bit
    path.write_bytes(content)
