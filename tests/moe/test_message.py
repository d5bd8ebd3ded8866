import pytest
import torch

from megapar.moe.expert_order import order_by_expert, sort_by_expert, spread_by_expert
from megapar.moe.token_dispatcher import pack, unpack

EXPERTS = torch.tensor([[1, 0], [0, 2], [2, 1], [0, 1]])
KEPT = torch.tensor([[True, True], [True, False], [True, True], [False, False]])


def drawn(dtype, width=5):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weights = torch.rand(4, 2, generator=generator, dtype=torch.float64).to(torch.promote_types(dtype, torch.float32))
    return x, weights.requires_grad_()


def plainly(x, weights, permutation):
    """Rows and weights by indexing."""
    kept = torch.ones_like(permutation.pair, dtype=torch.bool) if permutation.row_kept is None else permutation.row_kept
    rows = x[permutation.pair // 2] * kept[:, None].to(x.dtype)
    return rows, weights.flatten()[permutation.pair] * kept.to(weights.dtype)


PERMUTATIONS = {
    "all pairs": sort_by_expert(EXPERTS, None, 3, 8).order,
    "kept pairs": sort_by_expert(EXPERTS, KEPT, 3, 5).order,
    "capacity": spread_by_expert(EXPERTS, KEPT, 3, 3),
    "one pair": sort_by_expert(EXPERTS, KEPT & (EXPERTS == 0) & (torch.arange(4) == 0)[:, None], 3, 1).order,
    "no pair": sort_by_expert(EXPERTS, torch.zeros_like(KEPT), 3, 0).order,
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PERMUTATIONS)
@pytest.mark.parametrize("room", [0, 2])
def test_packed_and_unpacked_is_indexed(name, dtype, room):
    """Values to the last bit; gradients as by plain indexing."""
    permutation = PERMUTATIONS[name]
    x, weights = drawn(dtype)
    message = pack(x, weights, permutation)
    received = len(permutation.pair)
    rows, row_weights = unpack(message, x.shape[1], weights.dtype, None, received + room, sort_weights=False)
    wanted_rows, wanted_weights = plainly(x, weights, permutation)
    assert torch.equal(rows[:received], wanted_rows)
    assert not rows[received:].any()
    assert torch.equal(row_weights, wanted_weights)

    generator = torch.Generator().manual_seed(1)
    above, beside = (torch.randn(t.shape, generator=generator).to(t.dtype) for t in (rows, row_weights))
    ours = torch.autograd.grad((rows, row_weights), (x, weights), (above, beside))
    theirs = torch.autograd.grad((wanted_rows, wanted_weights), (x, weights), (above[:received], beside))
    for got, want in zip(ours, theirs, strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("sort_weights", [False, True])
def test_unpacking_can_sort(sort_weights):
    """Two sources with two experts here; weights are sorted with them, or stay in the order of arrival."""
    counts = torch.tensor([[[1, 2], [2, 0]]])
    order = order_by_expert(counts, 5, 5).order
    message = torch.arange(20.0).view(5, 4).requires_grad_()
    rows, weights = unpack(message, 3, torch.float32, order, 5, sort_weights=sort_weights)
    assert rows[:, 0].tolist() == [0, 12, 16, 4, 8]
    assert weights.tolist() == ([3, 15, 19, 7, 11] if sort_weights else [3, 7, 11, 15, 19])
    (gradient,) = torch.autograd.grad((rows, weights), message, (rows.detach(), weights.detach()))
    assert torch.equal(gradient, message.detach())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 5, 6, 8])
def test_every_row_begins_at_a_multiple_of_16_bytes(dtype, width):
    """So does every rank's part of a message, whatever the splits."""
    message = pack(*drawn(dtype, width), PERMUTATIONS["all pairs"])
    assert message.is_contiguous()
    assert message.stride(0) * message.element_size() % 16 == 0
    assert message.shape[1] * message.element_size() < (width + 1) * message.element_size() + 4 + 16


@pytest.mark.parametrize("order", [None, order_by_expert(torch.tensor([[[3, 5]]]), 8, 8).order])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_fills_a_row_up_is_nobodys(dtype, order):
    """Whatever arrives there, in the message as in its gradient, changes no bit of anything."""

    def run(fill):
        x, weights = drawn(dtype)
        message = pack(x, weights, PERMUTATIONS["all pairs"])
        used = x.shape[1] + weights.element_size() // x.element_size()
        message = Filled.apply(message, used, fill)
        rows, row_weights = unpack(message, x.shape[1], weights.dtype, order, 8, sort_weights=True)
        (rows.sin().sum() + row_weights.sin().sum()).backward()
        return rows, row_weights, x.grad, weights.grad

    for zeros, nans in zip(run(0.0), run(float("nan")), strict=True):
        assert torch.equal(zeros, nans)


class Filled(torch.autograd.Function):
    """The message, and its gradient, with other numbers behind the columns that are used."""

    @staticmethod
    def forward(ctx, message, used, fill):
        ctx.used, ctx.fill = used, fill
        filled = message.clone()
        filled[:, used:] = fill
        return filled

    @staticmethod
    def backward(ctx, grad):
        filled = grad.clone()
        filled[:, ctx.used :] = ctx.fill
        return filled, None, None
