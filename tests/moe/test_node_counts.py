"""Splits of both hops from the tables of counts: against rows that are listed one by one."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megapar.moe.node_counts import NodeShape
from tests.support.sent_rows import rows_by_node


def drawn(data):
    """(shape, for each rank experts and kept pairs)."""
    nodes, ranks, local = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    shape = NodeShape(nodes * ranks * local, nodes, ranks, data.draw(st.integers(0, 3)))
    topk = data.draw(st.integers(1, min(4, shape.experts)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    routing = []
    for _ in range(shape.group):
        tokens = data.draw(st.integers(0, 5))
        scores = torch.rand(tokens, shape.experts, generator=generator)
        kept = torch.rand(tokens, topk, generator=generator) < data.draw(st.sampled_from([0.0, 0.6, 1.0]))
        routing.append((scores.topk(topk).indices, kept))
    return shape, routing


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_both_ends_of_every_message_agree(data):
    shape, routing = drawn(data)
    numbers = torch.stack([shape.leave(*pairs).table for pairs in routing])[:, None]
    splits = [shape.split(numbers, rank, 0) for rank in range(shape.group)]
    for message in range(shape.messages):
        for rank, own in enumerate(splits):
            node, place = divmod(rank, shape.ranks)
            for other in range(shape.nodes):
                there = splits[other * shape.ranks + place][message]
                assert own[message].to_nodes[other] == there.from_nodes[node]
            for other in range(shape.ranks):
                there = splits[node * shape.ranks + other][message]
                assert own[message].to_ranks[other] == there.from_ranks[place]
    for rank in range(shape.group):
        first, arrived = rank * shape.local, torch.zeros(shape.local, dtype=torch.int64)
        for experts, kept in routing:
            arrived += torch.bincount(experts[kept], minlength=shape.experts)[first : first + shape.local]
        assert sum(sum(split.pairs[0]) for split in splits[rank]) == int(arrived.sum())
        if not shape.pieces:
            assert list(splits[rank][0].pairs[0]) == arrived.tolist()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_rows_of_one_message_are_those_of_the_formula(data):
    """``sent_rows`` counts the rows that leave a rank and a node; plans use its expectation."""
    shape, routing = drawn(data)
    shape = NodeShape(shape.experts, shape.nodes, shape.ranks, 0)
    numbers = torch.stack([shape.leave(*pairs).table for pairs in routing])[:, None]
    listed = [[e[k].tolist() for e, k in zip(*pairs, strict=True)] for pairs in routing]
    for rank, sent in enumerate(rows_by_node(listed, shape.experts, shape.ranks)):
        node, place = divmod(rank, shape.ranks)
        (split,) = shape.split(numbers, rank, 0)
        assert sum(split.to_nodes) - split.to_nodes[node] == sent.between
        assert sum(split.to_ranks) - split.to_ranks[place] == sent.within
