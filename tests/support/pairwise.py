"""Covering sets: what stands together in some row of a table stands together in a few rows of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

Row = tuple[Any, ...]
R = TypeVar("R")


def pairwise(factors: Sequence[Sequence[Any]], legal: Callable[[Row], bool] = lambda row: True) -> list[Row]:
    """Rows of the product of ``factors`` with every legal pair of values of two factors."""
    return covering([row for row in itertools.product(*factors) if legal(row)], enumerate)


def covering(
    rows: Sequence[R],
    traits: Callable[[R], Iterable[Hashable]],
    together: int = 2,
    cost: Callable[[R], float] = lambda row: 1.0,
) -> list[R]:
    """Rows with every ``together`` traits that some row has at once.

    Chosen greedily and always the same: each row adds most that is new for what it costs. traits: of a row, always in
    the same order.
    """
    had = [set(itertools.combinations(traits(row), together)) for row in rows]
    prices = [cost(row) for row in rows]
    missing = set().union(*had)
    chosen = []
    while missing:
        best = max(range(len(rows)), key=lambda number: len(had[number] & missing) / prices[number])
        chosen.append(rows[best])
        missing -= had[best]
    return chosen
