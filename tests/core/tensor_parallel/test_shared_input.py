"""Products of an input that ranks share: its gradient is summed without being rounded before."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megapar.core.comm.async_pairs import start
from megapar.core.comm.axis import Axis
from megapar.core.comm.exchange import AllGather
from megapar.core.comm.in_flight import CommContext
from megapar.core.tensor_parallel.shared_input import SharedComm, shared_products
from tests.support.ranks import run_ranks

BATCH, LENGTH, PARTS, REST = 2, 6, (5, 7), 3


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def sums(rank, size, sp, early):
    """The gradient of x, and what it is by sums of fp32 products that are rounded once."""
    mp, comm = Axis("mp", size, rank, dist.group.WORLD, tuple(range(size))), CommContext()
    x, own = drawn(BATCH, LENGTH, sum(PARTS) + REST, seed=0), slice(None)
    if sp:
        own = slice(rank * LENGTH // size, (rank + 1) * LENGTH // size)
    weights = [[drawn(4, part, seed=10 * part + other) for part in PARTS] for other in range(size)]
    dys = [[drawn(BATCH, LENGTH, 4, seed=part + 100 * other) for part in PARTS] for other in range(size)]
    drests = [drawn(BATCH, LENGTH, REST, seed=7 + other).float() * 1.01 for other in range(size)]
    mine = x[:, own].clone().requires_grad_()
    tensors = [weight.requires_grad_() for weight in weights[rank]]
    token, ticket = start(AllGather(mp), mine, comm) if early else (mine, None)
    shared = shared_products(token, tensors, SharedComm(mp, sp, comm, (None, None), ticket))
    torch.testing.assert_close(shared.whole, x, rtol=0, atol=0)
    assert shared.rest.dtype == torch.float32
    assert not shared.whole.requires_grad
    torch.autograd.backward((*shared.products, shared.rest), (*dys[rank], drests[rank]))
    comm.check_settled()
    partial = [
        torch.cat([*(dy.float() @ w.float() for dy, w in zip(dys[k], weights[k], strict=True)), drests[k]], -1)
        for k in range(size)
    ]
    for weight, dy, part in zip(tensors, dys[rank], x.split((*PARTS, REST), -1), strict=False):
        torch.testing.assert_close(weight.grad, dy.flatten(0, 1).t() @ part.flatten(0, 1), rtol=0, atol=0)
    return mine.grad, sum(partial[1:], partial[0]).to(torch.bfloat16)[:, own]


@pytest.mark.parametrize(("sp", "early"), [(False, False), (True, False), (True, True)])
def test_gradients_are_rounded_once(sp, early):
    for found, want in run_ranks(2, sums, sp, early):
        torch.testing.assert_close(found, want.detach(), rtol=0, atol=0)
