"""Digested tensors: a part of them is digested after each update and again before the next one, to detect corruption.

    update 1    hold part 1    ...at rest...    compare part 1    update 2    hold part 2    ...

The parts rotate. Between two updates no code writes to the tensors, so that a changed digest means faulty memory. Only
``changed`` makes the host wait for the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megapar.health.corruption.state_digest import (
    FlatRange,
    IntBlocks,
    digest_blocks,
    digest_tensors,
    int_blocks,
    places,
    rotation,
)

# The last comparisons. The host learns of a difference up to two updates later.
_KEPT = 4


class DigestedTensors(Protocol):
    """The interface for a guard, independent of the memory that the tensors are in."""

    def hold(self) -> None:
        """Digest the next part. Call this after an update."""

    def compare(self) -> Tensor | None:
        """Return a scalar on the device, true if the part has changed since ``hold``; None if nothing was compared."""

    def drop(self) -> None:
        """Forget the part, so that the next ``compare`` has nothing to compare."""

    def look(self) -> None:
        """Compare the present content, in case ``compare`` returns the result of an earlier comparison."""

    def changed(self) -> list[tuple[int, int]]:
        """Return the places that differed in the last comparisons, as address ranges. Waits for the device."""


class RestingTensors:
    """Digests of tensors that stay in one memory.

    Args:
        tensors: The tensors to digest.
        steps: The number of updates after which every element was digested once.
        parts: The number of parts that take turns in them, evenly spread; None: as many as updates.
    """

    def __init__(self, tensors: Sequence[Tensor], steps: int, parts: int | None = None) -> None:
        self._flats = [tensor.view(-1) for tensor in tensors]
        parts = steps if parts is None else parts
        self._groups: list[list[FlatRange]] = [[] for _ in range(steps)]
        for number, group in enumerate(rotation([flat.numel() for flat in self._flats], parts)):
            self._groups[number * steps // parts] = group
        self._turn = -1
        self._pieces: list[Tensor] = []
        self._blocks: list[IntBlocks] = []
        self._held: Tensor | None = None
        self._found: deque[tuple[list[Tensor], Tensor]] = deque(maxlen=_KEPT)

    def hold(self) -> None:
        """Digest the next part."""
        self._turn = (self._turn + 1) % len(self._groups)
        self._pieces = [self._flats[piece.tensor][piece.start : piece.end] for piece in self._groups[self._turn]]
        self._blocks = [int_blocks(piece) for piece in self._pieces]
        self._held = self._digest() if self._pieces else None

    def compare(self) -> Tensor | None:
        """Digest the part again and compare."""
        if self._held is None:
            return None
        different = self._digest() != self._held
        self._found.append((self._pieces, different))
        return different.any()

    def drop(self) -> None:
        """Forget the part."""
        self._held = None

    def look(self) -> None:
        """Compare as ``compare`` does, without returning the result."""
        self.compare()

    def changed(self) -> list[tuple[int, int]]:
        """Return the places without duplicates."""
        found = [place for pieces, different in self._found for place in places(pieces, different, pieces)]
        return list(dict.fromkeys(found))

    def _digest(self) -> Tensor:
        return digest_blocks(self._blocks, self._pieces[0].device)


class _Comparison(NamedTuple):
    """A comparison.

    Attributes:
        pieces: As they were on the device.
        different: Mask over their digest, on the device.
        homes: The same pieces in host memory.
    """

    pieces: list[Tensor]
    different: Tensor
    homes: list[Tensor]


class VisitingTensors:
    """Digests of offloaded tensors: made on the device, when an update copies them there and back to host memory.

    Args:
        homes: For each part number, the tensors that are copied together, in host memory.
        steps: The number of updates after which every element was digested once.
        visit: Copies all parts to the device and calls ``arrived`` for each.
    """

    def __init__(self, homes: Sequence[Sequence[Tensor]], steps: int, visit: Callable[[], None]) -> None:
        self._homes = [[tensor.view(-1) for tensor in home] for home in homes]
        self._visit = visit
        self._groups: list[dict[int, list[FlatRange]]] = []
        sizes = [flat.numel() for home in self._homes for flat in home]
        numbers = [(number, i) for number, home in enumerate(self._homes) for i in range(len(home))]
        for group in rotation(sizes, steps):
            mine: dict[int, list[FlatRange]] = {}
            for piece in group:
                number, i = numbers[piece.tensor]
                mine.setdefault(number, []).append(FlatRange(i, piece.start, piece.end))
            self._groups.append(mine)
        self._turn = 0
        self._held: dict[int, Tensor] = {}
        self._next: dict[int, Tensor] = {}
        self._now: list[_Comparison] = []
        self._found: deque[list[_Comparison]] = deque(maxlen=_KEPT)

    def arrived(self, number: int, tensors: Sequence[Tensor]) -> None:
        """Compare a part after it was copied to the device, before the update."""
        if number in self._held:
            pieces = self._groups[self._turn][number]
            here = _pieces(tensors, pieces)
            different = digest_tensors(here) != self._held[number]
            self._now.append(_Comparison(here, different, _pieces(self._homes[number], pieces)))

    def leaves(self, number: int, tensors: Sequence[Tensor]) -> None:
        """Digest a part after the update, before it is copied back to host memory."""
        pieces = self._groups[(self._turn + 1) % len(self._groups)].get(number)
        if pieces:
            self._next[number] = digest_tensors(_pieces(tensors, pieces))

    def hold(self) -> None:
        """Start the next turn. Call this after all parts are back in host memory."""
        self._found.append(self._now)
        self._now, self._held, self._next = [], self._next, {}
        self._turn = (self._turn + 1) % len(self._groups)

    def compare(self) -> Tensor | None:
        """Return the result of the comparison in the last update."""
        last = self._found[-1] if self._found else []
        return torch.cat([compared.different for compared in last]).any() if last else None

    def drop(self) -> None:
        """Forget all parts, also those in the slots."""
        self._held, self._next = {}, {}

    def look(self) -> None:
        """Copy all parts to the device and compare them."""
        self._visit()
        self._found.append(self._now)
        self._now = []

    def changed(self) -> list[tuple[int, int]]:
        """Return the places in host memory without duplicates."""
        found = [place for update in self._found for seen in update for place in places(*seen)]
        return list(dict.fromkeys(found))


def _pieces(tensors: Sequence[Tensor], pieces: Sequence[FlatRange]) -> list[Tensor]:
    return [tensors[piece.tensor].view(-1)[piece.start : piece.end] for piece in pieces]
