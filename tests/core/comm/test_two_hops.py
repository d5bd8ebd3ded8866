"""Two all-to-alls as one exchange: where rows arrive, which hop stays in flight, and the way back."""

from __future__ import annotations

import pytest
import torch

from megapar.core.comm.async_pairs import start, wait
from megapar.core.comm.exchange import AllToAll, Unsent
from megapar.core.comm.in_flight import CommContext
from megapar.core.comm.two_hops import TwoHops
from megapar.core.device.base import Device
from tests.support import late
from tests.support.nodes import axis_by_node
from tests.support.ranks import run_ranks

WIDTH = 3


def crossing(rank, world_size, node):
    """One row to each rank, by way of its node: (as by one all-to-all, in flight there and back, zeros if unsent)."""
    ep = axis_by_node(rank, world_size, node)
    between, within = ep.nodes.between, ep.nodes.within
    sizes, comm = (between.size, within.size), CommContext()

    def relay(rows):  # by (node, rank of the node) -> by (rank of the node, node)
        return rows.unflatten(0, sizes).transpose(0, 1).flatten(0, 1).contiguous()

    def back(rows):
        return rows.unflatten(0, sizes[::-1]).transpose(0, 1).flatten(0, 1).contiguous()

    first = AllToAll(between, (within.size,) * between.size, (within.size,) * between.size)
    second = AllToAll(within, (between.size,) * within.size, (between.size,) * within.size)
    way = TwoHops(ep, first, second, relay, back, between.name, Device())
    rows = (10.0 * rank + torch.arange(world_size))[:, None].expand(-1, WIDTH)
    x = rows.clone().requires_grad_()
    token, ticket = start(way, x * 1, comm)
    there = [name.split(" ")[0] for name in late.in_flight()]
    y = wait(token, ticket)
    # From the ranks of the node first, and of each of them from every node.
    source = torch.arange(world_size).unflatten(0, sizes).T.flatten()
    arrived = torch.equal(y.detach(), (10.0 * source + rank)[:, None].expand(-1, WIDTH))
    y.backward(y.detach() + 0.5)
    returned = torch.equal(x.grad, rows + 0.5)
    token, ticket = start(Unsent(way), x.detach(), comm)
    unsent = wait(token, ticket)
    comm.check_settled()
    assert late.in_flight() == []
    return arrived, returned, len(there), bool((unsent == 0).all()) and unsent.shape == y.shape


@pytest.mark.parametrize("backend", ["gloo", "late"])
@pytest.mark.parametrize("node", [1, 2])
def test_rows_arrive_and_return(node, backend):
    in_flight = 1 if backend == "late" else 0  # the hop between nodes
    for result in run_ranks(4, crossing, node, backend=backend):
        assert result == (True, True, in_flight, True)
