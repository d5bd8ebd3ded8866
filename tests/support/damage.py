"""Damage to files, as by a faulty disk."""

from __future__ import annotations

import json
from dataclasses import replace

from megapar.checkpoints.format.layout import read_layout
from megapar.checkpoints.format.names import LAYOUT_FILE
from megapar.checkpoints.format.shards import write_bytes
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


def reseal(folder: Place, **other: object) -> None:
    """Write other scalars of a checkpoint, whose hash is right; None leaves one out."""
    layout, folder = read_layout(folder), at(folder)
    path = folder / layout.scalars.name
    scalars = {name: value for name, value in {**path.json(), **other}.items() if value is not None}
    path.remove()
    entry = write_bytes(path, json.dumps(scalars).encode())
    put(folder / LAYOUT_FILE, replace(layout, scalars=entry).to_bytes())
