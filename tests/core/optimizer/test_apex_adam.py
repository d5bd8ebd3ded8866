"""AdamW by apex's FusedAdam takes the steps of torch's, by a stand-in that keeps its state as the real one does."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

from megapar.core.device.base import Device
from megapar.core.optimizer.offload import OffloadedOptimizer
from megapar.core.optimizer.optimizer import Optimizer
from megapar.core.optimizer.update_rule import AdamW, ApexAdamW
from megapar.core.sharding.master_shard import MasterShard
from tests.support import apex

BETAS, EPS, DECAY, ROUTER = (0.9, 0.95), 1e-8, 0.1, 0.5


def make(kind: type[AdamW], *, offloaded: bool = False) -> tuple[list[MasterShard], Optimizer | OffloadedOptimizer]:
    generator = torch.Generator().manual_seed(3)
    kinds = [*product((False, True), repeat=2), (False, True)]  # one learning rate and decay of two shards
    shards = [
        MasterShard(torch.randn(9, generator=generator), torch.randn(9, generator=generator), decay, True, router)
        for router, decay in kinds
    ]
    rule = kind(BETAS, EPS, DECAY, ROUTER)
    return shards, OffloadedOptimizer(shards, Device(), rule) if offloaded else Optimizer(shards, rule)


@pytest.mark.parametrize("offloaded", [False, True])
def test_its_steps_are_torchs_also_around_skipped_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offloaded: bool
) -> None:
    calls = apex.installed(tmp_path, monkeypatch)
    (shards, theirs), (others, ours) = make(AdamW), make(ApexAdamW, offloaded=offloaded)
    for number, skipped in enumerate([0, 1, 1, 0, 0, 1, 0]):
        for shard, other in zip(shards, others, strict=True):
            shard.grad = torch.randn(9)
            other.grad = shard.grad.clone()
        for optimizer in (theirs, ours):
            optimizer.step(1e-2 * (number + 1), torch.tensor(float(skipped)), torch.tensor(1.5))
        assert ours.num_steps == theirs.num_steps
        for shard, other in zip(shards, others, strict=True):
            torch.testing.assert_close(other.master, shard.master)
    assert ours.num_steps == 4
    for name in ("exp_avg", "exp_avg_sq"):
        for want, got in zip(theirs.state(name), ours.state(name), strict=True):
            torch.testing.assert_close(got, want)
    assert len(calls) == 7 * (5 if offloaded else 4)


@pytest.mark.parametrize(("first", "second"), [(AdamW, ApexAdamW), (ApexAdamW, AdamW)])
def test_states_of_one_are_those_of_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: type[AdamW], second: type[AdamW]
) -> None:
    apex.installed(tmp_path, monkeypatch)
    (shards, before), (others, after), (wanted, whole) = make(first), make(second), make(AdamW)
    for _ in range(3):
        before.step(1e-2)
        whole.step(1e-2)
    for shard, other in zip(shards, others, strict=True):
        other.master.copy_(shard.master)
    for name in ("exp_avg", "exp_avg_sq"):
        for source, target in zip(before.state(name), after.state(name), strict=True):
            target.copy_(source)
    after.num_steps = before.num_steps
    for optimizer in (after, whole):
        optimizer.step(1e-2)
    assert after.num_steps == 4
    for want, other in zip(wanted, others, strict=True):
        torch.testing.assert_close(other.master, want.master)
