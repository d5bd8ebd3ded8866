"""Kernels that order, copy and sum experts' rows against the forms that they replace, run by Triton's interpreter."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megapar.core.device import expert_rows
from megapar.core.device.expert_rows import RowOrder
from megapar.core.device.triton_operators import KERNELS
from tests.support.interpreted import run_interpreted


def routed(tokens, choices, num_experts, masked, random):
    """(experts of each token, which pairs are kept): all, some pairs, or all pairs of some tokens."""
    experts = torch.rand(tokens, num_experts, generator=random).topk(choices).indices
    if masked == "none":
        return experts, None
    shape = (tokens, 1 if masked == "tokens" else choices)
    return experts, (torch.rand(shape, generator=random) < 0.6).expand_as(experts)


def same_bits(a, b):
    """Compare bits: parts of a weight may be read as NaN."""
    return torch.equal(*(x.contiguous().view(torch.uint8) for x in (a, b)))


ROUTED = {
    "shape": st.tuples(st.integers(0, 24), st.integers(1, 6), st.sampled_from((1, 2, 7, 40, 70))),
    "masked": st.sampled_from(("none", "pairs", "tokens")),
    "seed": st.integers(0, 99),
}


@given(**ROUTED)
@settings(max_examples=8, deadline=None)
def check_orders(shape, masked, seed):
    """Every number is equal, but for rows of pairs that have none."""
    random = torch.Generator().manual_seed(seed)
    tokens, choices, num_experts = shape
    experts, kept = routed(tokens, min(choices, num_experts), num_experts, masked, random)
    num_kept = experts.numel() if kept is None else int(kept.sum())
    rows = int(torch.randint(num_kept, experts.numel() + 1, (), generator=random))
    for fill in (False, True):
        wanted = expert_rows.sort_pairs_reference(experts, kept, num_experts, rows, fill=fill)
        got = RowOrder(*KERNELS["sort_pairs"](experts, kept, num_experts, rows, None, fill))
        for name in ("pair", "row", "counts"):
            assert torch.equal(getattr(got, name), getattr(wanted, name)), name
        assert torch.equal(got.ends, wanted.counts.cumsum(0).int())
        assert torch.equal(got.kept, wanted.kept if fill else torch.empty(0, dtype=torch.bool))
    counts = expert_rows.sort_pairs_reference(experts, kept, num_experts, rows).counts
    capacity = int(counts.max()) + seed % 2
    pair, row, row_kept = expert_rows.spread_pairs_reference(experts, kept, num_experts, capacity)
    got = RowOrder(*KERNELS["sort_pairs"](experts, kept, num_experts, num_experts * capacity, capacity, False))
    assert torch.equal(got.pair, pair)
    assert torch.equal(got.row, row)
    assert torch.equal(got.kept, row_kept)


@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3)),
    longest=st.sampled_from((0, 1, 5, 300)),
    spare=st.integers(0, 2),
    seed=st.integers(0, 99),
)
@settings(max_examples=6, deadline=None)
def check_runs(shape, longest, spare, seed):
    """Runs of several sources and blocks, with and without padding; and runs of one length, which are not read."""
    from megapar.core.device.triton_kernels import expert_rows as kernels

    kernels.PROGRAMS = 1 + 20 * (seed % 2)  # one for each run, or several
    counts = torch.randint(0, longest + 1, shape, generator=torch.Generator().manual_seed(seed))
    room, rows = int(counts.sum((1, 2)).max()) + spare, int(counts.sum())
    wanted = expert_rows.order_runs_reference(counts, room, rows)
    got = RowOrder(*KERNELS["order_runs"](counts, shape, room, rows, 0))
    for name in ("pair", "row", "counts"):
        assert torch.equal(getattr(got, name), getattr(wanted, name)), name
    assert torch.equal(got.ends, wanted.counts.cumsum(0).int())
    if wanted.kept is not None:
        assert torch.equal(got.kept[:, None], wanted.kept)
    _, sources, experts = shape
    wanted = expert_rows.order_equal_runs_reference(counts, sources, experts, longest)
    places = sources * experts * longest
    got = RowOrder(*KERNELS["order_runs"](counts, (1, sources, experts), places, places, longest))
    for name in ("pair", "row", "counts"):
        assert torch.equal(getattr(got, name), getattr(wanted, name)), name


@given(hidden=st.integers(1, 40), dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)), **ROUTED)
@settings(max_examples=8, deadline=None)
def check_copies_and_sums(hidden, dtype, shape, masked, seed):
    """Copies to the last bit, of messages there and back; sums within the rounding of the row's dtype."""
    random = torch.Generator().manual_seed(seed)
    tokens, choices, num_experts = shape
    choices = min(choices, num_experts)
    experts, kept = routed(tokens, choices, num_experts, masked, random)
    num_kept = experts.numel() if kept is None else int(kept.sum())
    rows = int(torch.randint(num_kept, experts.numel() + 1, (), generator=random))
    order = expert_rows.sort_pairs_reference(experts, kept, num_experts, rows, fill=True)
    x = torch.randn(tokens, hidden + 3, generator=random).to(dtype)[:, :hidden]  # rows lie apart
    weights = torch.rand(experts.shape, generator=random)
    w = 4 // dtype.itemsize
    columns = hidden + w + 2
    bits = weights.flatten().view(dtype).view(-1, w)
    message = KERNELS["pack_rows"](x, bits, columns, order.pair, order.kept, choices, True)
    wanted = expert_rows.pack_reference(x, weights.flatten(), columns, order.pair, order.kept, choices)
    assert same_bits(message[:, : hidden + w], wanted[:, : hidden + w])

    index = torch.randperm(rows, generator=random)
    for sort_weights in (False, True):
        got, got_weights = KERNELS["unpack_rows"](message, hidden, w, index, rows, sort_weights)
        split = expert_rows.unpack_reference(message, hidden, torch.float32, index, rows, sort_weights=sort_weights)
        assert torch.equal(got, split[0])
        assert torch.equal(got_weights.flatten().view(torch.float32), split[1])
    room = rows + seed % 3
    padded, unsorted = KERNELS["unpack_rows"](message, hidden, w, None, room, False)
    wanted, _ = expert_rows.unpack_reference(message, hidden, torch.float32, None, room, sort_weights=False)
    assert torch.equal(padded, wanted)
    assert same_bits(unsorted, message[:, hidden : hidden + w])

    summed, back = KERNELS["sum_message"](message, hidden, w, order.row, kept)
    arguments = (message.double()[:, :hidden], order.row, kept)
    exact = expert_rows.unpermute_reference(*arguments) if rows and tokens else torch.zeros(tokens, hidden).double()
    tolerance = 2 * choices * torch.finfo(dtype).eps
    torch.testing.assert_close(summed.double(), exact, rtol=tolerance, atol=tolerance)
    chosen = weights if kept is None else torch.where(kept, weights, 0.0)
    assert torch.equal(back.view(torch.float32).view(experts.shape), chosen)


def test_orders_are_those_of_a_sort():
    run_interpreted(__file__, "check_orders")


def test_runs_are_ordered_as_by_a_search():
    run_interpreted(__file__, "check_runs")


def test_rows_are_copied_and_summed():
    run_interpreted(__file__, "check_copies_and_sums")
