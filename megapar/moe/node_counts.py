"""Counts of the dispatch by node: what every rank sends to nodes, ranks and experts, from which both hops are split.

    table of a rank   rows to each node | rows to each rank | pairs of each expert        one all-gather of it over ep

With pieces, each of the three has an entry for each message, and a message has pairs of one expert of each rank.

Shape letters: T tokens, k choices per token, E experts, L experts on a rank, P messages, N nodes, D ranks of
ep on each node, G = N D ranks of ep, S ranks of emp that gather rows (or 1), W width of a table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megapar.moe.expert_order import ExpertOrder, sort_by_expert
from megapar.moe.node_route import first_of_each, leave_by_node


class Leaving(NamedTuple):
    """The rows that leave a rank by node, before anything is known of other ranks.

    Attributes:
        order: Choices, sorted by expert, to rows, those that are sent first.
        choices: [T, k] int64, the choices of each token in this order.
        experts: [T, k] int64, their experts; of dropped ones, any number.
        nodes: [T, k] int64, their (message and) node, p N + n; P N for dropped ones.
        table: [W] int64, this rank's counts.
    """

    order: ExpertOrder
    choices: Tensor
    experts: Tensor
    nodes: Tensor
    table: Tensor


@dataclass(frozen=True)
class NodeShape:
    """Sizes of a message by node.

    Attributes:
        experts: E.
        nodes: N.
        ranks: D.
        pieces: Messages for the pairs of each local expert; 0: one message for all of them.
    """

    experts: int
    nodes: int
    ranks: int
    pieces: int

    @property
    def group(self) -> int:
        """Ranks of ep, G."""
        return self.nodes * self.ranks

    @property
    def local(self) -> int:
        """Experts on a rank, L."""
        return self.experts // self.group

    @property
    def messages(self) -> int:
        """Messages, P."""
        return self.local * self.pieces or 1

    @property
    def widths(self) -> tuple[int, int, int]:
        """Entries of a table for nodes, ranks and experts."""
        experts = self.messages * self.group if self.pieces else self.experts
        return self.messages * self.nodes, self.messages * self.group, experts

    def leave(self, experts_Tk: Tensor, kept_Tk: Tensor | None) -> Leaving:
        """Order the rows of these pairs by node, and count them."""
        keys_Tk, end = experts_Tk, self.messages * self.experts
        if self.pieces:
            keys_Tk = keys_Tk + self.experts * self._message_of(experts_Tk, kept_Tk)
        if kept_Tk is not None:
            keys_Tk = torch.where(kept_Tk, keys_Tk, end)
        sorted_Tk, choices_Tk = keys_Tk.sort(1)
        per_node = self.experts // self.nodes
        node_Tk, rank_Tk = (sorted_Tk.div(size, rounding_mode="floor") for size in (per_node, self.local))
        rows = leave_by_node(node_Tk, self.messages * self.nodes)
        _, ranks, pairs = self.widths
        # The last place counts what is not sent.
        place_Tk = torch.where(first_of_each(rank_Tk, rank_Tk < ranks), rank_Tk, ranks + pairs)
        pair_Tk = (rank_Tk if self.pieces else sorted_Tk) + ranks
        # A number is added, not a tensor, as in ``core.device.expert_rows``.
        counted = place_Tk.new_zeros(ranks + pairs + 1)
        counted = counted.scatter_(0, torch.cat([place_Tk, pair_Tk]).flatten(), 1, reduce="add")[:-1]
        experts_Tk = sorted_Tk % self.experts if self.pieces else sorted_Tk
        return Leaving(rows.order, choices_Tk, experts_Tk, node_Tk, torch.cat([rows.counts, counted]))

    def _message_of(self, experts_Tk: Tensor, kept_Tk: Tensor | None) -> Tensor:
        """Return the message of each pair: of m pairs of an expert, each of its pieces has ceil(m / pieces)."""
        pairs = sort_by_expert(experts_Tk, kept_Tk, self.experts, experts_Tk.numel())
        share_E = -torch.div(-pairs.counts, self.pieces, rounding_mode="floor")
        place_Tk = pairs.order.row - (pairs.counts.cumsum(0) - pairs.counts)[experts_Tk]
        piece_Tk = place_Tk.div(share_E.clamp(min=1)[experts_Tk], rounding_mode="floor").clamp(0, self.pieces - 1)
        return experts_Tk % self.local * self.pieces + piece_Tk

    def split(self, numbers: Tensor, rank: int, sharer: int) -> list[Splits]:
        """Return the splits of each message on one rank.

        Args:
            numbers: [G, S, W] tables of all ranks, on the host.
            rank: The rank of ep.
            sharer: The rank among the S.
        """
        nodes, ranks, _ = self.widths
        node, place = divmod(rank, self.ranks)
        own = numbers[:, sharer]
        to_node = own[:, :nodes].reshape(self.nodes, self.ranks, self.messages, self.nodes)
        to_rank = own[:, nodes : nodes + ranks].reshape(self.nodes, self.ranks, self.messages, self.nodes, self.ranks)
        pairs = self.arriving(numbers, rank)
        return [
            Splits(
                tuple(to_node[node, place, message].tolist()),
                tuple(to_node[:, place, message, node].tolist()),
                tuple(to_rank[:, place, message, node].sum(0).tolist()),
                tuple(to_rank[:, :, message, node, place].sum(0).tolist()),
                tuple(map(tuple, pairs[:, message].tolist())),
            )
            for message in range(self.messages)
        ]

    def arriving(self, tables: Tensor, rank: int) -> Tensor:
        """Return the pairs that arrive at the experts of a rank of ep, for each sharer: [S, P, L], or [S, P, 1]."""
        ranks, sharers, _ = tables.shape
        pairs = tables[:, :, sum(self.widths[:2]) :].reshape(ranks, sharers, self.messages, self.group, -1)
        return pairs[:, :, :, rank].sum(0)


@dataclass(frozen=True)
class Splits:
    """Rows of one message, on one rank.

    Attributes:
        to_nodes: Rows of the first hop to each node.
        from_nodes: Rows of the first hop from each node.
        to_ranks: Rows of the second hop to each rank of the node.
        from_ranks: Rows of the second hop from each rank of the node.
        pairs: For each rank that gathers rows, the pairs of each of the message's experts here.
    """

    to_nodes: tuple[int, ...]
    from_nodes: tuple[int, ...]
    to_ranks: tuple[int, ...]
    from_ranks: tuple[int, ...]
    pairs: tuple[tuple[int, ...], ...]
