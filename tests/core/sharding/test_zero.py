"""Sharding of stages 1 and 2, apart from its numbers, which tests/equivalence has."""

from __future__ import annotations

import gc

from megapar.core.sharding.zero import ZeroSharding
from tests.equivalence.run import trace
from tests.equivalence.table import ROWS
from tests.support.ranks import run_ranks


def count_left_behind(rank: int, world_size: int, rendezvous: str, kind: str, flags: tuple[str, ...]) -> int:
    trace(rank, world_size, rendezvous, kind, flags, 1)
    gc.collect()
    return sum(isinstance(thing, ZeroSharding) for thing in gc.get_objects())


def test_nothing_is_left_of_a_trainer_that_is_gone() -> None:
    """Hooks on parameters once kept it, and with it its groups, whose threads wake a hundred times a second."""
    row = next(row for row in ROWS if row.world_size == 2 and "--sharding-degree" in row.layout and row.kind == "moe")
    assert run_ranks(2, count_left_behind, row.kind, row.flags(), group=False) == [0, 0]
