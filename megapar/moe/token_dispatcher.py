"""The plain dispatch: sends tokens to their experts, on this rank or on others, and the expert outputs back.

    tokens [T, H] --pack--> message [R_out, H + w], sorted by expert, so by rank (w: the weight)
        dispatch   all-to-all over ep           received [R_in, H + w]: from each rank, its rows by expert
        enter      tokens replicated over mp:   sort by expert, copy over emp (backward: all-reduce)
                   tokens sharded over mp:      all-gather over emp, then sort by expert
        experts    each rank of emp has F/emp features of every expert here: partial sums
        leave      replicated:                  back in received order, all-reduce over emp
                   sharded:                     back in gathered order, reduce-scatter over emp
                   times the gate weights, received with the tokens: from here on the sums are complete; whole
                   experts (emp = 1) multiply their activations instead (``experts_apply_gate_weights``)
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

The gate weights are sent along because they are multiplied on the expert's rank, so the backward never needs the result
of the combine. They share one message because every collective has a fixed cost:

    message [R, H + w]   x x x x x ... | g g - -   one row per pair; the first of w columns hold the weight's bits

Weights are max(fp32, dtype) and keep all their bits: in bf16 a weight takes two columns. A row is a multiple of 16
bytes, so that with any splits each rank's part is aligned: NCCL copies unaligned parts byte by byte (nccl#413). The
columns after the weight are padding, which is never written or read.

Shape letters: T tokens, k choices per token, H hidden, E experts, L experts on this rank, R rows, w columns
after the token, S ranks of emp that gather rows (or 1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megapar.core.comm.async_pairs import MessageBuilder, start, wait
from megapar.core.comm.autograd import all_gather_replicated
from megapar.core.comm.exchange import AllToAll
from megapar.core.device.ops import op
from megapar.core.recompute.replay import Replay
from megapar.moe.dispatch_bytes import row_columns
from megapar.moe.dispatcher import Dispatcher, DispatchPlan, PendingRows, RoutedPairs, RowCounts, unsent_if_unused
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


@dataclass(frozen=True)
class TokenDispatcher(Dispatcher[DispatchPlan]):
    """Dispatch of a row for each (token, expert)."""

    def plan(self, pairs: RoutedPairs, rows: int, exact: bool, replay: Replay | None = None) -> DispatchPlan:
        if self.even_splits:
            return self._even_plan(pairs, rows)
        if self.exchanges_counts:
            return super().plan(pairs, rows, exact, replay)
        order, counts_E, ends_E = sort_by_expert(
            pairs.experts, pairs.kept, self.num_experts, rows, fill=not exact, counts_kE=pairs.counts
        )
        return DispatchPlan(order, AllToAll(self.ep), rows, rows, None, counts_E, ends=ends_E)

    def sort(self, pairs: RoutedPairs, pieces: int) -> OrderedRows:
        experts_Tk, kept_Tk, counts_kE = pairs
        return sort_by_expert(experts_Tk, kept_Tk, self.num_experts, experts_Tk.numel(), counts_kE=counts_kE)

    def exchange_counts(self, ordered: OrderedRows, *, on_side_stream: bool = False) -> RowCounts:
        counts = ordered.counts.view(self.ep.size, -1)
        sharers = all_gather_replicated(counts[None], self.emp, 0) if self.gathers_rows_over_emp else counts[None]
        # [ep, S, L]; a copy is sent, because the counts are used later.
        arrived = sharers.transpose(0, 1).clone(memory_format=torch.contiguous_format)
        if self.ep.size > 1:
            flight = self.comm.launch(AllToAll(self.ep, kind="counts"), arrived)
            arrived = self.comm.wait(flight, metered=not on_side_stream)
        arriving = arrived.transpose(0, 1).contiguous()
        return RowCounts(arriving, *self.comm.device.host_copy(torch.cat([counts[None], arriving])))

    def plans(self, ordered: OrderedRows, counts: RowCounts, numbers: Tensor, pieces: int) -> tuple[DispatchPlan, ...]:
        order = kept_rows(ordered.order, int(numbers[0].sum()))
        if pieces:
            own = ordered.counts.view(self.ep.size, -1)
            return self._piece_plans(order, own, counts.arriving, numbers, pieces)
        send, receive = (tuple(way.sum(1).tolist()) for way in self._ways(numbers))
        totals = numbers[1:].sum((1, 2)).tolist()
        received = order_by_expert(counts.arriving, max(totals), sum(totals))
        return (
            DispatchPlan(
                order,
                AllToAll(self.ep, send, receive),
                received=sum(receive),
                room=max(totals),
                receive_order=received.order,
                counts=received.counts,
                sizes=tuple(numbers[1:].sum((0, 1)).tolist()),
                ends=received.ends,
            ),
        )

    def _ways(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return the numbers of rows that this rank sends, and of those that it receives: [ep, L] each."""
        return numbers[0], numbers[1 + (self.emp.rank if self.gathers_rows_over_emp else 0)]

    def piece(self, counts: Tensor, number: int, pieces: int) -> Tensor:
        """Return the rows of each count in piece ``number`` of ``pieces``: ceil(count / pieces), fewer in the last."""
        share = -torch.div(-counts, pieces, rounding_mode="floor")
        return (counts - number * share).clamp(min=0).minimum(share)

    def _piece_plans(
        self, order: ExpertOrder, counts: Tensor, arriving: Tensor, numbers: Tensor, pieces: int
    ) -> tuple[DispatchPlan, ...]:
        """Return the plans of the L · pieces messages. order: The kept rows, sorted by expert."""
        parts = [self.piece(numbers, n, pieces) for n in range(pieces)]  # each [1 + S, ep, L]
        order = _reorder(order, counts, [self.piece(counts, n, pieces) for n in range(pieces)])
        on_device: list[Tensor | None] = [None] * pieces
        if self.gathers_rows_over_emp:
            on_device = [self.piece(arriving, n, pieces) for n in range(pieces)]
        return tuple(
            self._piece_plan(order, part, arriving_part, expert)
            for expert in range(numbers.shape[2])
            for part, arriving_part in zip(parts, on_device, strict=True)
        )

    def _piece_plan(self, order: ExpertOrder, part: Tensor, arriving: Tensor | None, expert: int) -> DispatchPlan:
        """Plan one piece, rows of one expert, from its counts on the host, and ``arriving`` on the device."""
        send, receive = (tuple(way[:, expert].tolist()) for way in self._ways(part))
        received = sum(receive)
        room, receive_order = received, None
        if arriving is not None:
            gathered = part[1:, :, expert]
            room = int(gathered.sum(1).max())
            receive_order = order_by_expert(arriving[:, :, expert].unsqueeze(2), room, int(gathered.sum())).order
        return DispatchPlan(order, AllToAll(self.ep, send, receive), received, room, receive_order, None, expert)

    def message(self, plan: DispatchPlan, hidden: int, weight_dtype: torch.dtype) -> MessageBuilder:
        return TokenMessage(plan.send_order, hidden, weight_dtype)

    def dispatch(self, x_TH: Tensor, weights_Tk: Tensor, plan: DispatchPlan) -> tuple[Tensor, Tensor]:
        if self.is_local:
            weights_R = weights_Tk.flatten().index_select(0, plan.send_order.pair)
            return permute(x_TH, plan.send_order), weights_R
        sent = start(plan.exchange, pack(x_TH, weights_Tk, plan.send_order), self.comm)
        return self.wait_dispatch(sent, plan, x_TH.shape[1], weights_Tk.dtype)

    def wait_dispatch(
        self, sent: PendingRows, plan: DispatchPlan, hidden: int, weight_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Wait for (tokens, weights [R_in]): tokens sorted by expert, or as received if a gather over emp follows."""
        if self.gathers_rows_over_emp:
            return unpack(wait(*sent), hidden, weight_dtype, None, plan.room, sort_weights=False)
        order, sort_weights = plan.receive_order, self.experts_apply_gate_weights
        return unpack(wait(*sent), hidden, weight_dtype, order, plan.received, sort_weights=sort_weights)

    def start_combine(self, rows_RH: Tensor, plan: DispatchPlan, ends_unit: Replay | None) -> PendingRows:
        return start(unsent_if_unused(plan.exchange.conjugate(), ends_unit), rows_RH, self.comm)

    def _even_plan(self, pairs: RoutedPairs, rows: int) -> DispatchPlan:
        capacity = rows // self.num_experts
        send_order = spread_by_expert(pairs.experts, pairs.kept, self.num_experts, capacity)
        sources = self.ep.size * (self.emp.size if self.gathers_rows_over_emp else 1)
        local = self.num_experts // self.ep.size
        received = transpose_runs(pairs.experts, sources, local, capacity)
        sizes = (sources * capacity,) * local
        exchange = AllToAll(self.ep)
        return DispatchPlan(
            send_order, exchange, rows, rows, received.order, received.counts, sizes=sizes, ends=received.ends
        )


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


def pack(x_TH: Tensor, weights_Tk: Tensor, order: ExpertOrder) -> Tensor:
    """Build the message [R, H + w]: token and weight of each row, zeros in rows without a pair; padding is not set."""
    return _Pack.apply(x_TH, weights_Tk, *order)


def unpack(
    message: Tensor, hidden: int, dtype: torch.dtype, order: ExpertOrder | None, room: int, *, sort_weights: bool
) -> tuple[Tensor, Tensor]:
    """Split a message into (tokens [room, H], weights [R] of ``dtype``).

    Args:
        order: Sorts the tokens; None: leave them in message order, with zeros up to ``room`` rows.
        sort_weights: Sort the weights likewise; otherwise they stay in message order, in which the rows are sent back.
    """
    return _Unpack.apply(message, hidden, dtype, room, sort_weights, *(order or ()))


def fill(x_TH: Tensor, weights_Tk: Tensor, order: ExpertOrder) -> Tensor:
    """Compute ``pack`` outside autograd."""
    columns = _columns(x_TH.shape[1], weights_Tk.dtype, x_TH.dtype)
    pairs = (order.pair, order.row_kept, order.row.shape[1])
    return op("pack", x_TH)(x_TH, weights_Tk.flatten(), columns, *pairs)


def unpack_gradient(grad: Tensor, order: ExpertOrder, hidden: int, weight_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Split a message's gradient into (dx [T, H], dweights [T, k])."""
    split: Callable[..., Any] = op("sum_message", grad)
    grad_TH, grad_Tk = split(grad, hidden, weight_dtype, order.row, order.pair_kept)
    return grad_TH, grad_Tk


@dataclass(frozen=True)
class TokenMessage:
    """A message for ``async_pairs.defer``: tokens and weights, in an order determined after the node was made."""

    order: ExpertOrder
    hidden: int
    weight_dtype: torch.dtype

    def build(self, *inputs: Tensor) -> Tensor:
        x_TH, weights_Tk = inputs
        return fill(x_TH, weights_Tk, self.order)

    def gradients(self, grad: Tensor) -> tuple[Tensor | None, ...]:
        return unpack_gradient(grad, self.order, self.hidden, self.weight_dtype)


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, weights_Tk: Tensor, *fields: Any) -> Tensor:
        ctx.save_for_backward(*fields)
        ctx.hidden, ctx.weight_dtype = x_TH.shape[1], weights_Tk.dtype
        return fill(x_TH, weights_Tk, ExpertOrder(*fields))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        order = ExpertOrder(*ctx.saved_tensors)
        return *unpack_gradient(grad, order, ctx.hidden, ctx.weight_dtype), *(None,) * len(order)


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, message: Tensor, hidden: int, dtype: torch.dtype, room: int, sort_weights: bool, *fields: Any
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*fields)
        ctx.received, ctx.fields, ctx.sort_weights = message.shape[0], len(fields), sort_weights
        pair_R = ExpertOrder(*fields).pair if fields else None
        split: Callable[..., Any] = op("unpack", message)
        tokens, weights_R = split(message, hidden, dtype, pair_R, room, sort_weights=sort_weights)
        return tokens, weights_R

    @staticmethod
    def backward(ctx: Any, grad_RH: Tensor, grad_R: Tensor) -> tuple[Tensor | None, ...]:
        columns = _columns(grad_RH.shape[1], grad_R.dtype, grad_RH.dtype)
        if ctx.fields and ctx.received:
            row_R = ExpertOrder(*ctx.saved_tensors).row.flatten()
            grad = op("pack", grad_RH)(grad_RH, grad_R, columns, row_R, sort_weights=ctx.sort_weights)
        else:
            grad = op("pack", grad_RH)(grad_RH[: ctx.received], grad_R, columns, None)
        return grad, None, None, None, None, *(None,) * ctx.fields


def _columns(hidden: int, weight: torch.dtype, row: torch.dtype) -> int:
    """Return the elements of dtype ``row`` in a row, H + w."""
    return row_columns(hidden, weight.itemsize, row.itemsize)
