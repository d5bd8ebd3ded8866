"""Sharding of stages 1 and 2, apart from its numbers, which tests/equivalence has."""

from __future__ import annotations

import gc
from unittest.mock import patch

import pytest
import torch

from megapar.core.sharding import bucket as segment
from megapar.core.sharding import zero
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


def train(
    rank: int, world_size: int, rendezvous: str, row: tuple[str, tuple[str, ...]], most_bytes: int
) -> tuple[int, dict[str, torch.Tensor] | None]:
    """(most reductions in flight at once, the parameters after two steps)."""
    flying: set[int] = set()
    most = 0
    start, finish = segment.Bucket.start_grad_reduce, segment.Bucket.finish_grad_reduce

    def started(self: segment.Bucket, **options: bool) -> None:
        nonlocal most
        start(self, **options)
        flying.add(id(self))
        most = max(most, len(flying))

    def finished(self: segment.Bucket, **options: bool) -> None:
        finish(self, **options)
        flying.discard(id(self))

    with (
        patch.object(zero, "IN_FLIGHT_BYTES", most_bytes),
        patch.object(segment.Bucket, "start_grad_reduce", started),
        patch.object(segment.Bucket, "finish_grad_reduce", finished),
    ):
        found = trace(rank, world_size, rendezvous, *row, 2, backend="late")
    return most, None if found is None else found.parameters


@pytest.mark.parametrize("stage", ["1", "2"])
def test_few_reductions_in_flight_change_nothing(stage: str) -> None:
    """Buffers of what has landed serve the segments that come, in every micro-batch."""
    row = next(row for row in ROWS if row.world_size == 2 and "--sharding-degree" in row.layout and row.kind == "moe")
    flags = (*row.flags(), "--sharding-stage", stage, "--num-layers", "6")
    (all_at_once, free), _ = run_ranks(2, train, (row.kind, flags), 1 << 30, group=False)
    (few, bound), _ = run_ranks(2, train, (row.kind, flags), 0, group=False)
    assert few == zero.LEAST_IN_FLIGHT + 1 < all_at_once  # one is launched before the oldest lands
    assert free is not None
    assert bound is not None
    for name, value in free.items():
        assert torch.equal(bound[name], value), name
