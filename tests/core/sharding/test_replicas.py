"""Replicas over mp have the same bits, also where mp ranks have pieces of unequal length beside them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megapar.arguments import parse
from megapar.core.comm import collectives
from megapar.core.comm.axis import Axis
from megapar.core.comm.buffers import BufferPool
from megapar.core.comm.world import World
from megapar.core.sharding import replicas
from megapar.core.sharding.replicas import Replica, replica_digest
from megapar.trainer import train
from tests.support.late import poison
from tests.support.ranks import run_ranks
from tests.support.training import COMMON, SMALL, last_wins

LAYOUTS = {
    "sums over replicas": ("--dp-degree", "3", "--sharding-degree", "1", "--sharding-stage", "2", "--hybrid-dp"),
    "rows of stage 1": ("--sharding-degree", "3", "--sharding-stage", "1"),
    "rows of stage 2": ("--sharding-degree", "3", "--sharding-stage", "2"),
    "groups of stage 3": ("--sharding-degree", "3", "--sharding-stage", "3"),
}


def sum_by_place(parts: torch.Tensor) -> torch.Tensor:
    """Sum [n, P] over n, beginning with a rank that follows from P and the place, as in a library's rings."""
    length = parts.shape[1]
    first = torch.randint(len(parts), (length,), generator=torch.Generator().manual_seed(length))
    total = parts.gather(0, first[None])
    for step in range(1, len(parts)):
        total += parts.gather(0, (first[None] + step) % len(parts))
    return total[0]


def reduce_scatter(piece: torch.Tensor, whole: torch.Tensor, axis: Axis, **options: object) -> None:
    parts = torch.empty_like(whole)
    dist.all_to_all_single(parts, whole, group=axis.group)
    piece.copy_(sum_by_place(parts.view(axis.size, -1)).view_as(piece))


def all_reduce(x: torch.Tensor, axis: Axis, *arguments: object, **options: bool) -> dist.Work | None:
    if axis.name != "replica":
        return ALL_REDUCE(x, axis, *arguments, **options)
    parts = [torch.empty_like(x) for _ in axis.ranks]
    dist.all_gather(parts, x, group=axis.group)
    x.copy_(sum_by_place(torch.stack(parts)))
    return None


ALL_REDUCE, TAKE = collectives.all_reduce, BufferPool.take


def digests(rank: int, world_size: int, rendezvous: str, kind: str, flags: tuple[str, ...]) -> list[dict[str, int]]:
    """Of each comparison of a run: the digests of this rank's masters and parameters that are replicated over mp."""
    found: list[dict[str, int]] = []

    def record(compared: Iterable[Replica], world: World, when: str) -> bool:
        over_mp = [replica for replica in compared if replica.axis.name == "mp"]
        found.append({replica.name: int(replica_digest(replica.tensor)) for replica in over_mp})
        return True

    def take(self: BufferPool, *arguments: object) -> torch.Tensor:
        buffer = TAKE(self, *arguments)
        poison(buffer)  # what is left free in a row is never read
        return buffer

    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    with (
        patch.dict(os.environ, place),
        patch.object(replicas, "check", record),
        patch.object(collectives, "reduce_scatter", reduce_scatter),
        patch.object(collectives, "all_reduce", all_reduce),
        patch.object(BufferPool, "take", take),
    ):
        train(parse(kind, flags, dict(os.environ)), f"file://{rendezvous}")
    return found


@pytest.mark.parametrize("kind", ["moe", "ernie"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_odd_vocabulary_leaves_replicas_over_mp_alike(layout: str, kind: str) -> None:
    """mp rank 1 has a row of the vocabulary less than rank 0, and the other parameters lie behind it."""
    flags = [*LAYOUTS[layout], "--mp-degree", "2", "--rank-order", "dp,pp,sharding,cp,mp", "--vocab-size", "43"]
    flags += ["--sharding-segment-strategy", "segment_broadcast_MB", "--segment-broadcast-MB", "8"]  # one has all
    flags += ["--global-batch-size", "9", "--train-iters", "2", "--replica-check-interval", "1", "--dtype", "fp32"]
    flags = last_wins((*SMALL[kind], *COMMON), flags)
    by_rank = run_ranks(6, digests, kind, tuple(flags), group=False)
    assert len(by_rank[0]) == 2
    assert len(by_rank[0][-1]) > 5
    for first, second in zip(by_rank[::2], by_rank[1::2], strict=True):
        for iteration, (one, other) in enumerate(zip(first, second, strict=True), 1):
            assert [name for name in one if one[name] != other[name]] == [], f"after step {iteration}"
