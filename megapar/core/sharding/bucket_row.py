"""The row of a bucket: where the pieces of its parameters are, and the ranges that the optimizer treats alike.

row | with decay: a, b | c: split over mp | without: d | padding |     [P]; each rank has one, its master shard
    |  range           |  range           |  range     |

The order in which a collective sums an element follows from the message's length and the element's place in it. Where
mp ranks have pieces of unequal length (of the vocabulary), each piece therefore has the room of the longest: what mp
replicates lies at the same place of rows of the same length, and the sums on all mp ranks have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from math import prod

from torch import Tensor, nn

from megapar.core.box import Box
from megapar.core.sharding.cut import ALIGNED_BYTES, ParameterInfo, shard_dim
from megapar.core.sharding.master_shard import Treatment

LARGE_BYTES = 1 << 16  # of a rank's part: above this, the time of its copy matters

# (description, local parameter, this rank's master box, True if this rank counts it in the global norm, elements of the
# longest piece of any rank)
Entry = tuple[ParameterInfo, nn.Parameter, Box, bool, int]


@dataclass(frozen=True)
class BucketParameter:
    """One parameter of a bucket.

    Attributes:
        parameter: The local parameter (cut by mp, ep and emp).
        counted: True if this rank counts it in the global norm.
        split: Number of its dims that other axes cut.
        piece: Shape of one rank's piece, including padding.
        offset: First element of the piece in a row.
        room: Elements from there to the next piece; more than ``numel`` where another mp rank has a longer piece.
        box: This rank's piece of the global tensor, without padding.
        padded: True if ``num_pieces`` does not divide the dim.
    """

    spec: ParameterInfo
    parameter: nn.Parameter
    counted: bool
    num_pieces: int
    dim: int
    split: int
    piece: tuple[int, ...]
    offset: int
    room: int
    box: Box
    padded: bool

    @cached_property
    def numel(self) -> int:
        """The number of elements of one piece, including padding."""
        return prod(self.piece)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """The strides of one piece in a row."""
        return tuple(prod(self.piece[dim + 1 :]) for dim in range(len(self.piece)))

    def parts(self, *, by_row: bool) -> tuple[int, ...]:
        """Return the lengths of a piece's rows of dim 0 and of the padding after them; ``numel`` if not ``by_row``."""
        if not by_row or not self.numel:
            return (self.numel,)
        row, rows = self.numel // self.piece[0], self.box.sizes[0]
        return *(row,) * rows, *((self.numel - row * rows,) if rows < self.piece[0] else ())

    def rows(self, tensor: Tensor) -> Tensor:
        """Return a whole local tensor as [n, *piece]; a view unless it needs padding."""
        if self.padded:
            tensor = _pad(tensor, self.dim, self.piece[self.dim] * self.num_pieces)
        cut: Tensor = tensor.unflatten(self.dim, (-1, self.piece[self.dim]))
        return cut.movedim(self.dim, 0)


def _pad(tensor: Tensor, dim: int, length: int) -> Tensor:
    padded = tensor.new_zeros(*tensor.shape[:dim], length, *tensor.shape[dim + 1 :])
    padded.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
    return padded


def _alike(entry: Entry) -> tuple[bool, Treatment, tuple[tuple[str, int], ...]]:
    """Return a sort key that groups parameters which the optimizer and the norm treat alike."""
    spec = entry[0]
    return not spec.decay, Treatment.of(spec), spec.axes


def make_members(parameters: Sequence[Entry], num_pieces: int) -> tuple[BucketParameter, ...]:
    """Lay parameters out in a row, in the same order on every rank; parameters treated alike are adjacent."""
    members: list[BucketParameter] = []
    offset = 0
    for spec, parameter, box, counted, room in sorted(parameters, key=_alike):
        sizes = tuple(parameter.shape)
        dim = shard_dim(sizes, num_pieces)
        piece = (*sizes[:dim], -(-sizes[dim] // num_pieces), *sizes[dim + 1 :])
        padded = piece[dim] * num_pieces != sizes[dim]
        split = sum(size != whole for size, whole in zip(sizes, spec.shape, strict=True))
        fields = (spec, parameter, counted, num_pieces, dim, split, piece, offset, room, box, padded)
        members.append(BucketParameter(*fields))
        offset += room
    return tuple(members)


def row_length(elements: int, item_bytes: int) -> int:
    """Return the padded length of a row of ``elements``. item_bytes: the smallest element size of its messages."""
    if elements * item_bytes <= LARGE_BYTES or item_bytes >= ALIGNED_BYTES:
        return elements
    unit = ALIGNED_BYTES // item_bytes
    return -(-elements // unit) * unit


@dataclass(frozen=True)
class OptimizerRange:
    """Elements [start, end) of a row that the optimizer treats alike; ``counted`` in the norm by this rank."""

    start: int
    end: int
    counted: bool
    treatment: Treatment


def _updated_alike(member: BucketParameter) -> tuple[bool, Treatment, int, int]:
    """Return what one range has in common; by stage too, as a tied copy counts on no dp rank, its neighbors on one."""
    spec = member.spec
    return member.counted, Treatment.of(spec), member.split, spec.stage


def make_ranges(members: Sequence[BucketParameter]) -> tuple[OptimizerRange, ...]:
    """Cut a row where treatment, counting, the number of split dims or the stage changes, and where room is left.

    Parameters that other axes split are separate from those that they replicate: a kernel may round the last
    elements of a range differently, so ranks with the same parameter must update it in ranges of equal length.
    """
    ranges: list[OptimizerRange] = []
    left = accumulate((m.room - m.numel for m in members[:-1]), initial=0)  # in the row before each member
    kinds = groupby(zip(members, left, strict=True), lambda at: (*_updated_alike(at[0]), at[1]))
    for (counted, treatment, *_), group in kinds:
        first, *others = (member for member, _ in group)
        last = others[-1] if others else first
        ranges.append(OptimizerRange(first.offset, last.offset + last.numel, counted, treatment))
    return tuple(ranges)
