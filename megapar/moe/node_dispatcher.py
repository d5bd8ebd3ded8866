"""Dispatch by node: a token crosses the network once for each node that has experts of it, not once for each expert.

    tokens [T, H] --build--> rows [R, C], one for each (token, node), by node: the token and k fields (``node_rows``)
        dispatch   all-to-all between nodes, to the rank at this place of the node; there one row for each rank;
                   all-to-all within the node; on the rank, a copy of the token for each of its experts here
        enter, experts, leave as in the plain dispatch, times the gate weights
        combine    the rows of each token summed; all-to-all within the node; summed; all-to-all between nodes
    y [T, H] = the sum of each token's rows, in the order of nodes

Sums are taken in max(fp32, dtype) and sent in the compute dtype. The backward uses the same hops: the combine's
gradients go the way of the dispatch, and the dispatch's the way of the combine, with the gate weights' in the fields.
The two hops are one exchange (``core.comm.two_hops``), so slices and pieces hide them as they do one all-to-all.

Splits are always uneven, both hops' from one all-gather of counts over ep and one host wait:

    table of a rank   rows to each node | rows to each rank | pairs of each expert

With pieces, each of the three has an entry for each message, and a message has pairs of one expert of each rank.

Deduplication by node: DeepSeek-V3, arXiv:2412.19437, section 3.2.2.

Shape letters: T tokens, k choices per token, H hidden, R rows, C columns of a row, E experts, L experts on a
rank, P messages, N nodes, D ranks of ep on each node, G = N D ranks of ep, S ranks of emp that gather rows (or 1), W
width of a table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megapar.core.comm.async_pairs import MessageBuilder, start, wait
from megapar.core.comm.autograd import all_gather_replicated
from megapar.core.comm.axis import AxisNodes
from megapar.core.comm.exchange import AllGather, AllToAll
from megapar.core.comm.two_hops import TwoHops
from megapar.core.recompute.replay import Replay
from megapar.errors import DistributedError
from megapar.moe.dispatch_bytes import MOST_EXPERTS
from megapar.moe.dispatcher import Dispatcher, DispatchPlan, PendingRows, RoutedPairs, RowCounts, unsent_if_unused
from megapar.moe.expert_order import ExpertOrder, kept_rows, order_by_expert, sort_by_expert, unpermute
from megapar.moe.node_rows import EMPTY, NodeMessage, NodeRoute, arrive, build, first_of_each


class OutgoingRows(NamedTuple):
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
class NodeSplits:
    """Rows of one message on one rank: of the first hop by node, and of the second by rank of the node.

    pairs: For each rank that gathers rows, the pairs of each of the message's experts here.
    """

    to_nodes: tuple[int, ...]
    from_nodes: tuple[int, ...]
    to_ranks: tuple[int, ...]
    from_ranks: tuple[int, ...]
    pairs: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class NodeShape:
    """Sizes of a message by node; ``pieces``: messages for each local expert's pairs, 0 for one message for all."""

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

    def outgoing(self, experts_Tk: Tensor, kept_Tk: Tensor | None) -> OutgoingRows:
        """Order the rows of these pairs by node, and count them."""
        keys_Tk, end = experts_Tk, self.messages * self.experts
        if self.pieces:
            keys_Tk = keys_Tk + self.experts * self._message_of(experts_Tk, kept_Tk)
        if kept_Tk is not None:
            keys_Tk = torch.where(kept_Tk, keys_Tk, end)
        sorted_Tk, choices_Tk = keys_Tk.sort(1)
        per_node = self.experts // self.nodes
        node_Tk, rank_Tk = (sorted_Tk.div(size, rounding_mode="floor") for size in (per_node, self.local))
        # The first choice of each node stands for it; rows that are not sent are the last ones.
        nodes = self.messages * self.nodes
        rows = sort_by_expert(node_Tk, first_of_each(node_Tk, node_Tk < nodes), nodes, node_Tk.numel())
        _, ranks, pairs = self.widths
        # The last place counts what is not sent.
        place_Tk = torch.where(first_of_each(rank_Tk, rank_Tk < ranks), rank_Tk, ranks + pairs)
        pair_Tk = (rank_Tk if self.pieces else sorted_Tk) + ranks
        # A number is added, not a tensor, as in ``core.device.expert_rows``.
        counted = place_Tk.new_zeros(ranks + pairs + 1)
        counted = counted.scatter_(0, torch.cat([place_Tk, pair_Tk]).flatten(), 1, reduce="add")[:-1]
        experts_Tk = sorted_Tk % self.experts if self.pieces else sorted_Tk
        return OutgoingRows(rows.order, choices_Tk, experts_Tk, node_Tk, torch.cat([rows.counts, counted]))

    def _message_of(self, experts_Tk: Tensor, kept_Tk: Tensor | None) -> Tensor:
        """Return the message of each pair: of m pairs of an expert, each of its pieces has ceil(m / pieces)."""
        pairs = sort_by_expert(experts_Tk, kept_Tk, self.experts, experts_Tk.numel())
        share_E = -torch.div(-pairs.counts, self.pieces, rounding_mode="floor")
        place_Tk = pairs.order.row - (pairs.counts.cumsum(0) - pairs.counts)[experts_Tk]
        piece_Tk = place_Tk.div(share_E.clamp(min=1)[experts_Tk], rounding_mode="floor").clamp(0, self.pieces - 1)
        return experts_Tk % self.local * self.pieces + piece_Tk

    def split(self, numbers: Tensor, rank: int, sharer: int) -> list[NodeSplits]:
        """Return the splits of each message on rank ``rank`` of ep and ``sharer`` of S, from all tables [G, S, W]."""
        nodes, ranks, _ = self.widths
        node, place = divmod(rank, self.ranks)
        sent = numbers[:, sharer]
        to_node = sent[:, :nodes].reshape(self.nodes, self.ranks, self.messages, self.nodes)
        to_rank = sent[:, nodes : nodes + ranks].reshape(self.nodes, self.ranks, self.messages, self.nodes, self.ranks)
        pairs = self.arriving(numbers, rank)
        return [
            NodeSplits(
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


@dataclass(frozen=True, kw_only=True)
class NodePlan(DispatchPlan):
    """The plan of one message by node.

    Attributes:
        row_experts: [R, k] int16, the experts of the fields of each row sent; EMPTY where a field has none.
        choices: [T, k] int64, each token's choices, sorted by expert, as ``send_order`` has them.
        route: How rows are relayed, and their order here.
    """

    exchange: TwoHops
    row_experts: Tensor
    choices: Tensor
    route: NodeRoute


@dataclass(frozen=True)
class NodeDispatcher(Dispatcher[NodePlan]):
    """Dispatch of a row for each (token, node), and within the node for each (token, rank).

    Raises DistributedError if an expert's number does not fit in a field.
    """

    def __post_init__(self) -> None:
        if self.num_experts > MOST_EXPERTS:
            raise DistributedError(f"dispatch by node takes {MOST_EXPERTS:,} experts at most, not {self.num_experts:,}")

    def sort(self, pairs: RoutedPairs, pieces: int) -> OutgoingRows:
        return self.shape(pieces).outgoing(pairs.experts, pairs.kept)

    def exchange_counts(self, ordered: OutgoingRows, *, on_side_stream: bool = False) -> RowCounts:
        table = ordered.table[None]
        sharers = all_gather_replicated(table, self.emp, 0) if self.gathers_rows_over_emp else table
        flight = self.comm.launch(AllGather(self.ep, kind="counts"), sharers)
        tables = self.comm.wait(flight, metered=not on_side_stream).view(self.ep.size, *sharers.shape)
        return RowCounts(tables, *self.comm.device.host_copy(tables))

    def plans(self, ordered: OutgoingRows, counts: RowCounts, numbers: Tensor, pieces: int) -> tuple[NodePlan, ...]:
        shape, topk = self.shape(pieces), ordered.choices.shape[1]
        splits = shape.split(numbers, self.ep.rank, self.emp.rank if self.gathers_rows_over_emp else 0)
        order = kept_rows(ordered.order, sum(sum(split.to_nodes) for split in splits))
        token_R = order.pair.div(topk, rounding_mode="floor")
        node_R = ordered.nodes.flatten().index_select(0, order.pair)
        elsewhere_Rk = ordered.nodes.index_select(0, token_R) != node_R[:, None]
        row_experts_Rk = ordered.experts.index_select(0, token_R).masked_fill_(elsewhere_Rk, EMPTY).to(torch.int16)
        counts_SPL = shape.arriving(counts.arriving, self.ep.rank)
        return tuple(
            self._plan(
                order,
                ordered.choices,
                row_experts_Rk,
                split,
                counts_SPL[:, number],
                number // pieces if pieces else None,
            )
            for number, split in enumerate(splits)
        )

    def _plan(
        self,
        order: ExpertOrder,
        choices_Tk: Tensor,
        row_experts_Rk: Tensor,
        split: NodeSplits,
        counts_SL: Tensor,
        expert: int | None,
    ) -> NodePlan:
        nodes, local = self.nodes, self.num_experts // self.ep.size
        first = nodes.between.rank * nodes.within.size * local
        route = NodeRoute(first, local, nodes.within.size, row_experts_Rk.shape[1], sum(split.to_ranks))
        exchange = TwoHops(
            self.ep,
            AllToAll(nodes.between, split.to_nodes, split.from_nodes),
            AllToAll(nodes.within, split.to_ranks, split.from_ranks),
            route.relay,
            route.collect_gradients,
            nodes.between.name,
            self.comm.device,
        )
        totals = [sum(pairs) for pairs in split.pairs]
        received, receive_order, counts_L, ends_L = totals[0], None, None, None
        if self.gathers_rows_over_emp:
            received = totals[self.emp.rank]
            receive_order, counts_L, ends_L = order_by_expert(counts_SL[:, None], max(totals), sum(totals))
        elif expert is None:
            counts_L = counts_SL[0]
        sizes = tuple(map(sum, zip(*split.pairs, strict=True)))
        return NodePlan(
            send_order=order,
            exchange=exchange,
            received=received,
            room=max(totals),
            receive_order=receive_order,
            counts=counts_L if expert is None else None,
            expert=expert or 0,
            sizes=sizes if expert is None else None,
            ends=ends_L if expert is None else None,
            row_experts=row_experts_Rk,
            choices=choices_Tk,
            route=route,
        )

    def message(self, plan: NodePlan, hidden: int, weight_dtype: torch.dtype) -> MessageBuilder:
        return NodeMessage(plan.send_order, plan.row_experts, plan.choices, hidden)

    def dispatch(self, x_TH: Tensor, weights_Tk: Tensor, plan: NodePlan) -> tuple[Tensor, Tensor]:
        hidden = x_TH.shape[1]
        rows_RC = build(x_TH, weights_Tk, NodeMessage(plan.send_order, plan.row_experts, plan.choices, hidden))
        return self.wait_dispatch(start(plan.exchange, rows_RC, self.comm), plan, hidden, weights_Tk.dtype)

    def wait_dispatch(
        self, sent: PendingRows, plan: NodePlan, hidden: int, weight_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Wait for (tokens, weights): a copy of the token for each pair, sorted by expert."""
        rows_RC = wait(*sent)
        order = plan.route.arrive(rows_RC, self.ep.rank * (self.num_experts // self.ep.size), plan.received)
        return arrive(rows_RC, order, hidden, plan.room)

    def start_combine(self, rows_RH: Tensor, plan: NodePlan, ends_unit: Replay | None) -> PendingRows:
        """See ``Dispatcher.start_combine``; the rows of a token are summed here, and again where it entered."""
        back = unsent_if_unused(plan.route.way_back(plan.exchange), ends_unit)
        return start(back, unpermute(rows_RH, plan.route.arrival), self.comm)

    @property
    def nodes(self) -> AxisNodes:
        """The axis ep divided by node."""
        assert self.ep.nodes is not None
        return self.ep.nodes

    def shape(self, pieces: int) -> NodeShape:
        """Return the sizes of ``pieces`` messages for each local expert, or of one for all (0)."""
        return NodeShape(self.num_experts, self.nodes.between.size, self.nodes.within.size, pieces)
