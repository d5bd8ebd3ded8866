"""The samples of a run whose data changes: sources that stay resume where they were, new ones start at 0.

    phase 0, from sample 0       1/2 A  1/2 B      A 0  B 0  A 1  B 1
    phase 1, from sample 4       3/4 A  1/4 C                          A 2  A 3  C 0  A 4  ..

Each source has its own order, named by its lane. The samples taken from a source follow from the phases in closed form.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Generic

from megapar.data.lazy_numpy import np
from megapar.data.sampling.mixture import Blend, Pieces_co, Shares
from megapar.data.sampling.samples import (
    DocumentPieces,
    PieceOrder,
    Sample,
    Samples,
    TokenPieces,
    WeightedPiece,
    nearby,
    order_of,
    weighted,
)


@dataclass(frozen=True)
class Phase:
    """A range of a run's samples with one mixture.

    Attributes:
        start: Number of its first sample.
        weights: Weight of each source; None for a single source.
        lanes: Name of each source's order; a lane of two phases is the same source, which is read on.
        parts: Numbers of its sources among those of the corpus; None for all of them.
        seq_length: Positions of its samples; None for those of the corpus.
    """

    start: int
    weights: tuple[Fraction, ...] | None
    lanes: tuple[str, ...]
    parts: tuple[int, ...] | None = None
    seq_length: int | None = None

    def taken(self, lane: str, count: int) -> int:
        """Return the number of samples from a lane among the phase's first ``count``."""
        if lane not in self.lanes:
            return 0
        return count if self.weights is None else Shares(self.weights).count(self.lanes.index(lane), count)

    def place(self, lane: str, number: int) -> int:
        """Return the place of a lane's sample ``number`` among the phase's samples."""
        low, high = 0, 1
        while self.taken(lane, high) <= number:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.taken(lane, middle) > number else (middle, high)
        return low


Phases = tuple[Phase, ...]
"""The phases of a run, the current one last."""


def first_lanes(weights: Sequence[Fraction] | None) -> tuple[str, ...]:
    """Return the lanes of a run's first phase, which name the orders of ``Blend``."""
    return ("",) if weights is None else tuple(f"mixture/{number}/" for number in range(len(weights)))


class PhasedPieces(Generic[Pieces_co]):
    """Pieces in the order of the last phase of a run; ``order`` has no samples before it."""

    def __init__(self, pieces: Pieces_co, phases: Phases) -> None:
        """Take the pieces of the last phase, with as many parts as it has lanes."""
        self._pieces = pieces
        self._phases = phases
        self._parts: tuple[TokenPieces, ...] = (pieces,)
        if isinstance(pieces, Blend) and pieces.weights is not None:
            self._parts = pieces.parts
        if len(self._parts) != len(phases[-1].lanes):
            raise ValueError(f"{len(self._parts)} sources on {len(phases[-1].lanes)} lanes")

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, number: int) -> np.ndarray:
        return self._pieces[number]

    @property
    def sizes(self) -> dict[str, int]:
        """Number of pieces of each lane of the last phase."""
        return {lane: len(part) for lane, part in zip(self._phases[-1].lanes, self._parts, strict=True)}

    def weighted(self, number: int) -> WeightedPiece:
        return weighted(self._pieces, number)

    def document(self: PhasedPieces[DocumentPieces], number: int) -> int:
        """Return the document that a piece is from, if the pieces have documents."""
        return self._pieces.document(number)

    def nearby(self, number: int) -> range:
        return nearby(self._pieces, number)

    def order(self, seed: int, stream: str, count: Callable[[int], int] = lambda number: number) -> PieceOrder:
        """See samples.Ordered. ``count`` maps n to the number of samples of this order among the run's first n."""
        *before, last = self._phases
        starts = [count(phase.start) for phase in self._phases]
        counts = [end - start for start, end in pairwise(starts)]
        orders = [order_of(part, seed, lane + stream) for part, lane in zip(self._parts, last.lanes, strict=True)]
        taken = [sum(phase.taken(lane, n) for phase, n in zip(before, counts, strict=True)) for lane in last.lanes]
        firsts = [0, *accumulate(len(part) for part in self._parts)]
        return _PhaseOrder(starts[-1], None if last.weights is None else Shares(last.weights), orders, taken, firsts)


@dataclass(frozen=True)
class PhasedSamples:
    """The samples of consecutive phases, by their numbers in the run.

    Attributes:
        phases: All phases of the run.
        samples: Those of its last phases; the samples of earlier ones cannot be read.
        sizes: Number of samples of an epoch of each lane of these.
    """

    phases: Phases
    samples: Sequence[Samples]
    sizes: Mapping[str, int]

    def __len__(self) -> int:
        return len(self.samples[0])

    def __getitem__(self, number: int) -> Sample:
        read = self.phases[-len(self.samples) :]
        return self.samples[max(0, bisect_right(read, number, key=lambda phase: phase.start) - 1)][number]

    def first_repeated(self) -> tuple[int, str] | None:
        """Return the first sample that its source has given before, and the lane of the source; None if there is none.

        Sources that only earlier phases have are not looked at.
        """
        found = []
        ends = [*(phase.start for phase in self.phases[1:]), None]
        for lane, size in self.sizes.items():
            left = size
            for phase, end in zip(self.phases, ends, strict=True):
                taken = left + 1 if end is None else phase.taken(lane, end - phase.start)
                if lane in phase.lanes and taken > left:
                    found.append((phase.start + phase.place(lane, max(0, left)), lane))
                    break
                left -= taken
        return min(found, default=None)


@dataclass(frozen=True)
class _PhaseOrder:
    """The order of pieces in one phase.

    Attributes:
        start: Number of the phase's first sample.
        shares: Part of each sample; None for a single part.
        orders: Order of each part's pieces.
        taken: Samples of each part before the phase.
        firsts: Number of each part's first piece.
    """

    start: int
    shares: Shares | None
    orders: Sequence[PieceOrder]
    taken: Sequence[int]
    firsts: Sequence[int]

    def __getitem__(self, number: int) -> int:
        if number < self.start:
            raise IndexError(f"sample {number} is before {self.start}, the first sample of this data")
        part, index = (0, number - self.start) if self.shares is None else self.shares.find(number - self.start)
        return self.firsts[part] + self.orders[part][self.taken[part] + index]
