"""Tiles: the rectangles of the attention matrix that a rank computes. Standard library only.

A tile is wholly seen, or causal (square, on the diagonal), so that kernels need no mask. Zig-zag, cp 2, rank 0's rows
and columns in the order in which the ranks hold them (runs 0, 3 | 1, 2; # seen):

              keys of rank 0   of rank 1
    run 0       #.   ..          .. ..       own: one causal tile, or for a backward in two parts
    run 3       ##   ##          ## ##       the square below the diagonal and two causal ones
                                             other: run 3 sees both runs of rank 1
Documents that are kept apart cut tiles down to the documents that they touch: between two runs that is one at most.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megapar.core.context_parallel.positions import SequenceLayout, same


class Tile(NamedTuple):
    """Rows that see columns, both as places among those that ranks hold.

    sample: of the micro-batch; None: all of them. causal: square and on the diagonal; else all pairs are seen.
    """

    sample: int | None
    queries: range
    keys: range
    causal: bool = False

    @property
    def area(self) -> float:
        """Pairs that are computed."""
        whole = len(self.queries) * len(self.keys)
        return whole / 2 if self.causal else whole


@dataclass(frozen=True)
class Sight:
    """The pairs that attention may connect in a micro-batch of ``samples`` sequences of ``length`` positions.

    causal: a position sees itself and what comes before it, in its document where ``ends`` are given: per sample, the
    place after each document, the last one ``length``. Otherwise every position sees the first ``lengths`` of its
    sample (what follows is padding), by default all.
    """

    samples: int
    length: int
    causal: bool
    ends: tuple[tuple[int, ...], ...] | None = None
    lengths: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls,
        samples: int,
        length: int,
        *,
        causal: bool,
        ends: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
    ) -> Sight:
        """ends: flat into samples * length, as micro-batches have them."""
        own = None
        if ends is not None:
            cut = [bisect.bisect_right(ends, sample * length) for sample in range(samples + 1)]
            own = tuple(
                tuple(end - sample * length for end in ends[cut[sample] : cut[sample + 1]]) for sample in range(samples)
            )
        return cls(samples, length, causal, own, None if lengths is None else tuple(lengths))

    def groups(self) -> list[tuple[int | None, tuple[int, ...], int]]:
        """(sample, ends of its documents, keys that may be seen); one group of all samples where they are alike."""
        ends = self.ends or ((self.length,),) * self.samples
        lengths = self.lengths or (self.length,) * self.samples
        if same(ends) and same(lengths):
            return [(None, ends[0], lengths[0])]
        return [(sample, *both) for sample, both in enumerate(zip(ends, lengths, strict=True))]


def own_tiles(layout: SequenceLayout, rank: int, sight: Sight) -> list[Tile]:
    """A rank's rows against its own columns."""
    first, second = layout.runs(sight.length, rank)
    held = len(first) + len(second)
    tiles = []
    for sample, ends, seen in sight.groups():
        if not sight.causal:
            keys = _visible((first, second), seen)
            tiles += [Tile(sample, range(held), keys)] if keys else []
            continue
        start = 0
        for end in ends:  # a document is contiguous here: the end of one run and the head of the next
            own = range(_held(first, second, start), _held(first, second, end))
            tiles += [Tile(sample, own, own, causal=True)] if own else []
            start = end
    return tiles


def tiles_between(layout: SequenceLayout, rank: int, source: int, sight: Sight) -> list[Tile]:
    """A rank's rows against the columns of another one."""
    return _tiles(layout.runs(sight.length, rank), layout.runs(sight.length, source), sight)


def gathered_tiles(layout: SequenceLayout, rank: int, sight: Sight) -> list[Tile]:
    """A rank's rows against the columns of all others, which are in order of position."""
    own = layout.runs(sight.length, rank)
    return _tiles(own, _gaps(own, sight.length), sight, in_order=True)


def tiles_before(own: range, keys: range, sight: Sight) -> list[Tile]:
    """Rows of consecutive positions against columns before them, both named by position in the columns."""
    return _tiles([own], [keys], sight, in_order=True)


