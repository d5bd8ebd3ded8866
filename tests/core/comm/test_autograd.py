"""Each pair is conjugate: the backward of one is the forward of the other, and nothing happens at size 1."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megapar.core.comm import autograd as collectives
from megapar.core.comm.axis import Axis
from megapar.core.comm.exchange import (
    AllGather,
    AllToAll,
    Copy,
    OwnPiece,
    Reduce,
    ReduceScatter,
    SendReceive,
    own_piece,
)
from tests.support.ranks import run_ranks

CONJUGATES = {
    "copy": "reduce",
    "reduce": "copy",
    "all_gather_replicated": "own piece",
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
}
WITH_DIM = {"all_gather_replicated", "all_gather", "reduce_scatter"}


def call(name, x, axis, dim):
    return getattr(collectives, name)(x, axis, *((dim,) if name in WITH_DIM else ()))


@pytest.mark.parametrize("name", CONJUGATES)
def test_size_1_returns_its_input(name):
    x = torch.randn(2, 4, requires_grad=True)
    assert call(name, x, Axis.single("mp"), 1) is x


def test_the_conjugate_of_the_conjugate_is_the_exchange_itself():
    mp = Axis("mp", 2, 0, None, (0, 1))
    one_way = AllToAll(mp, (1, 2), (3, 4)), SendReceive(mp, 1, None)
    pairs = Copy(mp), Reduce(mp), AllGather(mp), AllGather(mp, alike=True), ReduceScatter(mp), OwnPiece(mp)
    assert all(exchange.conjugate().conjugate() == exchange != exchange.conjugate() for exchange in (*one_way, *pairs))


def world(rank, world_size):
    return Axis("mp", world_size, rank, dist.group.WORLD, tuple(range(world_size)))


def on_ranks(rank, world_size):
    """Every function along every dim: (forward is what it should be, backward is the conjugate's forward)."""
    axis = world(rank, world_size)
    inputs = [torch.randn(4, 6, 2, generator=torch.Generator().manual_seed(r)).double() for r in range(world_size)]
    wrong = []
    for name, conjugate in CONJUGATES.items():
        for dim in range(3):
            x = inputs[rank].clone().requires_grad_()
            y = call(name, x, axis, dim)
            if not torch.equal(y, expected(name, inputs, rank, dim)):
                wrong.append(f"{name} dim {dim}: forward")
            grads = [(r + 2.0) * torch.arange(y.numel()).view(y.shape).double() for r in range(world_size)]
            y.backward(grads[rank])
            if not torch.equal(x.grad, expected(conjugate, grads, rank, dim)):
                wrong.append(f"{name} dim {dim}: backward")
            if not torch.equal(x, inputs[rank]):
                wrong.append(f"{name} dim {dim}: the input was changed")
    return wrong


def expected(name, inputs, rank, dim):
    """The forward of ``name`` computed from all ranks' inputs."""
    size = len(inputs)
    if name == "copy":
        return inputs[rank]
    if name == "reduce":
        return sum(inputs)
    if name in ("all_gather_replicated", "all_gather"):
        return torch.cat(inputs, dim)
    whole = inputs[rank] if name == "own piece" else sum(inputs)
    return whole.chunk(size, dim)[rank]


def test_pairs_are_conjugate_on_two_ranks():
    assert run_ranks(2, on_ranks) == [[], []]


def refused(rank, world_size):
    messages = []
    for cut in (own_piece, collectives.reduce_scatter):
        try:
            cut(torch.zeros(2, 3), world(rank, world_size), 1)
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_uneven_pieces_are_refused():
    message = "dim 1 of (2, 3) is not divisible by the 2 ranks of mp"
    assert run_ranks(2, refused) == [[message] * 2] * 2
