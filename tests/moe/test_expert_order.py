import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megapar.core.comm.axis import Axis
from megapar.core.comm.in_flight import CommContext
from megapar.moe.dispatcher import RoutedPairs
from megapar.moe.expert_order import permute, sort_by_expert, spread_by_expert, unpermute, weigh
from megapar.moe.stats import count_pairs
from megapar.moe.token_dispatcher import TokenDispatcher

WIDTH = 4


@st.composite
def sendings(draw):
    """Experts of T tokens, what is kept of them, and how many rows more than that are made."""
    num_experts = draw(st.integers(1, 5))
    topk = draw(st.integers(1, num_experts))
    tokens = draw(st.integers(0, 9))
    experts = [draw(st.permutations(range(num_experts)))[:topk] for _ in range(tokens)]
    size = tokens * topk
    kept = draw(st.none() | st.lists(st.booleans(), min_size=size, max_size=size))
    num_kept = size if kept is None else sum(kept)
    return (
        torch.tensor(experts, dtype=torch.long).view(tokens, topk),
        None if kept is None else torch.tensor(kept, dtype=torch.bool).view(tokens, topk),
        num_experts,
        draw(st.integers(num_kept, size)),
        num_kept,
    )


def tokens_like(experts):
    return torch.randn(len(experts), WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def ordered(experts, kept, num_experts, rows):
    """The order of the kept pairs in ``rows`` rows, and the rows of each expert."""
    num_kept = experts.numel() if kept is None else int(kept.sum())
    order, counts, ends = sort_by_expert(experts, kept, num_experts, rows, fill=rows > num_kept)
    assert ends is None  # the reference leaves them to the product
    return order, counts


@settings(max_examples=150, deadline=None)
@given(sending=sendings())
def test_rows_are_sorted_by_expert_and_complete(sending):
    experts, kept, num_experts, rows, num_kept = sending
    permutation, counts = ordered(experts, kept, num_experts, rows)
    assert int(counts.sum()) == rows
    expert_of_row = torch.repeat_interleave(counts).tolist()
    real = permutation.pair[:num_kept]
    assert experts.flatten()[real].tolist() == expert_of_row[:num_kept]
    mask = torch.ones_like(experts, dtype=torch.bool) if kept is None else kept
    assert sorted(real.tolist()) == mask.flatten().nonzero().flatten().tolist()
    by_expert_then_token = sorted(real.tolist(), key=lambda pair: (int(experts.flatten()[pair]), pair))
    assert real.tolist() == by_expert_then_token


@settings(max_examples=150, deadline=None)
@given(sending=sendings(), spare=st.integers(0, 2))
def test_every_expert_gets_its_capacity_of_rows(sending, spare):
    experts, kept, num_experts, _, num_kept = sending
    counts = count_pairs(experts, kept, num_experts).sum(0)
    capacity = int(counts.max()) + spare
    permutation = spread_by_expert(experts, kept, num_experts, capacity)
    assert permutation.row_kept.view(num_experts, capacity).sum(1).tolist() == counts.tolist()
    real = permutation.pair[permutation.row_kept]
    sorted_permutation = sort_by_expert(experts, kept, num_experts, num_kept).order
    assert torch.equal(real, sorted_permutation.pair)
    if len(experts):
        x = tokens_like(experts)
        rows = permute(x, permutation)
        assert not rows[~permutation.row_kept].any()
        times = torch.full((len(x), 1), experts.shape[1]) if kept is None else kept.sum(1, keepdim=True)
        torch.testing.assert_close(unpermute(rows, permutation), x * times)


@settings(max_examples=100, deadline=None)
@given(sending=sendings())
def test_there_and_back_multiplies_by_the_kept_choices(sending):
    experts, kept, num_experts, rows, num_kept = sending
    permutation, _ = ordered(experts, kept, num_experts, rows)
    x = tokens_like(experts)
    out = permute(x, permutation)
    assert out.shape == (rows, WIDTH)
    assert not out[num_kept:].any()
    times = torch.full((len(x), 1), experts.shape[1]) if kept is None else kept.sum(1, keepdim=True)
    torch.testing.assert_close(unpermute(out, permutation), x * times)


@settings(max_examples=60, deadline=None)
@given(sending=sendings())
def test_permute_and_unpermute_are_adjoint_and_so_are_their_gradients(sending):
    experts, kept, num_experts, rows, _ = sending
    permutation, _ = ordered(experts, kept, num_experts, rows)
    x = tokens_like(experts).requires_grad_()
    other = torch.randn(rows, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    other.requires_grad_()
    there, back = permute(x, permutation), unpermute(other, permutation)
    torch.testing.assert_close((there * other).sum(), (x * back).sum())
    torch.testing.assert_close(torch.autograd.grad(there, x, other.detach())[0], back.detach())
    torch.testing.assert_close(torch.autograd.grad(back, other, x.detach())[0], there.detach())


def local(num_experts):
    """A dispatcher with all experts on this rank."""
    return TokenDispatcher(num_experts, Axis.single("ep"), Axis.single("emp"), False, False, CommContext())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_combine_adds_up_in_fp32(dtype):
    """1 + 255 small numbers: adding in bf16 or fp16 one by one would lose them."""
    topk = 256
    plan = local(topk).plan(RoutedPairs(torch.arange(topk)[None], None), topk, True)
    _, weights = local(topk).dispatch(torch.ones(1, WIDTH, dtype=dtype), torch.ones(1, topk), plan)
    rows = torch.full((topk, WIDTH), 2.0**-12, dtype=dtype)
    rows[0] = 1.0
    torch.testing.assert_close(
        unpermute(weigh(rows, weights), plan.send_order).float(),
        torch.full((1, WIDTH), 1 + 255 * 2.0**-12),
        rtol=4e-3,
        atol=0,
    )


def test_weights_travel_with_their_rows():
    experts = torch.tensor([[2, 0], [0, 1], [2, 1]])
    weights = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.0]], requires_grad=True)
    kept = torch.tensor([[True, True], [True, True], [True, False]])
    plan = local(3).plan(RoutedPairs(experts, kept), 6, False)
    _, sent = local(3).dispatch(torch.zeros(3, WIDTH), weights, plan)
    torch.testing.assert_close(sent, torch.tensor([0.2, 0.3, 0.4, 0.1, 0.5, 0.0]))
    assert plan.counts.tolist() == [2, 1, 3]
    sent.sum().backward()
    torch.testing.assert_close(weights.grad, torch.ones(3, 2))


def test_indices_are_saved_through_hooks_so_that_recomputation_sees_them():
    experts = torch.tensor([[1, 0], [0, 1]])
    permutation = sort_by_expert(experts, None, 2, 4).order
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        permute(torch.zeros(2, WIDTH, requires_grad=True), permutation)
    assert [t.dtype for t in saved] == [torch.int64, torch.int64]
