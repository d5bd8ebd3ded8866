"""Tiles: the rectangles of the attention matrix that a rank computes.

A tile is either fully visible or causal (square, on the diagonal), so that kernels need no mask. Example: zig-zag,
cp 2, the rows of rank 0 and columns in storage order (runs 0, 3 | 1, 2; # visible):

              keys of rank 0   of rank 1
    run 0       #.   ..          .. ..       own: one causal tile; for a backward in two parts,
    run 3       ##   ##          ## ##       the square below the diagonal and two causal ones
                                             other: run 3 sees both runs of rank 1
If documents must not attend to each other, tiles are trimmed to the documents they touch: at most one between two runs.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megapar.core.attention_mask import AttentionMask
from megapar.core.context_parallel.positions import SequenceLayout


class Tile(NamedTuple):
    """A rectangle of rows (queries) and columns (keys), both as indices into the storage of their ranks.

    Attributes:
        sample: Index into the micro-batch; None: all samples.
        causal: Square and on the diagonal, with a causal mask; otherwise all pairs are visible.
    """

    sample: int | None
    queries: range
    keys: range
    causal: bool = False

    @property
    def area(self) -> float:
        """The number of pairs computed."""
        whole = len(self.queries) * len(self.keys)
        return whole / 2 if self.causal else whole


def local_tiles(layout: SequenceLayout, rank: int, mask: AttentionMask) -> list[Tile]:
    """Return the tiles of a rank's rows over its own columns."""
    first, second = layout.runs(mask.length, rank)
    held = len(first) + len(second)
    tiles = []
    for sample, ends, seen in mask.groups():
        if not mask.causal:
            # padding is always at the end
            keys = range(sum(len(range(run.start, min(run.stop, seen))) for run in (first, second)))
            tiles += [Tile(sample, range(held), keys)] if keys else []
            continue
        start = 0
        for end in ends:  # a document is contiguous in storage: the end of one run and the start of the next
            own = range(_rows_before(first, second, start), _rows_before(first, second, end))
            tiles += [Tile(sample, own, own, causal=True)] if own else []
            start = end
    return tiles


def tiles_between(layout: SequenceLayout, rank: int, source: int, mask: AttentionMask) -> list[Tile]:
    """Return the tiles of a rank's rows over the columns of rank ``source``."""
    return _tiles(layout.runs(mask.length, rank), layout.runs(mask.length, source), mask)


def gathered_tiles(layout: SequenceLayout, rank: int, mask: AttentionMask) -> list[Tile]:
    """Return the tiles of a rank's rows over the columns of all other ranks, which are in order of position."""
    own = layout.runs(mask.length, rank)
    return _tiles(own, _gaps(own, mask.length), mask, in_order=True)


def tiles_before(own: range, keys: range, mask: AttentionMask) -> list[Tile]:
    """Return the tiles of consecutive rows over earlier columns; ``own`` and ``keys`` are positions of the sequence."""
    return _tiles([own], [keys], mask, in_order=True)


def diagonal_tiles(own: range, mask: AttentionMask) -> list[Tile]:
    """Return the causal tiles of consecutive rows over their own columns, which are indexed by position."""
    tiles = []
    for sample, ends, _ in mask.groups():
        start = 0
        for end in ends:
            keys = range(max(start, own.start), min(end, own.stop))
            tiles += [Tile(sample, _shift(keys, -own.start), keys, causal=True)] if keys else []
            start = end
    return tiles


def halves(tiles: Sequence[Tile], middle: int) -> tuple[list[Tile], list[Tile]]:
    """Split a rank's own tiles into two parts of about equal work. middle: rows of its first run.

    The first part hides the arrival of remote columns, the second the return of the gradients that other ranks computed
    for this rank's columns.
    """
    first_tiles: list[Tile] = []
    last_tiles: list[Tile] = []
    for tile in tiles:
        if tile.queries.start < middle < tile.queries.stop:
            first, second = range(tile.queries.start, middle), range(middle, tile.queries.stop)
            if tile.causal:
                first_tiles.append(tile._replace(queries=second, keys=first, causal=False))
                last_tiles += [tile._replace(queries=run, keys=run) for run in (first, second)]
            else:
                first_tiles.append(tile._replace(queries=first))
                last_tiles.append(tile._replace(queries=second))
        else:
            lighter = first_tiles if sum(t.area for t in first_tiles) <= sum(t.area for t in last_tiles) else last_tiles
            lighter.append(tile)
    return first_tiles, last_tiles


def cut_columns(tiles: Sequence[Tile], most: int) -> list[Tile]:
    """Cut tiles at the multiples of ``most`` columns and order them by column. Causal tiles stay whole.

    For ``spans``: the tiles of several samples over the same columns follow each other.
    """
    cut = []
    for tile in tiles:
        if tile.causal:
            cut.append((tile.keys.start // most, tile))
            continue
        for cell in range(tile.keys.start // most, (tile.keys.stop - 1) // most + 1):
            keys = range(max(tile.keys.start, cell * most), min(tile.keys.stop, (cell + 1) * most))
            cut.append((cell, tile._replace(keys=keys)))
    return [tile for _, tile in sorted(cut, key=lambda entry: entry[0])]


def spans(tiles: Iterable[Tile], most: int) -> list[tuple[range, list[Tile]]]:
    """Group consecutive tiles over at most ``most`` columns, or a single larger tile.

    Returns per group the columns from the first to the last that it covers, and its tiles, whose columns are indices
    into that range. The order of the tiles does not change.
    """
    groups: list[tuple[range, list[Tile]]] = []
    for tile in tiles:
        if groups:
            span, group = groups[-1]
            joined = range(min(span.start, tile.keys.start), max(span.stop, tile.keys.stop))
            if len(joined) <= most:
                groups[-1] = (joined, [*group, tile])
                continue
        groups.append((tile.keys, [tile]))
    return [(span, [tile._replace(keys=_shift(tile.keys, -span.start)) for tile in group]) for span, group in groups]


def _tiles(
    rows: Sequence[range], columns: Sequence[range], mask: AttentionMask, *, in_order: bool = False
) -> list[Tile]:
    """Return tiles over columns of other ranks, whose runs are each entirely before or after each run of rows."""
    tiles = []
    row_offsets, column_offsets = _offsets(rows), [run.start for run in columns] if in_order else _offsets(columns)
    for sample, ends, seen in mask.groups():
        own = []
        for run, at in zip(rows, row_offsets, strict=True):
            for keys, key_at in zip(columns, column_offsets, strict=True):
                queries = range(len(run))
                if not mask.causal:
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
        tiles += _joined(own)
    return tiles


def _joined(tiles: Sequence[Tile]) -> list[Tile]:
    """Merge tiles that form one larger rectangle."""
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
    """Return the positions of a sequence outside two runs."""
    first, second = own
    gaps = (range(first.start), range(first.stop, second.start), range(second.stop, length))
    return [gap for gap in gaps if gap]


def _rows_before(first: range, second: range, position: int) -> int:
    """Count the rows of a rank that precede a position."""
    return sum(min(max(position - run.start, 0), len(run)) for run in (first, second))


def _offsets(runs: Sequence[range]) -> list[int]:
    return [sum(len(run) for run in runs[:number]) for number in range(len(runs))]


def _shift(run: range, by: int) -> range:
    return range(run.start + by, run.stop + by)
