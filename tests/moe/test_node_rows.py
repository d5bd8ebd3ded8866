"""Rows of a token and fields: what they hold in each dtype, their gradients, and that they are whole 16 bytes."""

from __future__ import annotations

import pytest
import torch

from megapar.moe.dispatch_bytes import node_row_bytes
from megapar.moe.expert_order import kept_rows
from megapar.moe.node_dispatcher import NodeShape
from megapar.moe.node_rows import (
    EMPTY,
    NodeMessage,
    NodeRoute,
    arrive,
    build,
    experts_of,
    sum_rows,
    weights_of,
    write,
)  # fmt: skip

DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def wide(dtype):
    return torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize("topk", [1, 3, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_holds_the_bits_of_its_token_and_its_fields(dtype, topk):
    x, weights = torch.randn(5, 6).to(dtype), torch.randn(5, topk, dtype=wide(dtype))
    experts = torch.randint(0, 30000, (5, topk)).to(torch.int16)
    experts[2] = EMPTY
    message = write(x, torch.tensor([4, 0, 1, 2, 2]), weights, experts)
    assert message.shape[1] * message.itemsize == node_row_bytes(6, topk, weights.itemsize, x.itemsize)
    assert message.shape[1] * message.itemsize % 16 == 0
    assert torch.equal(message[:, :6], x[[4, 0, 1, 2, 2]])
    assert torch.equal(weights_of(message, topk), weights)
    assert torch.equal(experts_of(message, topk), experts.long())


@pytest.mark.parametrize("topk", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_summed_with_their_fields(dtype, topk):
    """Over rows of one token, in fp32: as if each part were summed alone."""
    shape = NodeShape(8, 2, 1, 0)
    experts = torch.randint(0, 8, (7, 8)).argsort(1)[:, :topk]
    order = shape.outgoing(experts, None).order
    x, weights = torch.randn(7 * topk, 6).to(dtype), torch.randn(7 * topk, topk, dtype=wide(dtype))
    message = sum_rows(write(x, None, weights, None), order)
    rows, kept = order.row, order.pair_kept
    for got, given in ((message[:, :6], x), (weights_of(message, topk), weights)):
        want = (given[rows].to(wide(dtype)) * kept[..., None]).sum(1)
        assert torch.allclose(got.to(want.dtype), want, rtol=2e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


def test_from_tokens_to_pairs_and_back():
    """On one node of one rank a pair arrives as its token and weight, and gradients are those of an index."""
    experts = torch.tensor([[2, 0], [1, 3], [3, 0], [1, 2]])
    kept = torch.tensor([[True, True], [True, False], [False, False], [True, True]])
    outgoing = NodeShape(4, 1, 1, 0).outgoing(experts, kept)
    assert outgoing.table.tolist() == [3, 3, 1, 2, 2, 0]  # tokens to the node and the rank, pairs of each expert
    order = kept_rows(outgoing.order, 3)
    fields = torch.tensor([[0, 2], [1, EMPTY], [1, 2]]).to(torch.int16)
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    message = build(x, weights, NodeMessage(order, fields, outgoing.choices, 6))
    route = NodeRoute(0, 4, 1, 2, 3)
    rows, gates = arrive(message, route.arrive(message, 0, 5), 6, 7)
    token, choice = torch.tensor([0, 1, 3, 0, 3]), torch.tensor([1, 0, 0, 0, 1])
    assert torch.equal(rows[:5], x[token])
    assert bool((rows[5:] == 0).all())
    assert torch.equal(gates, weights[token, choice])
    grad, gate_grad = torch.randn_like(rows), torch.randn_like(gates)
    got = torch.autograd.grad((rows, gates), (x, weights), (grad, gate_grad))
    want = torch.autograd.grad((x[token], weights[token, choice]), (x, weights), (grad[:5], gate_grad))
    assert all(torch.allclose(a, b, rtol=0, atol=1e-14) for a, b in zip(got, want, strict=True))
