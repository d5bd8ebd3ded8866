"""Covering sets: a few rows of a table that contain every combination that some row of it contains."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

Row = tuple[Any, ...]
R = TypeVar("R")


def pairwise(factors: Sequence[Sequence[Any]], legal: Callable[[Row], bool] = lambda row: True) -> list[Row]:
    """Return rows of the product of ``factors`` that contain every legal pair of values of two factors."""
    return covering([row for row in itertools.product(*factors) if legal(row)], enumerate)


def covering(
    rows: Sequence[R],
    traits: Callable[[R], Iterable[Hashable]],
    together: int = 2,
    cost: Callable[[R], float] = lambda row: 1.0,
    chosen: Sequence[R] = (),
) -> list[R]:
    """Return rows that contain every combination of ``together`` traits that some row has.

    The choice is greedy and deterministic: each row adds the most new combinations for its cost.

    Args:
        rows: The rows.
        traits: Returns the traits of a row, always in the same order.
        together: Number of traits in a combination.
        cost: Returns the cost of a row.
        chosen: Rows of another test that show the same: their combinations are not needed again.
    """
    had = [set(itertools.combinations(traits(row), together)) for row in rows]
    prices = [cost(row) for row in rows]
    missing = set().union(*had).difference(*(itertools.combinations(traits(row), together) for row in chosen))
    found = []
    while missing:
        best = max(range(len(rows)), key=lambda number: len(had[number] & missing) / prices[number])
        found.append(rows[best])
        missing -= had[best]
    return found
