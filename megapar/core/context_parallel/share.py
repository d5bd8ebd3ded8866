"""The ranks that share the positions of a micro-batch: those of cp and, under sequence parallelism, of mp."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from megapar.core.comm.autograd import gather
from megapar.core.comm.axis import Axis
from megapar.core.context_parallel.positions import HeldRun, SequenceLayout
from megapar.core.device.index import Indices


class Runs(NamedTuple):
    """The runs of consecutive positions that ranks hold, numbered in order of position.

    own: (number, positions) of this rank's runs. most: how many a rank has at most. order: the place of each run in a
    list by rank in which every rank has ``most`` entries.
    """

    own: tuple[tuple[int, int], ...]
    most: int
    order: tuple[int, ...]


@dataclass(frozen=True)
class Share:
    """This rank's share. mp: one rank where positions are not cut over it. layout: how cp ranks cut them.

    Ranks are numbered cp.rank * mp.size + mp.rank.
    """

    cp: Axis = field(default_factory=lambda: Axis.single("cp"))
    mp: Axis = field(default_factory=lambda: Axis.single("mp"))
    layout: SequenceLayout = field(default_factory=SequenceLayout)
    _indices: Indices = field(default_factory=Indices, compare=False, repr=False)

    @classmethod
    def of(cls, cp: Axis, layout: SequenceLayout, mp: Axis, *, sequence_parallel: bool) -> Share:
        """sequence_parallel: positions are cut over mp, too."""
        return cls(cp, mp if sequence_parallel else Axis.single("mp"), layout)

    @property
    def size(self) -> int:
        """Ranks that share a micro-batch."""
        return self.cp.size * self.mp.size

    @property
    def rank(self) -> int:
        """The number of this rank among them."""
        return self.cp.rank * self.mp.size + self.mp.rank

    def gather(self, x: Tensor) -> Tensor:
        """[n, ..] to [size * n, ..], by rank; what is computed from it must be the same on every rank."""
        return gather(gather(x, self.mp, 0), self.cp, 0)

    def slice_order(self, number: int) -> list[int]:
        """The ranks in order of their positions in slice ``number`` of the sequence, of which each has one run."""
        return [rank * self.mp.size + part for rank in self.layout.order(number) for part in range(self.mp.size)]

    def places(self, own_length: int, number: int | None = None) -> tuple[HeldRun, ...]:
        """The runs of all ranks in order of position, where each rank holds ``own_length`` positions.

        number: of the slice of the sequence that these are; without one they are all of them.
        """
        if number is not None:
            return tuple(HeldRun(rank, 0, own_length) for rank in self.slice_order(number))
        return self.layout.places(own_length * self.size, self.mp.size)

    def runs(self, own_length: int) -> Runs:
        """The runs of consecutive positions that the ranks hold, numbered in order of position."""
        places = self.places(own_length)
        held = [[number for number, place in enumerate(places) if place.rank == rank] for rank in range(self.size)]
        most = max(map(len, held))
        where = {number: rank * most + at for rank, own in enumerate(held) for at, number in enumerate(own)}
        mine = tuple((number, places[number].stop - places[number].start) for number in held[self.rank])
        return Runs(mine, most, tuple(where[number] for number in range(len(places))))

    def sort(self, x: Tensor, order: Sequence[int]) -> Tensor:
        """Entries of [n, ..] in the order that ``slice_order`` or ``runs`` gives; waits once for each order."""
        wanted = tuple(order)
        if wanted == tuple(range(x.shape[0])):
            return x
        return x.index_select(0, self._indices.of(wanted, x.device, lambda: wanted))

    def in_order(self, x: Tensor, own_length: int, number: int | None = None) -> Tensor:
        """[size * own_length * n, ..] by rank to order of position; each position has n rows, one after the other.

        number: as ``places`` takes it.
        """
        per_position = x.shape[0] // (self.size * own_length)
        rows = [
            slice((p.rank * own_length + p.start) * per_position, (p.rank * own_length + p.stop) * per_position)
            for p in self.places(own_length, number)
        ]
        return torch.cat([x[own] for own in rows]) if len(rows) > 1 else x

    def own(self, x: Tensor, own_length: int, number: int | None = None) -> Tensor:
        """[size * own_length * n, ..] in order of position to this rank's [own_length * n, ..].

        The inverse of ``in_order``.
        """
        per_position = x.shape[0] // (self.size * own_length)
        mine, offset = [], 0
        for place in self.places(own_length, number):
            rows = (place.stop - place.start) * per_position
            if place.rank == self.rank:
                mine.append(x[offset : offset + rows])
            offset += rows
        return torch.cat(mine) if len(mine) > 1 else mine[0]
