"""Which streams go before others: those that feed messages, and no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megapar.checkpoints.format.shards import Shard
from megapar.checkpoints.save_load.background import Background
from megapar.core.box import Box
from megapar.core.comm.axis import Axis
from megapar.core.comm.exchange import AllToAll, Unsent
from megapar.core.comm.in_flight import CommContext
from megapar.core.device.accelerators import CudaDevice, NpuDevice
from megapar.core.optimizer.offload import OffloadedOptimizer
from megapar.core.optimizer.update_rule import AdamW
from megapar.core.recompute.saved_inputs import SavedInputs
from megapar.core.sharding.master_shard import MasterShard
from tests.support.lazy import LazyDevice


@pytest.mark.parametrize("kind", [CudaDevice, NpuDevice])
def test_urgent_is_above_the_usual_priority(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch counts, where less is more."""
    monkeypatch.setattr(torch, "Stream", lambda device, *, priority: (device, priority))
    device = object.__new__(kind)  # no such device is needed to say what it asks torch for
    device.torch_device = "its own"
    assert device.new_stream() == ("its own", 0)
    assert device.new_stream(urgent=True) == ("its own", -1)


def test_what_feeds_messages_is_urgent() -> None:
    """The stream of an axis, and the one on which chained collectives stand."""
    with LazyDevice() as device:
        comm = CommContext(device=device, chained=frozenset({"ep"}))
        assert comm.stream(Axis.single("mp")).urgent
        two = Axis("ep", 2, 0, None, (0, 1))
        comm.wait(comm.launch(Unsent(AllToAll(two)), torch.ones(2, 3)))
        assert [stream.urgent for stream in device.streams] == [True, True]


def test_copies_to_and_from_the_host_are_not() -> None:
    """Of kept inputs, of masters and moments, and of saves."""
    with LazyDevice() as device:
        SavedInputs(device, Axis.single("mp"), CommContext(device=device), offload=True)
        OffloadedOptimizer([MasterShard(torch.zeros(4), None, False, True)], device, AdamW((0.9, 0.95), 1e-8, 0.1))
        saving, seen = Background(device), []
        state = {"x": Shard("x", (3,), Box((0,), (3,)), torch.arange(3.0))}
        saving.begin(state, lambda copies: seen.append(copies["x"].tensor.tolist()))
        saving.join()
        assert seen == [[0.0, 1.0, 2.0]]  # the thread waits for its stream, and for nothing else
        assert [stream.urgent for stream in device.streams] == [False] * 5
