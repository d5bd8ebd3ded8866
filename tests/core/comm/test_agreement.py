"""Every rank has what every rank gave."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megapar.core.comm.agreement import TEXT_BYTES, gather_numbers, numbers_of_all, reduce_numbers, texts_of_all
from megapar.core.comm.axis import Axis
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")


def exchanged_values(rank: int, world_size: int) -> tuple[list[list[int]], list[str]]:
    """What two ranks tell each other."""
    axis = Axis("world", world_size, rank, dist.group.WORLD, tuple(range(world_size)))
    return numbers_of_all([rank, -(1 << 63)], axis, CPU), texts_of_all("ä" * (rank + 1) * 200, axis, CPU)


def test_numbers_and_texts_of_all_ranks_are_the_same_everywhere() -> None:
    for numbers, texts in run_ranks(2, exchanged_values):
        assert numbers == [[0, -(1 << 63)], [1, -(1 << 63)]]
        assert texts == ["ä" * 200, "ä" * (TEXT_BYTES // 2)]


def exchanged(rank: int, world_size: int) -> tuple[list[float], list[str], dict[tuple[str, str], int]]:
    """(reduced and gathered numbers, what the flight recorder has, the bytes that were counted)."""
    axis = Axis("data", world_size, rank, dist.group.WORLD, tuple(range(world_size)))
    x = torch.tensor([rank + 1.0])
    own = x.clone()
    reduce_numbers(x, axis, "losses")
    least = own.clone()
    work = reduce_numbers(least, axis, "counts", dist.ReduceOp.MIN, async_op=True)
    assert work is not None
    work.wait()
    gathered = gather_numbers(own, axis, "pace")
    values = [float(value.item()) for value in (x, least, *gathered)]
    return values, [str(launched) for launched in axis.recorder.recent], dict(axis.sent_bytes)


def test_what_is_exchanged_is_noted_and_not_counted() -> None:
    noted = ["losses 1 on data", "counts 2 on data", "pace 3 on data"]
    assert run_ranks(2, exchanged) == [([3.0, 1.0, 1.0, 2.0], noted, {})] * 2


def test_one_rank_has_its_own() -> None:
    single = Axis.single("world")
    assert reduce_numbers(torch.ones(2), single, "losses") is None
    own = torch.ones(2)
    assert all(one is own for one in gather_numbers(own, single, "pace"))
    assert not single.recorder.recent
    assert texts_of_all("here", Axis.single("world"), CPU) == ["here"]
