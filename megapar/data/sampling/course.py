"""A run whose data changes on the way: sources that stay resume where they were, new ones begin at their start.

    phase 0, from sample 0       1/2 A  1/2 B      A 0  B 0  A 1  B 1
    phase 1, from sample 4       3/4 A  1/4 C                          A 2  A 3  C 0  A 4  ..

Each source has its own order, named by its lane; the phases tell in closed form how far it was read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from megapar.data.sampling.mixture import Blend, Shares
from megapar.data.sampling.samples import PieceOrder, TokenPieces, beside, order_of

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Phase:
    """A stretch of a run with one mixture. start: its first sample. weights: None of a single source.

    lanes: what the order of each source is called; of two phases one lane is one source, read on.
    """

    start: int
    weights: tuple[Fraction, ...] | None
    lanes: tuple[str, ...]

    def taken(self, lane: str, count: int) -> int:
        """The number of samples from a lane among the phase's first ``count``."""
        if lane not in self.lanes:
            return 0
        return count if self.weights is None else Shares(self.weights).count(self.lanes.index(lane), count)


Course = tuple[Phase, ...]
"""The phases of a run, the one that it is in last."""


def first_lanes(weights: Sequence[Fraction] | None) -> tuple[str, ...]:
    """The lanes of a run that begins: the orders that ``Blend`` gives."""
    return ("",) if weights is None else tuple(f"mixture/{number}/" for number in range(len(weights)))


class Coursed:
    """Pieces, in the order of the last phase of a course; ``order`` knows no sample before that."""

    def __init__(self, pieces: TokenPieces, course: Course) -> None:
        """pieces: of the last phase, with as many parts as it has lanes."""
        self._pieces = pieces
        self._course = course
        mixed = isinstance(pieces, Blend) and pieces.weights is not None
        self._parts: tuple[TokenPieces, ...] = pieces.parts if mixed else (pieces,)  # type: ignore[attr-defined]
        if len(self._parts) != len(course[-1].lanes):
            raise ValueError(f"{len(self._parts)} sources on {len(course[-1].lanes)} lanes")

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, number: int) -> np.ndarray:
        return self._pieces[number]

    def document(self, number: int) -> int:
        """The document that a piece is from, where the pieces know."""
        own: int = self._pieces.document(number)  # type: ignore[attr-defined]
        return own

    def beside(self, number: int) -> range:
        """See samples.Beside."""
        return beside(self._pieces, number)

    def order(self, seed: int | None, stream: str, own: Callable[[int], int] = lambda number: number) -> PieceOrder:
        """See samples.Ordered. own: how many of the run's first samples the numbers of this order count."""
        if seed is None:
            return order_of(self._pieces, None, stream)
        *before, now = self._course
        starts = [own(phase.start) for phase in self._course]
        counts = [end - start for start, end in pairwise(starts)]
        orders = [order_of(part, seed, lane + stream) for part, lane in zip(self._parts, now.lanes, strict=True)]
        taken = [sum(phase.taken(lane, n) for phase, n in zip(before, counts, strict=True)) for lane in now.lanes]
        firsts = [0, *accumulate(len(part) for part in self._parts)]
        return _PhaseOrder(starts[-1], None if now.weights is None else Shares(now.weights), orders, taken, firsts)


@dataclass(frozen=True)
class _PhaseOrder:
    """start: number of the first sample. taken: of each part before it. firsts: number of each part's first piece."""

    start: int
    shares: Shares | None
    orders: Sequence[PieceOrder]
    taken: Sequence[int]
    firsts: Sequence[int]

    def __getitem__(self, number: int) -> int:
        if number < self.start:
            raise IndexError(f"sample {number} is before {self.start}, where this data began")
        part, own = (0, number - self.start) if self.shares is None else self.shares.find(number - self.start)
        return self.firsts[part] + self.orders[part][self.taken[part] + own]
