"""The plain dispatch: sends tokens to their experts, on this rank or on others, and the expert outputs back.

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

Pipe-experts divide a message by local expert, and each expert's kept rows into N pieces that are sent one at a time, so
that the collectives of one piece are hidden under the computation of another:

    message   expert 0: piece 0 | piece 1 | expert 1: piece 0 | piece 1     each: rows for rank 0, rank 1, ..

Only kept rows are divided, not padding: of m rows that a rank has for an expert, a piece contains ceil(m / N), and the
last pieces may be empty. Both ends have m from the single exchange of counts.

Shape letters: T tokens, k choices per token, H hidden, E experts, L experts on this rank, R rows, C rows per expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megapar.core.comm.async_pairs import MessageBuilder, start, wait
from megapar.core.comm.autograd import gather
from megapar.core.comm.exchange import AllToAll
from megapar.core.device.base import Event
from megapar.core.recompute.replay import Replay, once
from megapar.moe.dispatcher import READ, Dispatcher, DispatchPlan, PendingRows, RoutedPairs, unsent_if_unused
from megapar.moe.expert_order import (
    ExpertOrder,
    OrderedRows,
    kept_rows,
    order_by_expert,
    permute,
    sort_by_expert,
    spread_by_expert,
    transpose_runs,
)
from megapar.moe.message import RowsOfTokens, pack, unpack


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
class TokenDispatcher(Dispatcher):
    """Dispatch of a row for each (token, expert)."""

    def plan(
        self,
        experts_Tk: Tensor,
        kept_Tk: Tensor | None,
        rows: int,
        exact: bool,
        replay: Replay | None = None,
        counts_kE: Tensor | None = None,
    ) -> DispatchPlan:
        """See ``Dispatcher.plan``."""
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

    def count(self, pairs: RoutedPairs, pieces: int, *, aside: bool = False) -> tuple[OrderedRows, RowCounts]:
        """See ``Dispatcher.count``."""
        ordered = self.sort(*pairs)
        return ordered, self.announce(ordered.counts, pairs.experts.numel(), aside=aside)

    def plan_counted(
        self, counted: tuple[OrderedRows, RowCounts], pieces: int
    ) -> tuple[ExpertOrder, tuple[DispatchPlan, ...]]:
        """See ``Dispatcher.plan_counted``."""
        pairs, row_counts = counted
        if pieces:
            return piece_plans(self, row_counts, pairs.order, pieces)
        plan = self.uneven_plan(row_counts, self.read(row_counts), pairs.order)
        return plan.send_order, (plan,)

    def message(self, order: ExpertOrder, plan: DispatchPlan, hidden: int, weight_dtype: torch.dtype) -> MessageBuilder:
        """See ``Dispatcher.message``."""
        return RowsOfTokens(order, hidden, weight_dtype)

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
        """See ``Dispatcher.dispatch``."""
        if self.is_local:
            weights_R = weights_Tk.flatten().index_select(0, plan.send_order.pair)
            return permute(x_TH, plan.send_order), weights_R
        sent = start(plan.exchange, pack(x_TH, weights_Tk, plan.send_order), self.comm)
        return self.wait_dispatch(sent, plan, x_TH.shape[1], weights_Tk.dtype)

    def wait_dispatch(
        self, sent: PendingRows, plan: DispatchPlan, hidden: int, weight_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Wait for (tokens, weights [R_in]): tokens sorted by expert, or as received if a gather over emp follows."""
        if self.gathers:
            return unpack(wait(*sent), hidden, weight_dtype, None, plan.room, sort_weights=False)
        order, inside = plan.receive_order, self.weighs_inside
        return unpack(wait(*sent), hidden, weight_dtype, order, plan.received, sort_weights=inside)

    def start_combine(self, rows_RH: Tensor, plan: DispatchPlan, ends_unit: Replay | None) -> PendingRows:
        """See ``Dispatcher.start_combine``."""
        return start(unsent_if_unused(plan.exchange.conjugate(), ends_unit), rows_RH, self.comm)

    def _even_plan(self, experts_Tk: Tensor, kept_Tk: Tensor | None, rows: int) -> DispatchPlan:
        capacity = rows // self.num_experts
        send_order = spread_by_expert(experts_Tk, kept_Tk, self.num_experts, capacity)
        sources = self.ep.size * (self.emp.size if self.gathers else 1)
        local = self.num_experts // self.ep.size
        receive_order, counts_L, ends_L = transpose_runs(experts_Tk, sources, local, capacity)
        sizes = (sources * capacity,) * local
        exchange = AllToAll(self.ep)
        return DispatchPlan(send_order, exchange, rows, rows, receive_order, counts_L, sizes=sizes, ends=ends_L)


