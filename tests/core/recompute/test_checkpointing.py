"""Recomputed units by themselves: what they keep, what they run again, and what they leave behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megapar.core.comm import collectives
from megapar.core.comm.accounts import CommBytes
from megapar.core.comm.async_pairs import start, wait
from megapar.core.comm.axis import Axis
from megapar.core.comm.exchange import Reduce
from megapar.core.comm.in_flight import CommContext
from megapar.core.recompute.checkpointing import Recompute
from megapar.core.recompute.choice import FirstLayers, Interval, LayerSpan
from tests.support.ranks import run_ranks


def test_spans() -> None:
    """The drawings of uniform and block, over five layers."""
    assert Interval(2).spans(5) == [LayerSpan(0, 2, True), LayerSpan(2, 4, True), LayerSpan(4, 5, True)]
    assert Interval(9).spans(5) == [LayerSpan(0, 5, True)]
    assert FirstLayers(2).spans(4) == [
        LayerSpan(0, 1, True),
        LayerSpan(1, 2, True),
        LayerSpan(2, 3, False),
        LayerSpan(3, 4, False),
    ]


def test_a_unit_runs_again_and_keeps_its_inputs_only() -> None:
    """Tensors of any kind are inputs, with and without gradient, and what is no tensor passes."""
    calls: list[str] = []
    saved: list[int] = []

    def unit(x: Tensor, scale: Tensor, indices: Tensor, name: str) -> tuple[Tensor, dict[str, Tensor]]:
        calls.append(name)
        y = (x * scale).exp()
        return y[indices].sin(), {"total": y.sum()}

    x, scale, indices = torch.randn(4, 3, requires_grad=True), torch.tensor(2.0), torch.tensor([2, 0])

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.data_ptr())
        return tensor

    forward = Recompute(Interval(1), CommContext(), CommBytes()).begin()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y, extra = forward.run(unit, x, scale, indices, "a")
    (y.sum() + extra["total"]).backward()
    got = x.grad
    x.grad = None
    z, extra = unit(x, scale, indices, "b")
    (z.sum() + extra["total"]).backward()
    assert calls == ["a", "a", "b"]
    assert saved == [tensor.data_ptr() for tensor in (x, scale, indices)]
    assert got is not None
    assert x.grad is not None
    assert torch.equal(got, x.grad)


def sends(rank: int, world_size: int) -> dict[str, Any]:
    """A unit whose last needed tensor lies between a launch and its wait."""
    sent_bytes = CommBytes()
    mp = Axis("mp", world_size, rank, dist.group.WORLD, tuple(range(world_size)), sent_bytes)
    comm = CommContext()

    def unit(x: Tensor) -> Tensor:
        flying = start(Reduce(mp), x * x, comm)
        y = x.sin()
        return wait(*flying) + y

    x = torch.full((3,), 1.0 + rank, requires_grad=True)
    y = Recompute(Interval(1), comm, sent_bytes).begin().run(unit, x)
    sent = dict(sent_bytes)
    y.sum().backward()
    assert x.grad is not None
    collectives.all_reduce(torch.zeros(3), mp)
    return {
        "value": y.tolist(),
        "grad": x.grad.tolist(),
        "launched": dict(comm.launched),
        "open": comm.in_flight,
        "sent": sent,
        "after": dict(sent_bytes),
    }


def test_what_a_recomputation_launches() -> None:
    """It is launched on every rank, waited for even where the recomputation ends before, and counted once."""
    import math

    for rank, got in enumerate(run_ranks(2, sends, backend="late")):
        own = 1.0 + rank
        assert got["value"] == pytest.approx([5.0 + math.sin(own)] * 3)
        assert got["grad"] == pytest.approx([2 * own + math.cos(own)] * 3)
        assert got["launched"] == {"all_reduce": 2}
        assert got["open"] == []
        once = got["sent"]["mp", "all_reduce"]
        assert once > 0
        assert got["after"] == {("mp", "all_reduce"): 2 * once}  # the unit's, and one outside


def test_without_gradients_nothing_is_kept() -> None:
    """A module in a unit under no_grad runs once."""
    linear = nn.Linear(3, 3)
    with torch.no_grad():
        y = Recompute(Interval(1), CommContext(), CommBytes()).begin().run(linear, torch.ones(2, 3))
    assert y.grad_fn is None
