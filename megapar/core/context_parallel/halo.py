"""The keys before runs of rows that a window needs from other ranks of cp, as ranges of positions and rows.

Arithmetic without torch, which the planner shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from megapar.core.attention_mask import AttentionMask
from megapar.core.context_parallel.positions import SequenceLayout

Piece = tuple[int, range]


@dataclass(frozen=True)
class Halo:
    """The rows that a rank sends and receives, and the keys that its rows see.

    Attributes:
        sent: For each rank of cp the ranges of this rank's rows, in storage order, that it gets.
        received: Rows from each rank of cp.
        arrived: The positions of all rows that were received so far, also in earlier slices, in order of arrival.
        pieces: The keys in order of position: (0, rows of this rank) or (1, rows that were received so far).
        runs: Consecutive positions of this rank's queries.
        queries: For each run its rows among this rank's queries.
        rows: For each run the keys that it sees, among those of ``pieces``.
    """

    sent: tuple[tuple[range, ...], ...]
    received: tuple[int, ...]
    arrived: tuple[range, ...]
    pieces: tuple[Piece, ...]
    runs: tuple[range, ...]
    queries: tuple[slice, ...]
    rows: tuple[slice, ...]


def halos_of(layout: SequenceLayout, rank: int, mask: AttentionMask) -> tuple[Halo, ...]:
    """Return what a layer with the window of ``mask`` exchanges: once, or in each slice of ``layout``."""
    numbers: Sequence[int | None] = range(layout.slices) if layout.slices > 1 else (None,)
    return tuple(halo_of(layout, rank, mask, number) for number in numbers)


@lru_cache(maxsize=256)
def halo_of(layout: SequenceLayout, rank: int, mask: AttentionMask, number: int | None = None) -> Halo:
    """Return what a layer with the window of ``mask`` exchanges. It is kept for the next micro-batch with this mask.

    number: The slice of the sequence whose rows attend, to keys of it and of earlier slices; None: all at once. Rows
        that came for an earlier slice do not come again: all slices never exchange more than all keys.
    """
    every = [layout.runs(mask.length, other) for other in range(layout.size)]
    held = [_joined(runs if number is None else runs[: number + 1]) for runs in every]
    asked = [_joined(runs if number is None else runs[number : number + 1]) for runs in every]
    needed = [_joined([range(mask.first_key(run.start), run.stop) for run in runs]) for runs in asked]
    # The slice before this one has seen the keys of this one's window up to its own end.
    stops = [runs[number - 1].stop if number else 0 for runs in every]
    lacking = [_common(needs, [range(stop, mask.length)]) for needs, stop in zip(needed, stops, strict=True)]
    arrived = list(halo_of(layout, rank, mask, number - 1).arrived) if number else []
    own, seen = held[rank], needed[rank]
    from_each = [_common(lacking[rank], runs) if other != rank else [] for other, runs in enumerate(held)]
    to_each = [_common(lacks, own) if other != rank else [] for other, lacks in enumerate(lacking)]
    arrived += [run for runs in from_each for run in runs]
    pieces = {run.start: (0, _stored(own, run)) for run in _common(seen, own)}
    for run, end in zip(arrived, accumulate(map(len, arrived)), strict=True):
        parts = _common(seen, [run])
        pieces |= {part.start: (1, range(end - run.stop + part.start, end - run.stop + part.stop)) for part in parts}
    return Halo(
        sent=tuple(tuple(_stored(own, run) for run in runs) for runs in to_each),
        received=tuple(sum(map(len, runs)) for runs in from_each),
        arrived=tuple(arrived),
        pieces=tuple(piece for _, piece in sorted(pieces.items())),
        runs=tuple(asked[rank]),
        queries=tuple(_slice(_stored(asked[rank], run)) for run in asked[rank]),
        rows=tuple(_slice(_stored(seen, range(mask.first_key(run.start), run.stop))) for run in asked[rank]),
    )


@lru_cache(maxsize=256)
def rows_exchanged(layout: SequenceLayout, window: int, length: int) -> tuple[int, int]:
    """Return the most rows of a sample that a rank sends or receives in a window, and that it sees, over all slices."""
    mask, most, seen = AttentionMask(1, length, causal=True).within(window), 0, 0
    if mask.window is None:
        return 0, 0
    for rank in range(layout.size):
        halos = halos_of(layout, rank, mask)
        sent = sum(len(run) for halo in halos for to in halo.sent for run in to)
        most = max(most, sent, sum(sum(halo.received) for halo in halos))
        seen = max(seen, sum(len(run) for halo in halos for _, run in halo.pieces))
    return most, seen


@lru_cache(maxsize=256)
def most_keys(layout: SequenceLayout, window: int, length: int) -> float:
    """Return the keys that rows see on the rank with most of them, relative to the mean of all ranks.

    The first positions see fewer. In zig-zag it is at most 1.05 for a window of a quarter of a run, and 4/3 for any.
    Counted as ``AttentionMask.mean_keys``.
    """

    def before(stop: int) -> float:
        """Return the keys of all positions before this one."""
        return stop**2 / 2 if stop < window else window * (stop - window / 2)

    each = [sum(before(run.stop) - before(run.start) for run in layout.runs(length, r)) for r in range(layout.size)]
    return max(each) / sum(each) * layout.size


def _joined(runs: Sequence[range]) -> list[range]:
    """Merge ranges that touch or overlap. The result ascends."""
    joined: list[range] = []
    for run in sorted((run for run in runs if run), key=lambda run: run.start):
        if joined and run.start <= joined[-1].stop:
            joined[-1] = range(joined[-1].start, max(joined[-1].stop, run.stop))
        else:
            joined.append(run)
    return joined


def _common(some: Sequence[range], others: Sequence[range]) -> list[range]:
    """Return the positions that are in both of two ascending lists."""
    both = (range(max(a.start, b.start), min(a.stop, b.stop)) for a in some for b in others)
    return [run for run in both if run]


def _stored(runs: Sequence[range], part: range) -> range:
    """Return the rows of a part of one of the runs, which are stored one after another."""
    before = 0
    for run in runs:
        if run.start <= part.start and part.stop <= run.stop:
            return range(before + part.start - run.start, before + part.stop - run.start)
        before += len(run)
    raise ValueError(f"{part} is in none of {list(runs)}")


def _slice(run: range) -> slice:
    return slice(run.start, run.stop)
