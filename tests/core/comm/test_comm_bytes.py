"""The accounts of communication that the axes of a world share."""

from __future__ import annotations

from datetime import timedelta

import pytest

from megapar.core.comm.accounts import CommBytes
from megapar.core.comm.world import World
from megapar.core.device.base import Device
from megapar.core.grid import Grid


def test_nothing_is_added_inside_uncounted_which_may_be_nested() -> None:
    sent = CommBytes()
    sent.add("mp", "all_reduce", 7.6)
    with sent.uncounted():
        with pytest.raises(RuntimeError), sent.uncounted():
            raise RuntimeError
        sent.add("mp", "all_reduce", 100)
    sent.add("ep", "all_to_all", 2)
    assert sent.take() == {"ep/all_to_all": 2, "mp/all_reduce": 8}
    assert sent.take() == {}


def test_all_axes_of_a_world_have_its_accounts() -> None:
    world = World(Grid(), 0, Device(), None, timedelta(seconds=1))
    axes = world.axes()
    assert all(axis.sent_bytes is world.sent_bytes and axis.meter is world.meter for axis in axes)
    with world.uncounted(), world.axis("mp").waiting("all_reduce"):
        world.axis("mp").count("all_reduce", 8)
    assert (dict(world.sent_bytes), world.meter.take().seconds(), world.meter.on) == ({}, {}, True)
    assert [str(launched) for launched in world.recorder.recent] == ["all_reduce 1 on mp"]
    world.axis("mp").count("all_reduce", 8)
    assert world.sent_bytes.take() == {"mp/all_reduce": 8}
