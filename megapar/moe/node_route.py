"""The route of a message by node: one row to each node that has an expert of its token, one from there to each rank.

    source   tokens [T]   choices, sorted by expert: 0 2 | 5 7     two experts to a rank, two ranks to a node
                          node of each choice:       0 0 | 1 1     the first of each node sends the row:
                                                     ^     ^       two rows for this token
    entry    rows [R]     the same on the rank that the row entered by, within its node: one row to each rank
    rank     rows [R]     a copy for each of its experts here, in the order of experts

Choices of one destination are neighbours once they are sorted, so no row is compared with another, and rows are summed
in the order of nodes, ranks and experts. A token with no kept pair has no row.

Shape letters: T tokens, k choices per token, R rows, H hidden, C columns of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megapar.core.comm.exchange import AllToAll
from megapar.core.comm.two_hops import TwoHops
from megapar.moe.expert_order import ExpertOrder, OrderedRows, gather_rows, gather_sum, sort_by_expert
from megapar.moe.node_rows import experts_of, sum_rows


@dataclass
class NodeRoute:
    """The way of one message: how its rows are relayed, and their order here, both known once they have arrived.

    Attributes:
        first_expert: The first expert of this node.
        local: Experts of each rank.
        ranks: Ranks of each node.
        topk: Fields of a row, k.
        relayed: Rows that this rank relays to the ranks of its node.
        hop: Fields of the rows that entered here to the rows that are relayed.
        arrival: Fields of the rows that arrived at this rank to pairs, sorted by expert.
    """

    first_expert: int
    local: int
    ranks: int
    topk: int
    relayed: int
    hop: ExpertOrder | None = None
    arrival: ExpertOrder | None = None

    def relay(self, rows_RC: Tensor) -> Tensor:
        """Return a row for each rank of the node that has an expert of a row's fields."""
        # Fields with an expert are all on this node; those without one give a negative rank.
        rank_Rk = (experts_of(rows_RC, self.topk) - self.first_expert).div(self.local, rounding_mode="floor")
        leads_Rk = first_of_each(rank_Rk, rank_Rk >= 0)
        self.hop = sort_by_expert(rank_Rk, leads_Rk, self.ranks, self.relayed).order
        return self.spread(rows_RC)

    def spread(self, rows: Tensor) -> Tensor:
        """Copy rows that entered here for the ranks of the node, as ``relay`` did: [R, ..] to [relayed, ..]."""
        return gather_rows(rows, self._hop())

    def collect(self, rows_RH: Tensor) -> Tensor:
        """Sum the ranks' rows, the adjoint of ``spread``."""
        return gather_sum(rows_RH, self._hop())

    def collect_gradients(self, rows_RC: Tensor) -> Tensor:
        """Sum the ranks' gradients of rows with fields."""
        return sum_rows(rows_RC, self._hop())

    def arrive(self, rows_RC: Tensor, first_expert: int, pairs: int) -> ExpertOrder:
        """Order the pairs of the rows that arrived, by expert.

        Args:
            first_expert: The first expert of this rank.
            pairs: Fields with an expert of this rank.
        """
        experts_Rk = experts_of(rows_RC.detach(), self.topk) - first_expert
        here = (experts_Rk >= 0) & (experts_Rk < self.local)
        self.arrival = sort_by_expert(experts_Rk, here, self.local, pairs).order
        return self.arrival

    def way_back(self, way: TwoHops) -> TwoHops:
        """Return the exchange of the experts' outputs [R, H], one row per arrived row. way: that of the dispatch."""
        there: AllToAll = way.second.conjugate()
        return TwoHops(way.axis, there, way.first.conjugate(), self.collect, self.spread, way.slow, way.device)

    def _hop(self) -> ExpertOrder:
        assert self.hop is not None, "rows are relayed before anything else takes their way"
        return self.hop


def first_of_each(keys_Tk: Tensor, real_Tk: Tensor) -> Tensor:
    """Keep True for the first of equal neighbours in each row, and return it: [T, k].

    Args:
        keys_Tk: Keys, of which equal ones are neighbours.
        real_Tk: bool, True for keys that count; changed in place.
    """
    real_Tk[:, 1:].logical_and_(keys_Tk[:, 1:] != keys_Tk[:, :-1])
    return real_Tk


def leave_by_node(node_Tk: Tensor, nodes: int) -> OrderedRows:
    """Return the order of the rows that leave a rank, by node; those that are not sent are the last ones.

    Args:
        node_Tk: Node of each token's choices, sorted; ``nodes`` and above: dropped.
    """
    return sort_by_expert(node_Tk, first_of_each(node_Tk, node_Tk < nodes), nodes, node_Tk.numel())