def diagonal_tiles(own: range, sight: Sight) -> list[Tile]:
    """Rows of consecutive positions against their own columns, which are named by position; causal."""
    tiles = []
    for sample, ends, _ in sight.groups():
        start = 0
        for end in ends:
            keys = range(max(start, own.start), min(end, own.stop))
            tiles += [Tile(sample, _shift(keys, -own.start), keys, causal=True)] if keys else []
            start = end
    return tiles


def halves(tiles: Sequence[Tile], middle: int) -> tuple[list[Tile], list[Tile]]:
    """A rank's own tiles as two parts of about the same work. middle: rows of its first run.

    One part hides the arrival of other ranks' columns, the other the return of gradients that other ranks computed for
    this rank's columns.
    """
    early: list[Tile] = []
    late: list[Tile] = []
    for tile in tiles:
        if tile.queries.start < middle < tile.queries.stop:
            first, second = range(tile.queries.start, middle), range(middle, tile.queries.stop)
            if tile.causal:
                early.append(tile._replace(queries=second, keys=first, causal=False))
                late += [tile._replace(queries=run, keys=run) for run in (first, second)]
            else:
                early.append(tile._replace(queries=first))
                late.append(tile._replace(queries=second))
        else:
            lighter = early if sum(t.area for t in early) <= sum(t.area for t in late) else late
            lighter.append(tile)
    return early, late


def _tiles(rows: Sequence[range], columns: Sequence[range], sight: Sight, *, in_order: bool = False) -> list[Tile]:
    """Rows against columns of other ranks: each run of columns is wholly before or after each run of rows."""
    found = []
    row_offsets, column_offsets = _offsets(rows), [run.start for run in columns] if in_order else _offsets(columns)
    for sample, ends, seen in sight.groups():
        own = []
        for run, at in zip(rows, row_offsets, strict=True):
            for keys, key_at in zip(columns, column_offsets, strict=True):
                queries = range(len(run))
                if not sight.causal:
                    visible = range(keys.start, min(keys.stop, seen))
                elif keys.start >= run.start:
                    continue
                else:
                    document = bisect.bisect_right(ends, run.start)
                    start = ends[document - 1] if document else 0
                    visible = range(max(keys.start, start), keys.stop)
                    queries = range(min(len(run), ends[document] - run.start)) if run else queries
                if queries and visible:
                    own.append(Tile(sample, _shift(queries, at), _shift(visible, key_at - keys.start)))
        found += _joined(own)
    return found


def _joined(tiles: Sequence[Tile]) -> list[Tile]:
    """Join tiles that make one larger rectangle."""
    by_keys: list[Tile] = []
    for tile in tiles:
        if by_keys and by_keys[-1].queries == tile.queries and by_keys[-1].keys.stop == tile.keys.start:
            before = by_keys.pop()
            tile = before._replace(keys=range(before.keys.start, tile.keys.stop))
        by_keys.append(tile)
    joined: list[Tile] = []
    for tile in sorted(by_keys, key=lambda tile: (tile.keys.start, tile.queries.start)):
        if joined and joined[-1].keys == tile.keys and joined[-1].queries.stop == tile.queries.start:
            before = joined.pop()
            tile = before._replace(queries=range(before.queries.start, tile.queries.stop))
        joined.append(tile)
    return joined


def _gaps(own: Sequence[range], length: int) -> list[range]:
    """The positions of a sequence outside two runs."""
    first, second = own
    gaps = (range(first.start), range(first.stop, second.start), range(second.stop, length))
    return [gap for gap in gaps if gap]


def _visible(runs: Sequence[range], seen: int) -> range:
    """Places of a rank's columns that are not padding, which comes after the rest."""
    return range(sum(len(range(run.start, min(run.stop, seen))) for run in runs))


def _held(first: range, second: range, position: int) -> int:
    """Count the rows of a rank that are before a position."""
    return sum(min(max(position - run.start, 0), len(run)) for run in (first, second))


def _offsets(runs: Sequence[range]) -> list[int]:
    return [sum(len(run) for run in runs[:number]) for number in range(len(runs))]


def _shift(run: range, by: int) -> range:
    return range(run.start + by, run.stop + by)