def piece_plans(
    dispatcher: TokenDispatcher, row_counts: RowCounts, pairs: ExpertOrder, pieces: int
) -> tuple[ExpertOrder, tuple[DispatchPlan, ...]]:
    """Return (order of the whole message, its L · pieces plans in the order in which they are sent).

    Args:
        dispatcher: Plans the messages.
        pairs: All pairs sorted by expert, by the dispatcher.
        pieces: N.
    """
    numbers = dispatcher.read(row_counts)
    parts = [dispatcher.piece(numbers, n, pieces) for n in range(pieces)]  # each [2 (+ emp), ep, L]
    own = [dispatcher.piece(row_counts.counts, n, pieces) for n in range(pieces)]
    order = _reorder(kept_rows(pairs, int(numbers[0].sum())), row_counts.counts, own)
    gathered: list[Tensor | None] = [None] * pieces
    if row_counts.gathered is not None:
        gathered = [dispatcher.piece(row_counts.gathered, n, pieces) for n in range(pieces)]
    plans = [
        _plan(dispatcher, order, part, of_all, expert)
        for expert in range(numbers.shape[2])
        for part, of_all in zip(parts, gathered, strict=True)
    ]
    return order, tuple(plans)


def _reorder(order: ExpertOrder, counts: Tensor, parts: list[Tensor]) -> ExpertOrder:
    """Reorder rows sorted by (rank, expert) to rows sorted by (expert, piece, rank).

    counts, parts: [ep, L], on the device, so that the host's copies need not be sent back.
    """
    rows = order.pair.shape[0]
    if not rows:
        return order
    starts = (counts.flatten().cumsum(0) - counts.flatten()).view_as(counts)
    lengths = torch.stack(parts).permute(2, 0, 1)  # [L, N, ep]
    begins = torch.stack([starts + sum(parts[:n]) for n in range(len(parts))]).permute(2, 0, 1)
    lengths, begins = lengths.flatten(), begins.flatten()
    shift = begins - (lengths.cumsum(0) - lengths)
    old = torch.arange(rows, device=shift.device) + torch.repeat_interleave(shift, lengths, output_size=rows)
    new = torch.empty_like(old).scatter_(0, old, torch.arange(rows, device=old.device))
    return order._replace(pair=order.pair[old], row=new[order.row])


def _plan(
    dispatcher: TokenDispatcher, order: ExpertOrder, part: Tensor, gathered: Tensor | None, expert: int
) -> DispatchPlan:
    """Plan one piece: rows of one expert from every rank.

    part: the piece's counts [2 (+ emp), ep, L] on the host. gathered: its counts [emp, ep, L] on the device.
    """
    send, receive = (tuple(part[way, :, expert].tolist()) for way in (0, 1))
    received = sum(receive)
    room, receive_order = received, None
    if gathered is not None:
        known = part[2:, :, expert]
        room = int(known.sum(1).max())
        receive_order = order_by_expert(gathered[:, :, expert].unsqueeze(2), room, int(known.sum())).order
    return DispatchPlan(
        send_order=order,
        exchange=AllToAll(dispatcher.ep, send, receive),
        received=received,
        room=room,
        receive_order=receive_order,
        counts=None,
        expert=expert,
    )
