"""Every collective notes what this rank sends."""

from __future__ import annotations

import os
from datetime import timedelta
from unittest.mock import patch

import torch

from megapar.core.comm import collectives
from megapar.core.comm.world import World
from megapar.core.device.base import Device
from megapar.core.grid import Grid
from tests.support.ranks import run_ranks


def send_everything(rank: int, world_size: int, rendezvous: str) -> tuple[dict[tuple[str, str], int], list[float]]:
    with patch.dict(os.environ, {"RANK": str(rank), "WORLD_SIZE": str(world_size)}):
        world = World.start(Grid(sharding=world_size), Device(), timedelta(seconds=30), f"file://{rendezvous}")
    axis = world.axis("sharding")
    own = torch.full((6,), float(rank + 1))
    whole, piece, received = torch.empty(18), torch.empty(2), torch.empty(3)
    collectives.all_gather(whole, own, axis)
    collectives.reduce_scatter(piece, own, axis)
    collectives.all_reduce(own, axis)
    send = [[1, 2, 3], [1, 0, 0], [1, 1, 0]][rank]
    receive = [[1, 1, 1], [2, 0, 1], [3, 0, 0]][rank]
    collectives.all_to_all(torch.empty(sum(receive), 5), torch.ones(sum(send), 5), axis, receive, send)
    collectives.all_to_all(received, torch.arange(3.0), axis)
    values = [whole.sum().item(), piece.sum().item(), own.sum().item()]
    world.close()
    return dict(world.sent_bytes), values


def test_bytes_are_those_that_leave_the_rank() -> None:
    results = run_ranks(3, send_everything, group=False)
    for rank, (sent, values) in enumerate(results):
        assert values == [36.0, 12.0, 36.0]
        assert sent["sharding", "all_gather"] == 18 * 4 * 2 // 3
        assert sent["sharding", "reduce_scatter"] == 6 * 4 * 2 // 3
        assert sent["sharding", "all_reduce"] == 2 * 6 * 4 * 2 // 3
        assert sent["sharding", "all_to_all"] == [5, 1, 2][rank] * 5 * 4 + 2 * 4
