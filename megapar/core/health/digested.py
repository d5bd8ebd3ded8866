"""Tensors of which a part is digested when they come to rest, and again before they are changed.

    update 1    hold part 1    ...at rest...    compare part 1    update 2    hold part 2    ...

The parts take turns. A change while nobody may change anything is seen in the part whose turn it is. Nothing here
makes the host wait for the device but ``changed``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megapar.core.health.state_digest import FlatRange, digest, places, rotation

# Comparisons that are kept until the host has heard of them, which may be two updates later.
_KEPT = 4


class DigestedTensors(Protocol):
    """What a guard asks, whatever memory the tensors are in."""

    def hold(self) -> None:
        """The tensors have come to rest: digest the next part."""

    def compare(self) -> Tensor | None:
        """A scalar on the device, true where the part has changed since; None where nothing has been compared."""

    def look(self) -> None:
        """Compare what is held now, where ``compare`` tells of an earlier time."""

    def changed(self) -> list[tuple[int, int]]:
        """The places that the last comparisons found, as ranges of addresses. Waits for the device."""


class RestingTensors:
    """Tensors that stay where they are."""

    def __init__(self, tensors: Sequence[Tensor], steps: int) -> None:
        self._flats = [tensor.view(-1) for tensor in tensors]
        self._groups = rotation([flat.numel() for flat in self._flats], steps)
        self._turn = -1
        self._pieces: list[Tensor] = []
        self._held: Tensor | None = None
        self._found: deque[tuple[list[Tensor], Tensor]] = deque(maxlen=_KEPT)

    def hold(self) -> None:
        """Digest the next part."""
        self._turn = (self._turn + 1) % len(self._groups)
        self._pieces = [self._flats[piece.tensor][piece.start : piece.end] for piece in self._groups[self._turn]]
        self._held = digest(self._pieces) if self._pieces else None

    def compare(self) -> Tensor | None:
        """Digest the part again."""
        if self._held is None:
            return None
        different = digest(self._pieces) != self._held
        self._found.append((self._pieces, different))
        return different.any()

    def look(self) -> None:
        """Compare."""
        self.compare()

    def changed(self) -> list[tuple[int, int]]:
        """The places, each once."""
        found = [place for pieces, different in self._found for place in places(pieces, different, pieces)]
        return list(dict.fromkeys(found))


class _Seen(NamedTuple):
    """A comparison. pieces: as they were on the device. homes: the same in host memory."""

    pieces: list[Tensor]
    different: Tensor
    homes: list[Tensor]


class VisitingTensors:
    """Tensors that lie in host memory and visit the device to be changed: they are digested there, as they come and go.

    homes: for each number the tensors that come together, as they lie in host memory. visit: brings all of them, and
    calls ``arrived`` for each number.
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
        self._now: list[_Seen] = []
        self._found: deque[list[_Seen]] = deque(maxlen=_KEPT)

    def arrived(self, number: int, tensors: Sequence[Tensor]) -> None:
        """These are on the device, as their homes have them."""
        if number in self._held:
            pieces = self._groups[self._turn][number]
            here = _pieces(tensors, pieces)
            different = digest(here) != self._held[number]
            self._now.append(_Seen(here, different, _pieces(self._homes[number], pieces)))

    def leaves(self, number: int, tensors: Sequence[Tensor]) -> None:
        """These are about to go home, changed."""
        pieces = self._groups[(self._turn + 1) % len(self._groups)].get(number)
        if pieces:
            self._next[number] = digest(_pieces(tensors, pieces))

    def hold(self) -> None:
        """All have gone home."""
        self._found.append(self._now)
        self._now, self._held, self._next = [], self._next, {}
        self._turn = (self._turn + 1) % len(self._groups)

    def compare(self) -> Tensor | None:
        """What was found at the last update."""
        last = self._found[-1] if self._found else []
        return torch.cat([seen.different for seen in last]).any() if last else None

    def look(self) -> None:
        """Let all of them visit."""
        self._visit()
        self._found.append(self._now)
        self._now = []

    def changed(self) -> list[tuple[int, int]]:
        """The places in host memory, each once."""
        found = [place for update in self._found for seen in update for place in places(*seen)]
        return list(dict.fromkeys(found))


def _pieces(tensors: Sequence[Tensor], pieces: Sequence[FlatRange]) -> list[Tensor]:
    return [tensors[piece.tensor].view(-1)[piece.start : piece.end] for piece in pieces]
