"""Pieces of tensors in the memory of a shard, and a table of them for kernels.

A piece says where its elements are in the memory of the shard, and which of a flattened tensor they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from megapar.core.box import Box

DIMS = 4  # of a piece, at most, in the table
COLUMNS = 5 + 3 * DIMS
PROGRAM = 512  # elements of a kernel's program, all of one piece
_LARGEST = 1 << 30  # elements of a row of the table: places in it are 32-bit integers


@dataclass(frozen=True)
class TensorPiece:
    """Elements of a master shard that belong to one Hugging Face tensor.

    Attributes:
        key: Of the tensor and the run's seed, up to 63 bits.
        start: Place of the first element in the shard's memory.
        sizes: Elements along each dim; dims that are contiguous in both are one.
        strides: Of each dim, in the shard's memory.
        index: Index of the first element in the flattened tensor.
        steps: Of each dim, the difference of indices in the flattened tensor.
    """

    key: int
    start: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    index: int
    steps: tuple[int, ...]

    def within(self, shard: Tensor) -> Tensor:
        """Return the piece's elements, a view of a tensor of the shard: master, gradient or state."""
        return shard.as_strided(self.sizes, self.strides, int(shard.storage_offset()) + self.start)

    def slabs(self, numel: int) -> Iterator[TensorPiece]:
        """Yield parts of at most ``numel`` elements."""
        for box in Box.whole(self.sizes).slabs(numel):
            start = self.start + dot(box.offsets, self.strides)
            index = self.index + dot(box.offsets, self.steps)
            yield TensorPiece(self.key, start, box.sizes, self.strides, index, self.steps)

    def indices(self, device: torch.device) -> Tensor:
        """Return the index of each element in its tensor, int64."""
        indices = torch.full((), self.index, dtype=torch.int64, device=device)
        for size, step in zip(self.sizes, self.steps, strict=True):
            indices = indices.unsqueeze(-1) + torch.arange(0, size * step, step, dtype=torch.int64, device=device)
        return indices


class PieceTable(NamedTuple):
    """The pieces of a shard, for a kernel whose programs compute ``PROGRAM`` elements of a piece each.

    Attributes:
        numbers: For each piece its key, start, index, first program and number of elements; then sizes, strides and
            steps of ``DIMS`` dims, the last dim last: [pieces, COLUMNS] int64.
        owners: The piece of each program, int32.
    """

    numbers: Tensor
    owners: Tensor


@dataclass(frozen=True)
class ShardPieces:
    """The pieces of a master shard."""

    pieces: tuple[TensorPiece, ...]
    _tables: dict[torch.device, PieceTable] = field(default_factory=dict, repr=False, compare=False)

    def table(self, device: torch.device) -> PieceTable:
        """Return their table on a device, made once."""
        if device not in self._tables:
            self._tables[device] = _table(self.pieces, device)
        return self._tables[device]


def _table(pieces: Sequence[TensorPiece], device: torch.device) -> PieceTable:
    rows: list[list[int]] = []
    owners: list[int] = []
    for piece in (slab for whole in pieces for slab in whole.slabs(_LARGEST)):
        left, numel = DIMS - len(piece.sizes), Box.whole(piece.sizes).numel
        assert left >= 0, "parameters have at most four dims"
        sizes, strides, steps = (1,) * left + piece.sizes, (0,) * left + piece.strides, (0,) * left + piece.steps
        rows.append([piece.key, piece.start, piece.index, len(owners), numel, *sizes, *strides, *steps])
        owners += [len(rows) - 1] * -(-numel // PROGRAM)
    numbers = torch.tensor(rows, dtype=torch.int64).view(-1, COLUMNS)
    return PieceTable(numbers.to(device), torch.tensor(owners, dtype=torch.int32).to(device))


def dot(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the sum of products of two rows of integers."""
    return sum(a * b for a, b in zip(left, right, strict=True))
