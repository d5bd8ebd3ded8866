"""Steps that go on from stored moments and a stored number of steps are those of an optimizer that never stopped."""

from __future__ import annotations

import pytest
import torch

from megapar.core.device.base import Device
from megapar.core.optimizer.adamw import MOMENTS, AdamW, Optimizer
from megapar.core.optimizer.offload import OffloadedOptimizer
from megapar.core.sharding.master_shard import MasterShard

SETTINGS = AdamW((0.9, 0.95), 1e-8, 0.1)


def make(*, offloaded: bool) -> tuple[MasterShard, OffloadedOptimizer | Optimizer]:
    """Return a shard of fixed values and its optimizer."""
    generator = torch.Generator().manual_seed(3)
    shard = MasterShard(torch.randn(9, generator=generator), torch.randn(9, generator=generator), True, True)
    return shard, OffloadedOptimizer([shard], Device(), SETTINGS) if offloaded else Optimizer([shard], SETTINGS)


@pytest.mark.parametrize("offloaded", [True, False])
def test_a_restored_optimizer_goes_on(offloaded: bool) -> None:
    (shard, whole), (again, restored) = make(offloaded=offloaded), make(offloaded=offloaded)
    for _ in range(3):
        whole.step(1e-2)
    again.master.copy_(shard.master)
    for name in MOMENTS:
        for here, there in zip(restored.moments(name), whole.moments(name), strict=True):
            here.copy_(there)
    restored.num_steps = whole.num_steps
    assert restored.num_steps == 3
    for optimizer in (whole, restored):
        optimizer.step(1e-2)
    assert torch.equal(again.master, shard.master)
