"""Every rank has what every rank gave."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megapar.core.agreement import TEXT_BYTES, numbers_of_all, texts_of_all
from megapar.core.axis import Axis
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")


def told(rank: int, world_size: int) -> tuple[list[list[int]], list[str]]:
    """What two ranks tell each other."""
    axis = Axis("world", world_size, rank, dist.group.WORLD, tuple(range(world_size)))
    return numbers_of_all([rank, -(1 << 63)], axis, CPU), texts_of_all("ä" * (rank + 1) * 200, axis, CPU)


def test_numbers_and_texts_of_all_ranks_are_the_same_everywhere() -> None:
    for numbers, texts in run_ranks(2, told):
        assert numbers == [[0, -(1 << 63)], [1, -(1 << 63)]]
        assert texts == ["ä" * 200, "ä" * (TEXT_BYTES // 2)]


def test_one_rank_has_its_own() -> None:
    assert texts_of_all("here", Axis.single("world"), CPU) == ["here"]
