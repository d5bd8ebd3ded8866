"""Groups: made for every axis, shared where ranks are equal, and a missing rank is named."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megapar.core.comm.rounds import axis_rounds
from megapar.core.comm.world import World, roll_call
from megapar.core.device.base import Device
from megapar.core.grid import DENSE_AXES, EXPERT_AXES, Grid
from megapar.errors import DistributedError
from tests.support.counted_store import CountedStore
from tests.support.ranks import run_ranks

TIMEOUT = timedelta(seconds=30)


def start(rank: int, world_size: int, rendezvous: str, grid: Grid, timeout: timedelta = TIMEOUT) -> World:
    with patch.dict(os.environ, {"RANK": str(rank), "WORLD_SIZE": str(world_size)}):
        return World.start(grid, Device(), timeout, f"file://{rendezvous}")


class Asked(Device):
    """A device that remembers the groups for which it was asked for options."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: list[tuple[str, ...]] = []

    def group_options(self, names: Collection[str], timeout: timedelta, *, queue: bool) -> Any:
        self.groups.append(tuple(names))


def groups_with_options(rank: int, world_size: int, rendezvous: str, grid: Grid) -> tuple[list[tuple[str, ...]], Any]:
    device = Asked()
    with patch.dict(os.environ, {"RANK": str(rank), "WORLD_SIZE": str(world_size)}):
        world = World.start(grid, device, TIMEOUT, f"file://{rendezvous}")
    found = device.groups, axis_rounds(grid)
    world.close()
    return found


def test_the_device_chooses_the_options_of_the_world_and_of_every_round() -> None:
    for asked, rounds in run_ranks(2, groups_with_options, Grid(sharding=2), group=False):
        assert asked == [("world",), *rounds]


def gather_over_every_axis(rank: int, world_size: int, rendezvous: str, grid: Grid) -> tuple[int, int]:
    world = start(rank, world_size, rendezvous, grid)
    assert world.grid.coordinates(world.rank) == grid.coordinates(rank)
    for name in (*DENSE_AXES, *EXPERT_AXES, "data", "shard", "replica", "expert_shard", "expert_replica", "world"):
        axis = world.axis(name)
        if axis.group is not None:
            found = [torch.zeros(1, dtype=torch.int64) for _ in range(axis.size)]
            dist.all_gather(found, torch.tensor([world.rank]), group=axis.group)
            assert [int(value) for value in found] == list(axis.ranks)
            assert axis.ranks[axis.rank] == world.rank
    world.close()
    return world.rank, world.num_groups


@pytest.mark.parametrize(
    "order", [DENSE_AXES, ("sharding", "dp", "pp", "cp", "mp"), ("mp", "cp", "sharding", "pp", "dp")]
)
def test_every_axis_communicates_in_the_order_of_its_coordinates(order: tuple[str, ...]) -> None:
    """torch sorts the ranks of a group by number, whatever order they are given in."""
    grids = [Grid(dp=2, sharding=2, ep=4, order=order), Grid(sharding=2, mp=2, ep=4, order=order)]
    for grid in grids:
        numbers, groups = zip(*run_ranks(4, gather_over_every_axis, grid, group=False), strict=True)
        assert sorted(numbers) == [0, 1, 2, 3]
        assert numbers[0] == 0
        assert set(groups) == {len(axis_rounds(grid)) + 1}  # and the world's


def test_axes_of_the_same_ranks_share_a_group() -> None:
    """dp and replica, sharding and shard, data and edp."""
    shared = axis_rounds(Grid(dp=2, sharding=2))
    assert [set(names) >= {*pair} for names, pair in zip(shared, PAIRS, strict=True)] == [True] * 3


PAIRS = ("dp", "replica"), ("sharding", "shard"), ("data", "edp")


def test_one_process_needs_no_group() -> None:
    world = World.start(Grid(), Device(), TIMEOUT)
    assert world.axis("sharding").group is None
    assert world.num_groups == 0
    world.close()


def call_without_rank_two(rank: int, world_size: int, rendezvous: str) -> str:
    store = dist.FileStore(rendezvous, world_size)
    if rank == 2:
        return ""
    with pytest.raises(DistributedError) as caught:
        roll_call(store, "sharding", (0, 1, 2), rank, timedelta(seconds=1))
    return str(caught.value)


