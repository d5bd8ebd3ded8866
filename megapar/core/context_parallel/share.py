"""The ranks that share the positions of a micro-batch: those of cp and, under sequence parallelism, of mp."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from megapar.core.comm.autograd import all_gather_replicated
from megapar.core.comm.axis import Axis
from megapar.core.context_parallel.positions import HeldRun, SequenceLayout
from megapar.core.device.base import Indices


class Runs(NamedTuple):
    """The runs of consecutive positions that ranks hold, numbered in order of position.

    Attributes:
        own: (number, positions) of each of this rank's runs.
        most: The maximum number of runs on a rank.
        order: The index of each run in a list by rank that has ``most`` entries per rank.
    """

    own: tuple[tuple[int, int], ...]
    most: int
    order: tuple[int, ...]


@dataclass(frozen=True)
class Share:
    """This rank's share of the positions of a micro-batch. Ranks are numbered cp.rank * mp.size + mp.rank.

    mp is an axis of one rank if positions are not split over it.
    """

    cp: Axis = field(default_factory=lambda: Axis.single("cp"))
    mp: Axis = field(default_factory=lambda: Axis.single("mp"))
    layout: SequenceLayout = field(default_factory=SequenceLayout)
    _indices: Indices = field(default_factory=Indices, compare=False, repr=False)

    @classmethod
    def of(cls, cp: Axis, layout: SequenceLayout, mp: Axis, *, sequence_parallel: bool) -> Share:
        """Make the share of this rank. sequence_parallel: positions are split over mp as well."""
        return cls(cp, mp if sequence_parallel else Axis.single("mp"), layout)

    @property
    def size(self) -> int:
        """The number of ranks that share a micro-batch."""
        return self.cp.size * self.mp.size

    @property
    def rank(self) -> int:
        """The number of this rank among them."""
        return self.cp.rank * self.mp.size + self.mp.rank

    def gather(self, x: Tensor) -> Tensor:
        """Gather [n, ..] to [size * n, ..], by rank. Every rank must compute the same from the result."""
        return all_gather_replicated(all_gather_replicated(x, self.mp, 0), self.cp, 0)

    def slice_order(self, number: int) -> list[int]:
        """Return the ranks ordered by position in slice ``number`` of the sequence; each has one run of it."""
        return [rank * self.mp.size + part for rank in self.layout.order(number) for part in range(self.mp.size)]

    def places(self, own_length: int, number: int | None = None) -> tuple[HeldRun, ...]:
        """Return all ranks' runs in order of position, ``own_length`` positions each. number: their slice, or None."""
        if number is not None:
            return tuple(HeldRun(rank, 0, own_length) for rank in self.slice_order(number))
        return self.layout.places(own_length * self.size, self.mp.size)

    def runs(self, own_length: int) -> Runs:
        """Return the runs of consecutive positions that the ranks hold, numbered in order of position."""
        places = self.places(own_length)
        held = [[number for number, place in enumerate(places) if place.rank == rank] for rank in range(self.size)]
        most = max(map(len, held))
        index_of = {number: rank * most + at for rank, own in enumerate(held) for at, number in enumerate(own)}
        mine = tuple((number, places[number].stop - places[number].start) for number in held[self.rank])
        return Runs(mine, most, tuple(index_of[number] for number in range(len(places))))

    def sort(self, x: Tensor, order: Sequence[int]) -> Tensor:
        """Reorder [n, ..] as ``slice_order`` or ``runs`` returns. The host waits for the device once per new order."""
        key = tuple(order)
        if key == tuple(range(x.shape[0])):
            return x
        return x.index_select(0, self._indices.of(key, x.device, lambda: key))

    def in_order(self, x: Tensor, own_length: int, number: int | None = None) -> Tensor:
        """Reorder [size * own_length * n, ..], n rows per position, from ranks to positions. number: see ``places``."""
        per_position = x.shape[0] // (self.size * own_length)
        rows = [
            slice((p.rank * own_length + p.start) * per_position, (p.rank * own_length + p.stop) * per_position)
            for p in self.places(own_length, number)
        ]
        return torch.cat([x[own] for own in rows]) if len(rows) > 1 else x

    def own(self, x: Tensor, own_length: int, number: int | None = None) -> Tensor:
        """Select this rank's [own_length * n, ..] of positions in order: the inverse of ``in_order`` on its rows."""
        per_position = x.shape[0] // (self.size * own_length)
        parts, offset = [], 0
        for place in self.places(own_length, number):
            rows = (place.stop - place.start) * per_position
            if place.rank == self.rank:
                parts.append(x[offset : offset + rows])
            offset += rows
        return torch.cat(parts) if len(parts) > 1 else parts[0]
