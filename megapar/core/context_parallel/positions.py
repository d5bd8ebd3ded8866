"""The positions of a sequence that each rank of cp holds.

Every rank holds two runs of consecutive positions. In the plain layout ("in order") they are adjacent. In zig-zag the
second run mirrors the first, so that under a causal mask every rank attends to the same number of keys. When the
sequence is cut into slices that are computed consecutively (AMPipe), every rank holds a run of each slice, and in
zig-zag every second slice is mirrored; with two slices that is ordinary zig-zag.

    cp 4                 position   0 ........................ S
    in order             rank       0  0  1  1  2  2  3  3
    zig-zag              rank       0  1  2  3  3  2  1  0
    2 slices, in order   rank       0  1  2  3  0  1  2  3

Source of the zig-zag: Llama 3, arXiv 2407.21783, section 3.3.2.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

RING, ULYSSES, GATHERED = "megatron_cp_algo", "ulysses_cp_algo", "allgather_cp_algo"


@dataclass(frozen=True)
class SequenceLayout:
    """The order in which the ranks of cp share a sequence.

    Attributes:
        zigzag: Balance causal work by mirroring every second run.
        slices: Slices that ``cut_sequence`` makes first; every rank has a part of each.
        balanced: Passed to ``cut_sequence``.
        parts: Ranks (of mp) that share the positions of one cp rank.
    """

    size: int = 1
    zigzag: bool = False
    slices: int = 1
    balanced: bool = False
    parts: int = 1

    def order(self, number: int) -> tuple[int, ...]:
        """Return the ranks ordered by position in slice ``number``; without slices, in run ``number`` (0 or 1)."""
        ranks = tuple(range(self.size))
        return ranks[::-1] if self.zigzag and number % 2 else ranks

    def runs(self, length: int, rank: int) -> tuple[range, ...]:
        """Return the runs of a rank in order: two (one may be empty in a short sequence), or one per slice.

        Raises ValueError if the length is not a multiple of ``size`` (twice ``size`` in zig-zag).
        """
        if self.slices > 1:
            slices = cut_sequence(length, self.size * self.parts, self.slices, balanced=self.balanced)
            return tuple(self._run(place, self.order(n).index(rank)) for n, place in enumerate(slices))
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
        """Return all positions of a rank, in storage order."""
        return [position for run in self.runs(length, rank) for position in run]

    def places(self, length: int, parts: int = 1) -> tuple[HeldRun, ...]:
        """Return the runs of all ranks in order of position, with each rank's positions split over ``parts`` ranks.

        Ranks are numbered rank * parts + part. Adjacent runs of one rank are merged. Not for slices: their ranks cut
        each slice separately.
        """
        share = length // self.size
        held: list[tuple[int, HeldRun]] = []
        for rank in range(self.size):
            first, second = self.runs(length, rank)
            joined = [first, second] if first.stop != second.start else [range(first.start, second.stop)]
            for part in range(parts):
                own = range(part * share // parts, (part + 1) * share // parts)
                offset = 0
                for run in joined:
                    start, stop = max(own.start, offset), min(own.stop, offset + len(run))
                    if start < stop:
                        place = HeldRun(rank * parts + part, start - own.start, stop - own.start)
                        held.append((run.start + start - offset, place))
                    offset += len(run)
        return tuple(place for _, place in sorted(held))

    def _run(self, place: slice, number: int) -> range:
        """Return part ``number`` of a slice."""
        share = (place.stop - place.start) // self.size
        return range(place.start + number * share, place.start + (number + 1) * share)


class HeldRun(NamedTuple):
    """Consecutive positions of a sequence on one rank: rows ``start`` to ``stop`` of its storage."""

    rank: int
    start: int
    stop: int


def choose_layout(
    algorithm: str, size: int, *, causal: bool, length: int, slices: int = 1, balanced: bool = False, parts: int = 1
) -> SequenceLayout:
    """Choose zig-zag where it balances the work: under a causal mask, except for Ulysses, whose heads cost the same.

    Gathered keys work with any even cut, so a length that zig-zag does not divide stays in order. Mirrored slices work
    with every length. slices, balanced, parts: see ``SequenceLayout``.
    """
    fits = algorithm == RING or slices > 1 or length % (2 * size) == 0
    zigzag = size > 1 and causal and algorithm != ULYSSES and fits
    return SequenceLayout(size, zigzag, slices, balanced, parts) if size > 1 else SequenceLayout()


def cut_sequence(length: int, parts: int, slices: int, *, balanced: bool) -> tuple[slice, ...]:
    """Cut a sequence of ``length`` positions into slices, each a multiple of ``parts`` (the ranks that share it).

    Equal slices differ by at most ``parts``. Balanced ones end at length · sqrt(j / slices), which cuts the triangle of
    causal attention into equal areas. Raises ValueError if a slice would be empty.
    """
    units, rest = divmod(length, parts)
    if rest or units < slices:
        raise ValueError(f"{length} positions on {parts} ranks cannot be cut into {slices} slices")
    share = [math.sqrt(j / slices) if balanced else j / slices for j in range(slices + 1)]
    edges = [round(units * part) for part in share]
    for j in range(1, slices):  # every slice gets a position, however short the sequence
        edges[j] = min(max(edges[j], edges[j - 1] + 1), units - (slices - j))
    return tuple(slice(a * parts, b * parts) for a, b in itertools.pairwise(edges))