def test_a_silent_rank_is_named_with_its_group() -> None:
    first, second, _ = run_ranks(3, call_without_rank_two, group=False)
    for message in (first, second):
        assert "group sharding of ranks [0, 1, 2]: ranks [2] did not answer within 1 s" in message


def test_a_roll_call_asks_the_store_three_times_for_each_rank() -> None:
    """The store is one process: n ranks that each asked for all n would be a million requests of a thousand."""
    store, ranks = CountedStore(), tuple(range(32))
    with ThreadPoolExecutor(len(ranks)) as executor:
        answers = [executor.submit(roll_call, store, "mp", ranks, rank, TIMEOUT) for rank in ranks]  # type: ignore[arg-type]
        assert [answer.result() for answer in answers] == [None] * len(ranks)
    assert sum(store.calls.values()) <= 3 * len(ranks) + 1


class Bound(Device):
    """A device to which the process is bound: its groups are splits of the world's communicator."""

    @property
    def device_id(self) -> torch.device:
        return torch.device("meta")


@pytest.mark.parametrize(("device", "asked"), [(Device(), [0, 2]), (Bound(), [0, 1, 2, 3])])
def test_a_split_that_fails_is_named_with_the_round_of_all_ranks(device: Device, asked: list[int]) -> None:
    called: list[Sequence[int]] = []

    def answer(store: dist.Store, ranks: Sequence[int], rank: int) -> list[int]:
        called.append(ranks)
        return [3]

    def new_group(*_: Any, **__: Any) -> None:
        raise RuntimeError("no communicator")

    with (
        patch("megapar.core.comm.world.roll_call", lambda store, name, ranks, *_: called.append(ranks)),
        patch("megapar.core.comm.world.silent_ranks", answer),
        patch.object(dist, "new_group", new_group),
        pytest.raises(DistributedError) as caught,
    ):
        World(Grid(dp=2, mp=2), 0, device, dist.HashStore(), TIMEOUT, range(4))
    message = str(caught.value)
    assert message.startswith("group dp of ranks [0, 2] failed its first collective; ranks [3] are silent")
    assert message.endswith("no communicator")
    split = "This is round 1, a split of the communicator of all 4 ranks, so another group of this round may have"
    assert (split in message) == (device.device_id is not None)
    assert [sorted(ranks) for ranks in called] == [asked] * 2


def stop_one(rank: int, world_size: int, rendezvous: str, where: str) -> tuple[str, float]:
    """Rank 1's process is stopped during start-up; the message that this rank ends with and the seconds it took."""
    notes = dist.FileStore(f"{rendezvous}.notes", world_size)
    begin = time.perf_counter()

    def stop(*_: object, **__: object) -> None:
        notes.set("process", str(os.getpid()))
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        raise DistributedError("continued by the test")

    with ExitStack() as stack:
        if rank == 1 and where == "roll call":
            stack.enter_context(patch.object(World, "_make_group", stop))
        elif rank == 1:
            stack.enter_context(patch.object(dist, "all_reduce", stop))
        with pytest.raises(DistributedError) as caught:
            start(rank, world_size, rendezvous, Grid(sharding=world_size), timedelta(seconds=1))
    seconds = time.perf_counter() - begin
    notes.set(f"rank {rank} is done", "")
    if rank == 0:
        notes.wait(["rank 2 is done"])
        os.kill(int(notes.get("process")), signal.SIGCONT)
    return str(caught.value), seconds


@pytest.mark.parametrize("where", ["roll call", "collective"])
def test_a_process_that_stops_during_start_up_is_named_by_the_others(where: str) -> None:
    first, _, third = run_ranks(3, stop_one, where, group=False, timeout=30)
    for message, seconds in (first, third):
        assert message.startswith("group ")
        assert "of ranks [0, 1, 2]" in message
        assert "ranks [1] did not answer" in message if where == "roll call" else "ranks [1] are silent" in message
        assert seconds < 12


def wrong_world(rank: int, world_size: int, rendezvous: str) -> str:
    with pytest.raises(DistributedError) as caught:
        start(rank, world_size, rendezvous, Grid(dp=4))
    return str(caught.value)


def test_a_grid_of_another_size_is_refused() -> None:
    assert "the grid has 4 ranks, WORLD_SIZE is 2" in run_ranks(2, wrong_world, group=False)[0]
