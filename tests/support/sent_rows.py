"""Rows that ranks send for a given routing, counted one by one: what the closed forms and the messages must equal."""

from __future__ import annotations

from collections.abc import Sequence

from megapar.moe.dispatch_bytes import Sent


def rows_by_node(routing: Sequence[Sequence[Sequence[int]]], num_experts: int, node_ranks: int) -> tuple[Sent, ...]:
    """Count the rows that each rank sends in a pass of the dispatch by node.

    Args:
        routing: For each rank of ep the experts of the kept pairs of each of its tokens.
        num_experts: E.
        node_ranks: Ranks of ep on each node, L.

    Returns:
        The rows of each rank's first hop to other nodes, and of its second hop to other ranks of its node.
    """
    local = num_experts // len(routing)
    between, within = [0] * len(routing), [0] * len(routing)
    for source, tokens in enumerate(routing):
        node, place = divmod(source, node_ranks)
        for experts in tokens:
            ranks = {expert // local for expert in experts}
            between[source] += len({rank // node_ranks for rank in ranks} - {node})
            for rank in ranks:
                entry = rank // node_ranks * node_ranks + place
                within[entry] += rank != entry
    return tuple(Sent(*rows) for rows in zip(between, within, strict=True))


def plain_rows(routing: Sequence[Sequence[Sequence[int]]], num_experts: int, node_ranks: int) -> tuple[Sent, ...]:
    """Count the rows that each rank sends in a pass of the plain dispatch, as ``rows_by_node``."""
    local = num_experts // len(routing)
    sent = []
    for source, tokens in enumerate(routing):
        ranks = [expert // local for experts in tokens for expert in experts]
        within = sum(rank != source and rank // node_ranks == source // node_ranks for rank in ranks)
        sent.append(Sent(sum(rank // node_ranks != source // node_ranks for rank in ranks), within))
    return tuple(sent)
