"""Steps that go on from stored states and a stored number of steps are those of an optimizer that never stopped."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from megapar.core.device.base import Device
from megapar.core.optimizer.offload import OffloadedOptimizer
from megapar.core.optimizer.optimizer import Optimizer
from megapar.core.optimizer.update_rule import AdamW, Sgd, UpdateRule
from megapar.core.sharding.master_shard import MasterShard

RULES = {
    "adamw": AdamW((0.9, 0.95), 1e-8, 0.1, 0.5),
    "sgd": Sgd(0.9, 0.1, 0.5),
    "sgd without momentum": Sgd(0.0, 0.1),
}


def make(rule: UpdateRule, *, offloaded: bool) -> tuple[list[MasterShard], OffloadedOptimizer | Optimizer]:
    """Return shards of fixed values, of a weight, a bias and a router's of both kinds, and their optimizer."""
    generator = torch.Generator().manual_seed(3)
    shards = [
        MasterShard(torch.randn(9, generator=generator), torch.randn(9, generator=generator), decay, True, router)
        for router, decay in product((False, True), repeat=2)
    ]
    return shards, OffloadedOptimizer(shards, Device(), rule) if offloaded else Optimizer(shards, rule)


@pytest.mark.parametrize("offloaded", [True, False])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_restored_optimizer_goes_on(rule: UpdateRule, offloaded: bool) -> None:
    (shards, whole), (again, restored) = make(rule, offloaded=offloaded), make(rule, offloaded=offloaded)
    for _ in range(3):
        whole.step(1e-2)
    for shard, copy in zip(shards, again, strict=True):
        copy.master.copy_(shard.master)
    for name in rule.states:
        for here, there in zip(restored.state(name), whole.state(name), strict=True):
            here.copy_(there)
    restored.num_steps = whole.num_steps
    assert restored.num_steps == 3
    for optimizer in (whole, restored):
        optimizer.step(1e-2)
    assert all(torch.equal(copy.master, shard.master) for shard, copy in zip(shards, again, strict=True))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_offloaded_steps_are_the_same_bits(rule: UpdateRule) -> None:
    (shards, resident), (others, offloaded) = make(rule, offloaded=False), make(rule, offloaded=True)
    for _ in range(3):
        resident.step(1e-2)
        offloaded.step(1e-2)
    assert all(torch.equal(one.master, two.master) for one, two in zip(shards, others, strict=True))


@pytest.mark.parametrize("offloaded", [True, False])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_step_that_is_not_finite_changes_nothing(rule: UpdateRule, offloaded: bool) -> None:
    shards, optimizer = make(rule, offloaded=offloaded)
    optimizer.step(1e-2, found_inf=torch.tensor(0.0))
    tensors = [*(shard.master for shard in shards), *(state for name in rule.states for state in optimizer.state(name))]
    before = [tensor.clone() for tensor in tensors]
    optimizer.step(1e-2, found_inf=torch.tensor(1.0))
    assert optimizer.num_steps == 1
    assert all(map(torch.equal, tensors, before))


def test_a_device_without_a_fused_kernel_takes_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    (shards, fused), (others, plain) = make(RULES["sgd"], offloaded=False), make(RULES["sgd"], offloaded=False)
    for _ in range(3):
        fused.step(1e-2)
    monkeypatch.setattr("megapar.core.optimizer.update_rule._FUSED_SGD", ())
    for _ in range(3):
        plain.step(1e-2)
    for one, two in zip(shards, others, strict=True):
        torch.testing.assert_close(one.master, two.master)


def test_steps_of_momentum_by_hand() -> None:
    (shards, optimizer), lr = make(RULES["sgd"], offloaded=False), 0.1
    weights, momenta = [shard.master.clone() for shard in shards], [torch.zeros(9) for _ in shards]
    for _ in range(3):
        optimizer.step(lr)
        for shard, weight, momentum in zip(shards, weights, momenta, strict=True):
            assert shard.grad is not None
            momentum.mul_(0.9).add_(shard.grad + 0.1 * shard.decay * weight)
            weight.sub_(lr * (0.5 if shard.router else 1.0) * momentum)
    for shard, weight, momentum, kept in zip(shards, weights, momenta, optimizer.state("momentum_buffer"), strict=True):
        torch.testing.assert_close(shard.master, weight)
        torch.testing.assert_close(kept, momentum)
