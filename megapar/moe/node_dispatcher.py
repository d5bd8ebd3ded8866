"""Dispatch by node: a token crosses the network once for each node that has experts of it, not once for each expert.

    tokens [T, H] --build--> rows [R, C], one for each (token, node), by node: the token and k fields (``node_rows``)
        dispatch   all-to-all between nodes, to the rank at this place of the node; there one row for each rank;
                   all-to-all within the node; on the rank, a copy of the token for each of its experts here
        enter, experts, leave as in the plain dispatch, times the gate weights
        combine    the rows of each token summed; all-to-all within the node; summed; all-to-all between nodes
    y [T, H] = the sum of each token's rows, in the order of nodes

Sums are taken in max(fp32, dtype) and sent in the compute dtype. The backward moves gradients by the same hops: of the
combine the first way, of the dispatch the way back, where the gradients of the gate weights return in the fields. The
two hops are one exchange (``core.comm.two_hops``), so slices and pieces hide them as they do one all-to-all.

Splits are always uneven: one all-gather of counts (``node_counts``) and one host wait.

Deduplication by node: DeepSeek-V3, arXiv:2412.19437, section 3.2.2.

Shape letters: T tokens, k choices per token, H hidden, R rows, C columns of a row, L experts on this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megapar.core.comm.async_pairs import MessageBuilder, start, wait
from megapar.core.comm.autograd import gather
from megapar.core.comm.axis import AxisNodes
from megapar.core.comm.exchange import AllGather, AllToAll
from megapar.core.comm.two_hops import TwoHops
from megapar.core.device.base import Event
from megapar.core.recompute.replay import Replay, once
from megapar.errors import DistributedError
from megapar.moe.dispatch_bytes import MOST_EXPERTS
from megapar.moe.dispatcher import READ, Dispatcher, DispatchPlan, PendingRows, RoutedPairs, unsent_if_unused
from megapar.moe.expert_order import ExpertOrder, kept_rows, order_by_expert, unpermute
from megapar.moe.node_counts import Leaving, NodeShape, Splits
from megapar.moe.node_route import NodeRoute
from megapar.moe.node_rows import EMPTY, NodeRows, arrive, build


class NodeTables(NamedTuple):
    """The counts of all ranks, being copied to the host.

    Attributes:
        tables: [ep, S, W] the tables of all ranks, S of emp if rows are gathered over emp, else 1.
        numbers: The same on the host.
        ready: The event after which the host may read ``numbers``.
    """

    tables: Tensor
    numbers: Tensor
    ready: Event


@dataclass(frozen=True)
class NodeDispatcher(Dispatcher):
    """Dispatch of a row for each (token, node), and within the node for each (token, rank).

    Raises DistributedError if an expert's number does not fit in a field.
    """

    def __post_init__(self) -> None:
        if self.num_experts > MOST_EXPERTS:
            raise DistributedError(f"dispatch by node takes {MOST_EXPERTS:,} experts at most, not {self.num_experts:,}")

    def plan(
        self,
        experts_Tk: Tensor,
        kept_Tk: Tensor | None,
        rows: int,
        exact: bool,
        replay: Replay | None = None,
        counts_kE: Tensor | None = None,
    ) -> DispatchPlan:
        """See ``Dispatcher.plan``; rows, exact and counts_kE have no effect."""
        leaving = self.shape(0).leave(experts_Tk, kept_Tk)

        def count() -> tuple[NodeTables, Tensor]:
            tables = self.announce(leaving.table)
            return tables, self.read(tables)

        return self.plan_pieces(leaving, *once(replay, count), 0)[0]

    def count(self, pairs: RoutedPairs, pieces: int, *, aside: bool = False) -> tuple[Leaving, NodeTables]:
        """See ``Dispatcher.count``."""
        leaving = self.shape(pieces).leave(pairs.experts, pairs.kept)
        return leaving, self.announce(leaving.table, aside=aside)

    def plan_counted(
        self, counted: tuple[Leaving, NodeTables], pieces: int
    ) -> tuple[ExpertOrder, tuple[DispatchPlan, ...]]:
        """See ``Dispatcher.plan_counted``."""
        leaving, tables = counted
        plans = self.plan_pieces(leaving, tables, self.read(tables), pieces)
        return plans[0].send_order, plans

    def announce(self, table_W: Tensor, *, aside: bool = False) -> NodeTables:
        """Exchange the tables of counts, without a host wait: over emp first, then over ep.

        aside: the current stream is not the main one.
        """
        sharers = gather(table_W[None], self.emp, 0) if self.gathers else table_W[None]
        flight = self.comm.launch(AllGather(self.ep, kind="counts"), sharers)
        tables = self.comm.wait(flight, metered=not aside).view(self.ep.size, *sharers.shape)
        numbers, ready = self.comm.device.host_copy(tables)
        return NodeTables(tables, numbers, ready)

    def read(self, tables: NodeTables) -> Tensor:
        """Return the tables on the host: [ep, S, W]. The only host wait."""
        tables.ready.synchronize()
        self.comm.count_host_wait(READ)
        return tables.numbers

    def plan_pieces(
        self, leaving: Leaving, tables: NodeTables, numbers: Tensor, pieces: int
    ) -> tuple[DispatchPlan, ...]:
        """Plan the messages, in the order in which they are sent.

        Args:
            leaving: The rows that leave this rank.
            tables: From ``announce``.
            numbers: From ``read``.
            pieces: Messages for each local expert; 0: one message for all.
        """
        shape, topk = self.shape(pieces), leaving.choices.shape[1]
        splits = shape.split(numbers, self.ep.rank, self.emp.rank if self.gathers else 0)
        order = kept_rows(leaving.order, sum(sum(split.to_nodes) for split in splits))
        token_R = order.pair.div(topk, rounding_mode="floor")
        node_R = leaving.nodes.flatten().index_select(0, order.pair)
        elsewhere_Rk = leaving.nodes.index_select(0, token_R) != node_R[:, None]
        row_experts_Rk = leaving.experts.index_select(0, token_R).masked_fill_(elsewhere_Rk, EMPTY).to(torch.int16)
        counts_SPL = shape.arriving(tables.tables, self.ep.rank)
        return tuple(
            self._plan(
                order,
                leaving.choices,
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
        split: Splits,
        counts_SL: Tensor,
        expert: int | None,
    ) -> DispatchPlan:
        """Plan one message. expert: its only expert, or None."""
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
        if self.gathers:
            received = totals[self.emp.rank]
            receive_order, counts_L, ends_L = order_by_expert(counts_SL[:, None], max(totals), sum(totals))
        elif expert is None:
            counts_L = counts_SL[0]
        sizes = tuple(map(sum, zip(*split.pairs, strict=True)))
        return DispatchPlan(
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

    def message(self, order: ExpertOrder, plan: DispatchPlan, hidden: int, weight_dtype: torch.dtype) -> MessageBuilder:
        """See ``Dispatcher.message``."""
        return self._rows(order, plan, hidden)

    def dispatch(self, x_TH: Tensor, weights_Tk: Tensor, plan: DispatchPlan) -> tuple[Tensor, Tensor]:
        """See ``Dispatcher.dispatch``."""
        rows_RC = build(x_TH, weights_Tk, self._rows(plan.send_order, plan, x_TH.shape[1]))
        return self.wait_dispatch(start(plan.exchange, rows_RC, self.comm), plan, x_TH.shape[1], weights_Tk.dtype)

    def wait_dispatch(
        self, sent: PendingRows, plan: DispatchPlan, hidden: int, weight_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Wait for (tokens, weights): a copy of the token for each pair, sorted by expert."""
        rows_RC, route = wait(*sent), plan.route
        assert route is not None
        order = route.arrive(rows_RC, self.ep.rank * (self.num_experts // self.ep.size), plan.received)
        return arrive(rows_RC, order, hidden, plan.room)

    def start_combine(self, rows_RH: Tensor, plan: DispatchPlan, ends_unit: Replay | None) -> PendingRows:
        """See ``Dispatcher.start_combine``; the rows of a token are summed here, and again where it entered."""
        route, way = plan.route, plan.exchange
        assert route is not None
        assert route.arrival is not None
        assert isinstance(way, TwoHops)
        return start(unsent_if_unused(route.way_back(way), ends_unit), unpermute(rows_RH, route.arrival), self.comm)

    def _rows(self, order: ExpertOrder, plan: DispatchPlan, hidden: int) -> NodeRows:
        assert plan.row_experts is not None
        assert plan.choices is not None
        return NodeRows(order, plan.row_experts, plan.choices, hidden)

    @property
    def nodes(self) -> AxisNodes:
        """The axis ep divided by node."""
        assert self.ep.nodes is not None
        return self.ep.nodes

    def shape(self, pieces: int) -> NodeShape:
        """Return the sizes of ``pieces`` messages for each local expert, or of one for all (0)."""
        return NodeShape(self.num_experts, self.nodes.between.size, self.nodes.within.size, pieces)
