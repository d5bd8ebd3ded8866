"""Budgets of a step, counted on fake tensors: launches per layer and waits of the host."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megapar.arguments import parse
from megapar.tools.budget import Budget, Launches, budget
from tests.support.ranks import run_ranks

SMALL = (
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "64"),
    *("--vocab-size", "512", "--micro-batch-size", "2", "--data-path", "mock", "--device", "cpu"),
)
DENSE = ("moe", 1, ("--num-experts", "0"))
ERNIE = ("ernie", 1, ("--attention-dropout", "0", "--hidden-dropout", "0"))
ROUTED = ("moe", 2, ("--num-experts", "4", "--first-k-dense", "0", "--ep-degree", "2"))
# What a layer may launch and how often the host may wait: a change that adds to it should be meant.
BUDGETS = {"dense": (DENSE, 110, 1), "ernie": (ERNIE, 60, 1), "routed": (ROUTED, 270, 3)}


def counted(rank: int, world_size: int, rendezvous: str, model: str, ranks: int, flags: tuple[str, ...]) -> Budget:
    return budget(parse(model, [*SMALL, *flags], {"WORLD_SIZE": str(ranks), "RANK": "0"}))


@pytest.mark.parametrize("name", BUDGETS)
def test_a_layer_stays_in_its_budget(name):
    case, launches, waits = BUDGETS[name]
    found = run_ranks(1, counted, *case, group=False, timeout=120)[0]
    assert 0 < found.layer <= launches
    assert found.waits <= waits
    assert f"{found.layer} kernel launches per layer" in found.describe()


def test_views_and_allocations_are_no_launches():
    launches = Launches()
    with FakeTensorMode(), launches:
        x = torch.empty(4, 8)
        y = x.view(8, 4).t()[1:].detach()
        assert launches.count == 0
        (y + 1).sum()
    assert launches.count == 2
