"""Mixtures of corpora, concatenated or weighted, with counts in closed form; no index is built or stored."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from math import lcm
from typing import Generic, TypeVar

from megapar.data.lazy_numpy import np
from megapar.data.sampling.samples import DocumentPieces, Order, PieceOrder, TokenPieces, WeightedPiece, weighted

Pieces_co = TypeVar("Pieces_co", bound=TokenPieces, covariant=True)


class Shares:
    """Assigns each number 0, 1, 2, .. to a part, so that each part has its share of the first n numbers for every n.

    The parts form a binary tree. At a node whose left half has the weight L of T, floor(n L / T) of the first n
    numbers go left, and number n goes left if this floor increases. The spread is even, and the part of a number is
    known without the numbers before it. A part's count differs from its exact share by less than one per level:
    |count - n w| < ceil(log2(parts)).
    """

    def __init__(self, weights: Sequence[Fraction]) -> None:
        """Take weights above 0; their sum need not be 1."""
        if not weights or min(weights) <= 0:
            raise ValueError(f"weights {', '.join(map(str, weights))}: pass at least one, all above 0")
        scale = lcm(*(weight.denominator for weight in weights))
        self._until = [0, *accumulate(int(weight * scale) for weight in weights)]

    def find(self, number: int) -> tuple[int, int]:
        """Return (part of ``number``, count of smaller numbers of that part)."""
        return self._descend(number, None)

    def count(self, part: int, number: int) -> int:
        """Return the count of numbers below ``number`` that belong to the part."""
        return self._descend(number, part)[1]

    def _descend(self, number: int, part: int | None) -> tuple[int, int]:
        """Go to the leaf of ``part``, or of the number itself; return it and the count of smaller numbers there."""
        low, high = 0, len(self._until) - 1
        while high - low > 1:
            middle = (low + high) // 2
            left, total = self._until[middle] - self._until[low], self._until[high] - self._until[low]
            before = number * left // total
            goes_left = part < middle if part is not None else (number + 1) * left // total > before
            if goes_left:
                high, number = middle, before
            else:
                low, number = middle, number - before
        return low, number


class Blend(Generic[Pieces_co]):
    """The pieces of several corpora in one sequence: those of the first, then those of the second, ..

    With weights, ``Shares`` assigns each sample to a corpus, and each corpus has its own epochs. Without weights, all
    pieces together are one epoch.
    """

    def __init__(self, parts: Sequence[Pieces_co], weights: Sequence[Fraction] | None = None) -> None:
        self.parts = tuple(parts)
        self.weights = weights
        self._starts = [0, *accumulate(len(part) for part in parts)]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, number: int) -> np.ndarray:
        part = bisect_right(self._starts, number) - 1
        return self.parts[part][number - self._starts[part]]

    def weighted(self, number: int) -> WeightedPiece:
        part = bisect_right(self._starts, number) - 1
        return weighted(self.parts[part], number - self._starts[part])

    def document(self: Blend[DocumentPieces], number: int) -> int:
        """Return the document that a piece is from, if the parts have documents; numbered by part first."""
        part = bisect_right(self._starts, number) - 1
        return part << 48 | self.parts[part].document(number - self._starts[part])

    def order(self, seed: int, stream: str) -> PieceOrder:
        if self.weights is None:
            return Order(len(self), seed, stream)
        orders = [Order(len(part), seed, f"mixture/{number}/{stream}") for number, part in enumerate(self.parts)]
        return _MixedOrder(Shares(self.weights), orders, self._starts)


class _MixedOrder:
    def __init__(self, shares: Shares, orders: Sequence[PieceOrder], starts: Sequence[int]) -> None:
        self._shares = shares
        self._orders = orders
        self._starts = starts

    def __getitem__(self, number: int) -> int:
        part, index = self._shares.find(number)
        return self._starts[part] + self._orders[part][index]
