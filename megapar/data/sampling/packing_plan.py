"""Plans of packs: which documents share a sample, by best-fit decreasing, from their lengths alone.

Documents are placed from the longest to the shortest, each into the pack with the least room that it fits in, or else
into a new one (Johnson, 1973: at most 11/9 of the fewest packs, and a constant). Packs of equal room are alike, and so
are documents of equal length: both are placed by the run, so that the cost follows from the number of lengths.

    room 9: packs 4 to 7     length 4, nine documents: packs 4 4 5 5 6 6 7 7, and one in a new pack 8
                             room 1: packs 4 to 7; room capacity - 4: pack 8
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import dataclass

from megapar.data.lazy_numpy import np
from megapar.data.sampling.draws import Draws

VERSION = 1
"""Increased whenever the same lengths may get another plan, so that no older cache entry is read."""

_RANDOM_BITS = 40
_BLOCK = 1 << 20  # documents that keys are drawn for at a time


@dataclass(frozen=True, eq=False)
class PackingPlan:
    """Documents by pack.

    Attributes:
        items: [D] int32, the numbers of the documents, pack by pack.
        offsets: [P + 1] int64; pack p has items[offsets[p] : offsets[p + 1]].
    """

    items: np.ndarray
    offsets: np.ndarray

    @property
    def packs(self) -> int:
        """Number of packs, P."""
        return len(self.offsets) - 1

    def digest(self) -> str:
        """Return 32 hexadecimal digits of a hash of the plan."""
        state = hashlib.sha256(self.items.astype("<i4", copy=False).data)
        state.update(self.offsets.astype("<i8", copy=False).data)
        return state.hexdigest()[:32]


def one_each(documents: int) -> PackingPlan:
    """Return the plan of documents that share no pack."""
    return PackingPlan(np.arange(documents, dtype=np.int32), np.arange(documents + 1, dtype=np.int64))


def best_fit(lengths: np.ndarray, capacity: int, seed: int) -> PackingPlan:
    """Return the plan of best-fit decreasing of ``lengths`` [D], 1 to ``capacity``. ``seed`` orders equal lengths."""
    if len(lengths) == 0 or not 1 <= int(lengths.min()) <= int(lengths.max()) <= capacity:
        raise ValueError(f"{len(lengths)} lengths, which must be from 1 to {capacity}")
    order = _longest_first(lengths, capacity, seed)
    counts = np.bincount(lengths, minlength=capacity + 1)
    packs, filling, place = np.empty(len(lengths), dtype=np.int32), _Filling(capacity), 0
    for length in np.flatnonzero(counts)[::-1].tolist():
        count = int(counts[length])
        filling.place(length, packs[place : place + count])
        place += count
    offsets = np.concatenate([[0], np.cumsum(np.bincount(packs, minlength=filling.packs))])
    return PackingPlan(order[np.argsort(packs, kind="stable")], offsets)


def _longest_first(lengths: np.ndarray, capacity: int, seed: int) -> np.ndarray:
    """Return [D] int32, the documents from the longest to the shortest, in a random order among equals."""
    keys = np.empty(len(lengths), dtype=np.int64)
    for number, first in enumerate(range(0, len(lengths), _BLOCK)):
        block = lengths[first : first + _BLOCK]
        random = Draws(seed, "packs", number).integers(len(block), 1 << _RANDOM_BITS)
        keys[first : first + _BLOCK] = (capacity - block.astype(np.int64)) << _RANDOM_BITS | random
    return np.argsort(keys, kind="stable").astype(np.int32)


class _Filling:
    """Packs by their room. ``packs`` is the number of those opened."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.packs = 0
        self._runs: dict[int, list[range]] = defaultdict(list)
        self._rooms = 0  # a bit for each room that some pack has

    def place(self, length: int, out: np.ndarray) -> None:
        """Place len(out) documents of one length; ``out`` receives the pack of each."""
        done = 0
        while done < len(out):
            left = len(out) - done
            room, run = self._best(length, left)
            each = room // length
            full = min(len(run), left // each)
            out[done : done + full * each] = np.repeat(np.arange(run.start, run.start + full), each)
            self._keep(room - each * length, run[:full])
            done += full * each
            if full < len(run):
                rest = len(out) - done  # fewer than a pack takes
                out[done : done + rest] = run[full]
                self._keep(room - rest * length, run[full : full + 1])
                self._keep(room, run[full + 1 :])
                done += rest

    def _best(self, length: int, count: int) -> tuple[int, range]:
        """Take packs of the least room that fits, new ones if there are none; return (room, packs)."""
        fitting = self._rooms >> length
        if not fitting:
            first, needed = self.packs, -(-count // (self._capacity // length))
            self.packs += needed
            return self._capacity, range(first, self.packs)
        room = length + (fitting & -fitting).bit_length() - 1
        runs = self._runs[room]
        run = runs.pop()
        if not runs:
            self._rooms &= ~(1 << room)
        return room, run

    def _keep(self, room: int, run: range) -> None:
        if run and room:
            self._runs[room].append(run)
            self._rooms |= 1 << room
