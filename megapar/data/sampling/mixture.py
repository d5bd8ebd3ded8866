"""Corpora put together: one after the other, or by weight, with counts in closed form. Nothing is built or stored."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from math import lcm
from typing import TYPE_CHECKING

from megapar.data.sampling.samples import InOrder, Order, PieceOrder, TokenPieces

if TYPE_CHECKING:
    import numpy as np


class Shares:
    """The part that each number 0, 1, 2, .. belongs to, so that part p gets its share of every beginning.

    The parts are halved again and again. At a node whose left half has the share L of T, of the first n numbers
    floor(n L / T) go left, and number n does where that floor rises: an even spread, known without looking at the
    numbers before. Of the first n numbers a part has its exact share, but for less than one per level:
    |count - n w| < ceil(log2(parts)).
    """

    def __init__(self, weights: Sequence[Fraction]) -> None:
        """weights: above 0; they need not add up to 1."""
        if not weights or min(weights) <= 0:
            raise ValueError(f"weights {', '.join(map(str, weights))}: there must be some, all above 0")
        scale = lcm(*(weight.denominator for weight in weights))
        self._until = [0, *accumulate(int(weight * scale) for weight in weights)]

    def find(self, number: int) -> tuple[int, int]:
        """(part, how many numbers of that part come before)."""
        low, high = 0, len(self._until) - 1
        while high - low > 1:
            middle = (low + high) // 2
            left, total = self._until[middle] - self._until[low], self._until[high] - self._until[low]
            before = number * left // total
            if (number + 1) * left // total > before:
                high, number = middle, before
            else:
                low, number = middle, number - before
        return low, number

    def count(self, part: int, number: int) -> int:
        """The count of numbers below ``number`` that belong to the part."""
        low, high = 0, len(self._until) - 1
        while high - low > 1:
            middle = (low + high) // 2
            left, total = self._until[middle] - self._until[low], self._until[high] - self._until[low]
            before = number * left // total
            if part < middle:
                high, number = middle, before
            else:
                low, number = middle, number - before
        return number


class Blend:
    """The pieces of several corpora under one numbering: those of the first, then those of the second, ..

    With weights a sample's corpus follows from its number by Shares, and each corpus goes through its own epochs;
    without, all pieces together are one epoch.
    """

    def __init__(self, parts: Sequence[TokenPieces], weights: Sequence[Fraction] | None = None) -> None:
        self.parts = tuple(parts)
        self.weights = weights
        self._starts = [0, *accumulate(len(part) for part in parts)]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, number: int) -> np.ndarray:
        part = bisect_right(self._starts, number) - 1
        return self.parts[part][number - self._starts[part]]

    def document(self, number: int) -> int:
        """The document that a piece is from, where the parts know; numbered by part first."""
        part = bisect_right(self._starts, number) - 1
        own: int = self.parts[part].document(number - self._starts[part])  # type: ignore[attr-defined]
        return part << 48 | own

    def order(self, seed: int | None, stream: str) -> PieceOrder:
        """See samples.Ordered."""
        if self.weights is None:
            return InOrder(len(self)) if seed is None else Order(len(self), seed, stream)
        orders: list[PieceOrder] = [
            InOrder(len(part)) if seed is None else Order(len(part), seed, f"mixture/{number}/{stream}")
            for number, part in enumerate(self.parts)
        ]
        return _MixedOrder(Shares(self.weights), orders, self._starts)


class _MixedOrder:
    def __init__(self, shares: Shares, orders: Sequence[PieceOrder], starts: Sequence[int]) -> None:
        self._shares = shares
        self._orders = orders
        self._starts = starts

    def __getitem__(self, number: int) -> int:
        part, own = self._shares.find(number)
        return self._starts[part] + self._orders[part][own]
