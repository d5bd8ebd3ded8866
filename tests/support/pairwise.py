"""Covering sets: every legal pair of values of two factors stands together in some row."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

Row = tuple[Any, ...]


def pairwise(factors: Sequence[Sequence[Any]], legal: Callable[[Row], bool] = lambda row: True) -> list[Row]:
    """Rows of the product of ``factors``, chosen greedily and always the same: each covers most new pairs."""
    rows = [row for row in itertools.product(*factors) if legal(row)]
    missing = set().union(*(_pairs(row) for row in rows))
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(_pairs(row) & missing))
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


def _pairs(row: Row) -> set[tuple[tuple[int, Any], tuple[int, Any]]]:
    return set(itertools.combinations(enumerate(row), 2))
