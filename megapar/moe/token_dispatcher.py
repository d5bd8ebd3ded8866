"""The token dispatcher: sends tokens to their experts, on this rank or on others, and the expert outputs back.

    tokens [T, H] --pack--> message [R_out, H + w], sorted by expert, so by rank (w: ``message``)
        dispatch   all-to-all over ep           received [R_in, H + w]: from each rank, its rows by expert
        enter      tokens replicated over mp:   sort by expert, copy over emp (backward: all-reduce)
                   tokens sharded over mp:      all-gather over emp, then sort by expert
        experts    each rank of emp has F/emp features of every expert here: partial sums
        leave      replicated:                  back in received order, all-reduce over emp
                   sharded:                     back in gathered order, reduce-scatter over emp
                   times the gate weights, received with the tokens: from here on the sums are complete; whole
                   experts (emp = 1) multiply their activations instead (``weighs_inside``)
        combine    all-to-all over ep           each pair's row returns to the rank of its token
    y [T, H] = the sum of each token's rows

Each of the four steps is a start/wait pair (``async_pairs``); on an axis of one rank a pair passes its tensor through.
If both axes have one rank, all experts are on this rank: no message is packed, and dispatch gathers the sorted tokens.

Uneven splits send only the kept pairs, at the cost of an exchange of counts and one host wait. Even splits send every
expert's capacity from every rank, at the cost of padding.

Shape letters: T tokens, k choices per token, H hidden, E experts, L experts on this rank, R rows, C rows per expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megapar.core.comm.async_pairs import Ticket, start, wait
from megapar.core.comm.autograd import gather
from megapar.core.comm.axis import Axis
from megapar.core.comm.exchange import AllGather, AllToAll, Copy, Reduce, ReduceScatter, Unsent
from megapar.core.comm.in_flight import CommContext
from megapar.core.device.base import Event
from megapar.core.recompute.replay import Replay, once
from megapar.moe.expert_order import (
    ExpertOrder,
    OrderedRows,
    kept_rows,
    order_by_expert,
    permute,
    sort_by_expert,
    spread_by_expert,
    transpose_runs,
    unpermute,
)
from megapar.moe.message import pack, unpack

PendingRows = tuple[Tensor, Ticket]  # result of ``start``: the token that autograd sees, and the ticket to wait with
READ = "TokenDispatcher.read"  # where the host waits for counts


class DispatchPlan(NamedTuple):
    """The plan of one message: made once, used for dispatch, combine and both backwards.

    Attributes:
        send_order: Pairs to rows as sent, sorted by expert and therefore by rank.
        exchange: The all-to-all over ep.
        received: Rows that this rank receives.
        room: Rows per rank in the all-gather over emp: the maximum that any of its ranks received.
        receive_order: Rows as received (or gathered) to rows sorted by expert; None if they are sorted already.
        counts: [L] int64, rows of each local expert after the all-gather; None if all rows are for ``expert``.
        expert: The only expert of this message, if ``counts`` is None.
        sizes: ``counts`` on the host, if the host has them anyway.
        ends: [L] int32, the row after the last one of each local expert, if the device computed it with the order.
    """

    send_order: ExpertOrder
    exchange: AllToAll
    received: int
    room: int
    receive_order: ExpertOrder | None
    counts: Tensor | None
    expert: int = 0
    sizes: tuple[int, ...] | None = None
    ends: Tensor | None = None


class RowCounts(NamedTuple):
    """The numbers of rows that ranks send to experts, being copied to the host.

    Attributes:
        counts: [ep, L] rows from this rank to each expert.
        arriving: [ep, L] rows from each rank to the local experts.
        gathered: [emp, ep, L] ``arriving`` of every rank of emp; None if rows are not gathered over emp.
        numbers: All of the above on the host, flat, in this order.
        ready: The event after which the host may read ``numbers``.
    """

    counts: Tensor
    arriving: Tensor
    gathered: Tensor | None
    numbers: Tensor
    ready: Event


@dataclass(frozen=True)
class TokenDispatcher:
    """Dispatch to the experts and combine, over ep and emp.

    Attributes:
        num_experts: E, over all ranks.
        ep: The expert parallel axis, with E / ep experts on each rank.
        emp: The axis over which the features of each expert are sharded.
        sequence_sharded: Positions are sharded over emp, and each of its ranks dispatches its own tokens; otherwise all
            ranks of emp dispatch the same tokens.
        even_splits: Use even splits; all ranks of ep and emp must then allocate the same number of rows.
        comm: Launches the collectives.
    """

    num_experts: int
    ep: Axis
    emp: Axis
    sequence_sharded: bool
    even_splits: bool
    comm: CommContext

    def plan(
        self,
        experts_Tk: Tensor,
        kept_Tk: Tensor | None,
        rows: int,
        exact: bool,
        replay: Replay | None = None,
        counts_kE: Tensor | None = None,
    ) -> DispatchPlan:
        """Plan the dispatch of these pairs.

        Args:
            experts_Tk: The experts of each token.
            kept_Tk: bool; None: every pair is kept.
            rows: With even splits, num_experts times the rows per expert. If no counts are exchanged, at least the
                number of kept pairs, so that the host need not wait for the device. The last expert computes the rows
                beyond the kept pairs as zeros; they have weight 0 and reach no token.
            exact: ``rows`` is the number of kept pairs.
            replay: Of the recomputed unit that contains the layer; its recomputation reuses the counts.
            counts_kE: The kept pairs of each choice, or of all, and expert, if they have been counted.
        """
        if self.even_splits:
            return self._even_plan(experts_Tk, kept_Tk, rows)
        if not self.exchanges_counts:
            order, counts_E, ends_E = sort_by_expert(
                experts_Tk, kept_Tk, self.num_experts, rows, fill=not exact, counts_kE=counts_kE
            )
            return DispatchPlan(order, AllToAll(self.ep), rows, rows, None, counts_E, ends=ends_E)
        pairs = self.sort(experts_Tk, kept_Tk, counts_kE)

        def count() -> tuple[RowCounts, Tensor]:
            row_counts = self.announce(pairs.counts, experts_Tk.numel())
            return row_counts, self.read(row_counts)

        return self.uneven_plan(*once(replay, count), pairs.order)

    def sort(self, experts_Tk: Tensor, kept_Tk: Tensor | None, counts_kE: Tensor | None = None) -> OrderedRows:
        """Sort all pairs by expert, the kept ones first. The device does this while the host waits for the counts.

        Args:
            experts_Tk: The experts of each token.
            kept_Tk: bool; None: every pair is kept.
            counts_kE: The kept pairs of each choice and expert, if they have been counted.
        """
        return sort_by_expert(experts_Tk, kept_Tk, self.num_experts, experts_Tk.numel(), counts_kE=counts_kE)

    def announce(self, counts_E: Tensor, pairs: int, *, aside: bool = False) -> RowCounts:
        """Exchange the counts of rows, without a host wait.

        First over emp, then over ep: over ep the counts queue after the dispatch of the previous slice. In the opposite
        order, collectives over emp that follow, such as the sums of the next slice, would queue after that dispatch.

        Args:
            counts_E: The kept pairs of each expert.
            pairs: All pairs, of which some may not be kept.
            aside: The current stream is not the main one.
        """
        counts = counts_E.view(self.ep.size, -1)
        sharers = gather(counts[None], self.emp, 0) if self.gathers else counts[None]
        # [ep, emp, L]; a copy is sent, because the counts are used later.
        arrived = sharers.transpose(0, 1).clone(memory_format=torch.contiguous_format)
        if self.ep.size > 1:
            flight = self.comm.launch(AllToAll(self.ep, kind="counts"), arrived)
            arrived = self.comm.wait(flight, metered=not aside)
        gathered = arrived.transpose(0, 1).contiguous() if self.gathers else None
        arriving = arrived[:, 0] if gathered is None else gathered[self.emp.rank]
        parts = [counts, arriving] if gathered is None else [counts, arriving, gathered]
        numbers, ready = self.comm.device.host_copy(torch.cat([part.flatten() for part in parts]))
        return RowCounts(counts, arriving, gathered, numbers, ready)

    def read(self, row_counts: RowCounts) -> Tensor:
        """Return counts, arriving (and gathered) on the host: [2 (+ emp), ep, L]. The only host wait."""
        row_counts.ready.synchronize()
        self.comm.count_host_wait(READ)
        return row_counts.numbers.view(-1, *row_counts.counts.shape)

    def uneven_plan(self, row_counts: RowCounts, numbers: Tensor, pairs: ExpertOrder) -> DispatchPlan:
        """Plan uneven splits from the counts.

        Args:
            row_counts: From ``announce``.
            numbers: The counts on the host, from ``read``.
            pairs: All pairs, from ``sort``.
        """
        send, receive = numbers[0].sum(1).tolist(), numbers[1].sum(1).tolist()
        totals = numbers[2:].sum((1, 2)).tolist()
        send_order = kept_rows(pairs, sum(send))
        exchange = AllToAll(self.ep, tuple(send), tuple(receive))
        room = max(totals, default=sum(receive))
        counts = row_counts.arriving[None] if row_counts.gathered is None else row_counts.gathered
        receive_order, counts_L, ends_L = order_by_expert(counts, room, sum(totals or receive))
        arriving = numbers[2:].sum((0, 1)) if totals else numbers[1].sum(0)
        sizes = tuple(arriving.tolist())
        return DispatchPlan(send_order, exchange, sum(receive), room, receive_order, counts_L, sizes=sizes, ends=ends_L)

    def piece(self, counts: Tensor, number: int, pieces: int) -> Tensor:
        """Return the rows of each count in piece ``number`` of ``pieces``: ceil(count / pieces), fewer in the last."""
        share = -torch.div(-counts, pieces, rounding_mode="floor")
        return (counts - number * share).clamp(min=0).minimum(share)

    def dispatch(self, x_TH: Tensor, weights_Tk: Tensor, plan: DispatchPlan) -> tuple[Tensor, Tensor]:
        """Send every kept pair's token and weight to its expert; return the result of ``wait_dispatch``."""
        if self.is_local:
            weights_R = weights_Tk.flatten().index_select(0, plan.send_order.pair)
            return permute(x_TH, plan.send_order), weights_R
        sent = start(plan.exchange, pack(x_TH, weights_Tk, plan.send_order), self.comm)
        return self.wait_dispatch(sent, plan, x_TH.shape[1], weights_Tk.dtype)

    def wait_dispatch(
        self, sent: PendingRows, plan: DispatchPlan, hidden: int, weight_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Wait for (tokens, weights [R_in]): tokens sorted by expert, or as received if a gather over emp follows.

        Weights are in the order of the rows that they multiply (``weighs_inside``).
        """
        if self.gathers:
            return unpack(wait(*sent), hidden, weight_dtype, None, plan.room, sort_weights=False)
        order, inside = plan.receive_order, self.weighs_inside
        return unpack(wait(*sent), hidden, weight_dtype, order, plan.received, sort_weights=inside)

    def start_enter(self, rows_RH: Tensor) -> PendingRows:
        """Launch the copy or all-gather of the rows to all ranks that share the experts."""
        return start(AllGather(self.emp) if self.gathers else Copy(self.emp), rows_RH, self.comm)

    def wait_enter(self, entering: PendingRows, plan: DispatchPlan) -> Tensor:
        """Wait for the rows and return them sorted by expert: [R, H]."""
        rows_RH = wait(*entering)
        if self.gathers and plan.receive_order is not None:
            return permute(rows_RH, plan.receive_order)
        return rows_RH

    def start_leave(self, rows_RH: Tensor, plan: DispatchPlan) -> PendingRows:
        """Launch the sum of the experts' outputs [R, H], partial sums, over the ranks that share the experts."""
        if plan.receive_order is not None:
            rows_RH = unpermute(rows_RH, plan.receive_order)
        return start(ReduceScatter(self.emp) if self.gathers else Reduce(self.emp), rows_RH, self.comm)

    def wait_leave(self, leaving: PendingRows, plan: DispatchPlan) -> Tensor:
        """Wait for the sums and return them in the order in which the rows were received: [R_in, H]."""
        rows_RH = wait(*leaving)
        return rows_RH if self.is_local or len(rows_RH) == plan.received else rows_RH[: plan.received]

    def start_combine(self, rows_RH: Tensor, plan: DispatchPlan, ends_unit: Replay | None) -> PendingRows:
        """Send the weighted outputs [R_in, H] back to the ranks of their tokens, where ``unpermute`` sums them.

        ends_unit: of the recomputed unit that ends with this layer; its recomputation sends nothing, since only the
        unit's output needs the result.
        """
        back = plan.exchange.conjugate()
        # The backward may need the rows sent, for the weights, but not those received.
        output_unused = ends_unit is not None and ends_unit.recomputing
        return start(Unsent(back) if output_unused else back, rows_RH, self.comm)

    @property
    def is_local(self) -> bool:
        """True if all experts are on this rank, each of them whole."""
        return self.ep.size == self.emp.size == 1

    @property
    def weighs_inside(self) -> bool:
        """True if the experts multiply their activations by the gate weights; otherwise their summed outputs are.

        The former are fewer numbers, but give the weights' whole gradient only where experts are whole.
        """
        return self.emp.size == 1

    @property
    def exchanges_counts(self) -> bool:
        """True if ranks must exchange the numbers of rows before the rows."""
        return not self.even_splits and (self.ep.size > 1 or self.gathers)

    @property
    def gathers(self) -> bool:
        """True if each rank of emp receives different rows, which all of its ranks need."""
        return self.sequence_sharded and self.emp.size > 1

    def _even_plan(self, experts_Tk: Tensor, kept_Tk: Tensor | None, rows: int) -> DispatchPlan:
        capacity = rows // self.num_experts
        send_order = spread_by_expert(experts_Tk, kept_Tk, self.num_experts, capacity)
        sources = self.ep.size * (self.emp.size if self.gathers else 1)
        local = self.num_experts // self.ep.size
        receive_order, counts_L, ends_L = transpose_runs(experts_Tk, sources, local, capacity)
        sizes = (sources * capacity,) * local
        exchange = AllToAll(self.ep)
        return DispatchPlan(send_order, exchange, rows, rows, receive_order, counts_L, sizes=sizes, ends=ends_L)
