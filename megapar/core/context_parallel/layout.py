"""Which positions of a sequence each rank of cp holds. Standard library only.

Every rank holds two runs of consecutive positions. In order, they are neighbours; in zig-zag the second one mirrors the
first, so that under a causal mask every rank has the same number of keys to look at:

    cp 4      position   0 ........................ S
    in order  rank       0  0  1  1  2  2  3  3
    zig-zag   rank       0  1  2  3  3  2  1  0

Source of the zig-zag: Llama 3, arXiv 2407.21783, section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

RING, ULYSSES, GATHERED = "megatron_cp_algo", "ulysses_cp_algo", "allgather_cp_algo"


@dataclass(frozen=True)
class Layout:
    """How ``size`` ranks share a sequence."""

    size: int = 1
    zigzag: bool = False

    def runs(self, length: int, rank: int) -> tuple[range, range]:
        """The two runs of a rank, in order; in a short sequence one of them may be empty.

        Raises ValueError where ``size`` (in zig-zag twice that) does not divide the length.
        """
        pieces = 2 * self.size if self.zigzag else self.size
        if length % pieces:
            raise ValueError(f"{length} positions cannot be shared by {self.size} ranks in {pieces} equal pieces")
        piece = length // pieces
        if self.zigzag:
            mirror = pieces - 1 - rank
            return range(rank * piece, (rank + 1) * piece), range(mirror * piece, (mirror + 1) * piece)
        start, stop = rank * piece, (rank + 1) * piece
        return range(start, start + piece // 2), range(start + piece // 2, stop)

    def positions(self, length: int, rank: int) -> list[int]:
        """All positions of a rank, in the order in which it holds them."""
        first, second = self.runs(length, rank)
        return [*first, *second]

    def places(self, length: int, parts: int = 1) -> tuple[Place, ...]:
        """What every rank holds where each rank's positions are cut further into ``parts`` ranks, in order of position.

        Ranks are numbered rank * parts + part. Neighbouring runs of one rank are one place.
        """
        share = length // self.size
        found: list[tuple[int, Place]] = []
        for rank in range(self.size):
            first, second = self.runs(length, rank)
            joined = [first, second] if first.stop != second.start else [range(first.start, second.stop)]
            for part in range(parts):
                own = range(part * share // parts, (part + 1) * share // parts)
                offset = 0
                for run in joined:
                    start, stop = max(own.start, offset), min(own.stop, offset + len(run))
                    if start < stop:
                        place = Place(rank * parts + part, start - own.start, stop - own.start)
                        found.append((run.start + start - offset, place))
                    offset += len(run)
        return tuple(place for _, place in sorted(found))


class Place(NamedTuple):
    """Consecutive positions of a sequence on one rank: rows ``start`` to ``stop`` of what it holds."""

    rank: int
    start: int
    stop: int


def choose_layout(algorithm: str, size: int, *, causal: bool, length: int) -> Layout:
    """Zig-zag where it evens out the work: under a causal mask, unless heads are shared, which are alike.

    Gathered keys can do with any even cut, so a length that zig-zag does not divide stays in order.
    """
    fits = algorithm == RING or length % (2 * size) == 0
    return Layout(size, zigzag=size > 1 and causal and algorithm != ULYSSES and fits)


def same(values: Sequence[object]) -> bool:
    """Whether all are equal."""
    return all(value == values[0] for value in values)
