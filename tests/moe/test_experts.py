"""Experts one by one and all at once, and how the gradients of many small pieces come together."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megapar.core.tensor_parallel.weight_gradients import WeightGradients
from megapar.moe.expert_order import weigh
from megapar.moe.experts import Experts

COUNTS = (3, 0, 4)


def make(dtype: torch.dtype, *, gated: bool, bias: bool) -> Experts:
    experts = Experts(8, 6, len(COUNTS), gated=gated, add_bias=bias, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, generator=generator)
    return experts


@pytest.mark.parametrize(("gated", "bias"), [(True, False), (True, True), (False, True)])
def test_weights_multiply_the_outputs(gated: bool, bias: bool) -> None:
    experts, x = make(torch.float64, gated=gated, bias=bias), rows(torch.float64)
    weights = torch.rand(sum(COUNTS), dtype=torch.float64).requires_grad_()
    leaves = [x, weights, *experts.parameters()]
    plain = weigh(experts.compute(x, torch.tensor(COUNTS)), weights)
    inside = experts.compute(x, torch.tensor(COUNTS), None, weights)
    torch.testing.assert_close(inside, plain, rtol=1e-13, atol=1e-13)
    gradients = [torch.autograd.grad(y.square().sum(), leaves) for y in (inside, plain)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def rows(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(sum(COUNTS), 8, generator=torch.Generator().manual_seed(2)).to(dtype).requires_grad_()


def one_by_one(experts: Experts, x: torch.Tensor, length: int, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Each expert's rows in pieces of at most ``length``."""
    apart, start, parts = experts.per_expert(), 0, []
    for e, own in enumerate(x.split(COUNTS)):
        for piece in own.split(length) if len(own) else ():
            parts.append(apart[e](piece, None if weights is None else weights[start : start + len(piece)]))
            start += len(piece)
    return torch.cat(parts)


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("selective", [False, True])
@pytest.mark.parametrize(("gated", "bias"), [(True, False), (False, True)])
def test_pieces_of_one_expert_give_what_all_experts_give(
    gated: bool, bias: bool, selective: bool, weighed: bool
) -> None:
    weights = torch.rand(sum(COUNTS), dtype=torch.float64).requires_grad_() if weighed else None
    experts, x = make(torch.float64, gated=gated, bias=bias), rows(torch.float64)
    experts.selective = selective
    fired: list[nn.Parameter] = []
    for parameter in experts.parameters():
        parameter.register_post_accumulate_grad_hook(fired.append)
    leaves = [x, *experts.parameters(), *([] if weights is None else [weights])]
    want = experts(lambda own, *inputs: own.compute(*inputs), x, torch.tensor(COUNTS), None, weights)
    wanted = torch.autograd.grad(want.square().sum(), leaves)
    got = experts(one_by_one, x, 2, weights)
    got.square().sum().backward()
    assert torch.allclose(got, want, rtol=0, atol=1e-12)
    assert len(fired) == len(list(experts.parameters()))
    for leaf, grad in zip(leaves, wanted, strict=True):
        assert leaf.grad is not None
        assert torch.allclose(leaf.grad, grad, rtol=0, atol=1e-11)


def test_many_pieces_are_summed_in_fp32() -> None:
    """One row per piece: in bf16 the weights' gradients are within a rounding of those of all rows at once."""
    exact, errors = make(torch.float64, gated=True, bias=False), []
    for parameter in exact.parameters():
        parameter.data.copy_(parameter.data.bfloat16())
    x = rows(torch.bfloat16)
    one_by_one(exact, x.detach().double(), 9).sum().backward()
    for length in (9, 1):
        experts = make(torch.bfloat16, gated=True, bias=False)
        one_by_one(experts, x, length).sum().backward()
        pairs = zip(experts.parameters(), exact.parameters(), strict=True)
        errors.append(sum(float((a.grad.double() - b.grad).norm() / b.grad.norm()) for a, b in pairs))  # type: ignore[union-attr]
    assert errors[1] < 1.2 * errors[0]


def test_a_split_backward_makes_each_weight_once() -> None:
    experts, x = make(torch.float64, gated=True, bias=False), rows(torch.float64)
    wanted = torch.autograd.grad(one_by_one(experts, x, 2).square().sum(), list(experts.parameters()))
    experts.weight_gradients = WeightGradients()
    fired: list[nn.Parameter] = []
    for parameter in experts.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: fired.append(p) if p.grad is not None else None)
    with experts.weight_gradients.keep(0):
        one_by_one(experts, x, 2).square().sum().backward()
    assert not fired
    experts.weight_gradients.run(0)
    assert len(fired) == 2
    for parameter, grad in zip(experts.parameters(), wanted, strict=True):
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad, grad, rtol=0, atol=1e-11)
