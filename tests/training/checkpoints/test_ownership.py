"""All ranks hear who owns the folder of ``--save``, however long it takes the first of them to see."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

from megapar.core.checkpoint import lease as leases
from megapar.core.checkpoint import owner as owners
from megapar.core.comm import json_messages as messages
from megapar.core.comm.world import World
from megapar.core.device.base import Device
from megapar.core.grid import Grid
from megapar.health.stop.process import Process
from megapar.training.checkpoints import ownership
from tests.core.checkpoint.owners import claim
from tests.support.ranks import run_ranks

TIMEOUT = 1.0


def take(rank: int, world_size: int, rendezvous: str, root: str) -> bool:
    """Whether this rank owns a folder, whose owner is silent for longer than a collective may take."""
    world = World.start(Grid(dp=world_size), Device(), timedelta(seconds=TIMEOUT), f"file://{rendezvous}")
    group = world.axis("world").group
    assert group is not None
    with patch.object(owners, "PATIENCE_SECONDS", 3 * TIMEOUT):
        owner = ownership.take(root, None, world, lambda value: messages.broadcast(value, group))
    world.close()
    return owner is not None


def test_ranks_wait_for_longer_than_a_collective_may_take(tmp_path: Path) -> None:
    silent = replace(claim(), process=replace(Process.here(), host="another", boot="another"), epoch=1)
    assert leases.create(tmp_path, silent) is not None
    assert run_ranks(2, take, str(tmp_path), group=False) == [True, False]
    assert leases.newest(tmp_path) == 2
