import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megapar.arguments import FLAGS
from megapar.moe.capacity import capacity_on_device, keep_by_order, keep_by_probability, queue_starts
from megapar.moe.sizes import MoeSizes
from megapar.moe.stats import count_pairs
from tests.moe import oracle

POLICIES = FLAGS["moe_drop_policy"].choices


def keep(experts, probs, valid, capacity, policy):
    if policy == "probs":
        return keep_by_probability(experts, valid, probs, capacity=capacity)
    mask = None if valid is None else valid[:, None]
    counts = count_pairs(experts, mask, probs.shape[1])
    starts = queue_starts(counts[None], 0, policy)
    return keep_by_order(experts, valid, starts, capacity=capacity, policy=policy)


def pairs(kept):
    return {tuple(pair) for pair in kept.nonzero().tolist()}


@st.composite
def routings(draw):
    """Any choice of experts, with probabilities of few values so that ties are common."""
    experts = draw(st.integers(1, 6))
    topk = draw(st.integers(1, experts))
    tokens = draw(st.integers(0, 12))
    choices = [draw(st.permutations(range(experts)))[:topk] for _ in range(tokens)]
    levels = [[draw(st.sampled_from((0.1, 0.2, 0.3))) for _ in range(experts)] for _ in range(tokens)]
    valid = draw(st.none() | st.lists(st.booleans(), min_size=tokens, max_size=tokens))
    return (
        torch.tensor(choices, dtype=torch.long).view(tokens, topk),
        torch.tensor(levels).view(tokens, experts),
        None if valid is None else torch.tensor(valid, dtype=torch.bool),
        draw(st.integers(0, 8)),
    )


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        # tokens a b c; a: 0 then 1, b: 0 then 1, c: 1 then 0; capacity 2
        ("token", {(0, 0), (0, 1), (1, 0), (1, 1)}),
        ("choice", {(0, 0), (0, 1), (1, 0), (2, 0)}),
        ("probs", {(0, 0), (1, 0), (1, 1), (2, 0)}),
    ],
)
def test_three_tokens_by_hand(policy, expected):
    experts = torch.tensor([[0, 1], [0, 1], [1, 0]])
    probs = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.3, 0.7]])
    assert pairs(keep(experts, probs, None, 2, policy)) == expected


@settings(max_examples=150, deadline=None)
@given(routing=routings(), policy=st.sampled_from(POLICIES))
def test_equal_to_walking_the_queue(routing, policy):
    experts, probs, valid, capacity = routing
    plain_valid = [True] * len(experts) if valid is None else valid.tolist()
    expected = oracle.keep(experts.tolist(), probs.tolist(), plain_valid, capacity, policy)
    assert pairs(keep(experts, probs, valid, capacity, policy)) == expected


@settings(max_examples=100, deadline=None)
@given(routing=routings(), policy=st.sampled_from(("token", "choice")), data=st.data())
def test_pieces_with_counts_keep_what_the_whole_keeps(routing, policy, data):
    experts, probs, valid, capacity = routing
    tokens, topk = experts.shape
    cut = sorted(data.draw(st.lists(st.integers(0, tokens), max_size=3)))
    bounds = list(zip([0, *cut], [*cut, tokens], strict=True))
    pieces = [(experts[a:b], None if valid is None else valid[a:b]) for a, b in bounds]
    counts = torch.stack([count_pairs(e, None if v is None else v[:, None], probs.shape[1]) for e, v in pieces])
    parts = []
    for index, (part, part_valid) in enumerate(pieces):
        # ``token`` must get by with what has been counted so far
        seen = counts[: index + 1] if policy == "token" else counts
        starts = queue_starts(seen, index, policy)
        assert starts.shape == (topk, probs.shape[1])
        parts.append(keep_by_order(part, part_valid, starts, capacity=capacity, policy=policy))
    assert torch.equal(torch.cat(parts), keep(experts, probs, valid, capacity, policy))


def test_probs_has_no_queue_starts():
    with pytest.raises(ValueError, match="probs"):
        queue_starts(torch.zeros(1, 2, 4, dtype=torch.long), 0, "probs")


@pytest.mark.parametrize("factor", [4 / 3, 2 / 3, 1.1, 1.25, 1e-7])
def test_the_device_has_the_capacity_of_the_host(factor):
    sizes = MoeSizes(
        hidden_size=8, ffn_hidden_size=8, num_experts=8, topk=2, kind="deepspeed_moe", capacity_factor=factor
    )
    for tokens in (7, 4096, 1 << 20):
        assert int(capacity_on_device(sizes, torch.tensor(tokens))) == sizes.capacity(tokens)
    assert sizes.capacity(1 << 20) == max(sizes.min_capacity, -(-(1 << 18) * round(factor * 3e5) // 300000))
