"""Damage to files, as by a faulty disk."""

from __future__ import annotations

from megapar.files.location import Place, at
from tests.support.stores import put


def flip_bit(path: Place, position: int | None = None, bit: int = 0) -> None:
    """Flip one bit of the byte at a position; None: of the byte in the middle."""
    content = bytearray(at(path).content())
    content[len(content) // 2 if position is None else position] ^= 1 << bit
    put(at(path), bytes(content))


def cut(path: Place, size: int) -> None:
    """Leave the first bytes of a file; ``size`` from the end if it is negative."""
    put(at(path), at(path).content()[:size])
