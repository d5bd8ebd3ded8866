"""Token permutation: sort tokens by expert, and sum the expert outputs per token, by indices without one-hot matrices.

    tokens [T, H]   a        b        c         each with k choices: pairs a1 a2 b1 b2 c1 c2
    permute         stable sort of the pairs by expert, one row per kept pair
    rows [R, H]     a2 c1 | b1 | a1 b2 c2       experts 0, 1, 2
    unpermute       sum each token's rows, after multiplication by the gate weights (``weigh``)

``permute`` and ``unpermute`` are adjoint: the backward of each is the forward of the other. Only indices are saved.
The host waits for the device nowhere.

Shape letters: T tokens, k choices per token, H hidden, E experts, R rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megapar.core.device.ops import op


class ExpertOrder(NamedTuple):
    """The order of rows sorted by expert: a map between rows and (token, choice) pairs, numbered token · k + choice.

    Attributes:
        pair: [R] int64, the pair of each row; rows are sorted by expert, then by pair.
        row: [T, k] int64, the row of each pair; arbitrary if the pair is not kept.
        pair_kept: [T, k] bool; None: every pair is kept.
        row_kept: [R] bool, False for rows beyond the kept pairs; None: all rows have a pair.
    """

    pair: Tensor
    row: Tensor
    pair_kept: Tensor | None
    row_kept: Tensor | None


class OrderedRows(NamedTuple):
    """An order of rows, and the rows of each expert in it.

    Attributes:
        counts: [E] int64, rows of each expert.
        ends: [E] int32, the row after the last one of each expert, if the device computed it as well.
    """

    order: ExpertOrder
    counts: Tensor
    ends: Tensor | None


def weigh(rows_RH: Tensor, weights_R: Tensor) -> Tensor:
    """Multiply each row by its weight, rounded to the rows' dtype first: [R, H]."""
    return rows_RH * weights_R.to(rows_RH.dtype)[:, None]


def sort_by_expert(
    experts_Tk: Tensor,
    kept_Tk: Tensor | None,
    num_experts: int,
    rows: int,
    *,
    fill: bool = False,
    counts_kE: Tensor | None = None,
) -> OrderedRows:
    """Return the order that sorts the kept pairs by expert into ``rows`` rows, pairs of one expert in token order.

    Args:
        rows: R, from the number of kept pairs to that of all pairs.
        fill: Give the rows beyond the kept pairs to the last expert.
        counts_kE: The kept pairs of each choice and expert, if they have been counted.
    """
    sort: Callable[..., Any] = op("sort_pairs", experts_Tk)
    made = sort(experts_Tk, kept_Tk, num_experts, rows, fill=fill, counts_kE=counts_kE)
    return OrderedRows(ExpertOrder(made.pair, made.row, kept_Tk, made.kept), made.counts, made.ends)


def kept_rows(order: ExpertOrder, rows: int) -> ExpertOrder:
    """Cut an order of all pairs off after its first ``rows`` rows, those of the kept pairs."""
    if rows == order.pair.shape[0]:
        return order
    # Pairs without a row name any row of the order.
    return order._replace(pair=order.pair[:rows], row=order.row.clamp(max=max(rows - 1, 0)))


def spread_by_expert(experts_Tk: Tensor, kept_Tk: Tensor | None, num_experts: int, capacity: int) -> ExpertOrder:
    """Return the order that gives every expert ``capacity`` rows, its kept pairs first, in token order.

    No expert may have more kept pairs than ``capacity``.
    """
    pair, row, row_kept = op("spread_pairs", experts_Tk)(experts_Tk, kept_Tk, num_experts, capacity)
    return ExpertOrder(pair, row, kept_Tk, row_kept)


def order_by_expert(counts_NSL: Tensor, room: int, rows: int) -> OrderedRows:
    """Return the order that sorts gathered rows by expert, without padding; rows of one expert keep their order.

    Args:
        counts_NSL: int64, rows in block n from source s for expert l, in this order; their sum is ``rows``.
        room: Rows of each block, including padding.
    """
    made: Any = op("order_runs", counts_NSL)(counts_NSL, room, rows)
    return OrderedRows(ExpertOrder(made.pair, made.row, made.kept, None), made.counts, made.ends)


def transpose_runs(like: Tensor, sources: int, experts: int, length: int) -> OrderedRows:
    """Return ``order_by_expert`` if each of ``sources`` sends ``length`` rows to each expert. like: A tensor there."""
    made: Any = op("order_equal_runs", like)(like, sources, experts, length)
    return OrderedRows(ExpertOrder(made.pair, made.row, None, None), made.counts, made.ends)


def permute(x_TH: Tensor, order: ExpertOrder) -> Tensor:
    """Copy the token of each row, zeros beyond the kept pairs: [R, H]. The backward is ``unpermute``."""
    return _Permute.apply(x_TH, *order)


def unpermute(rows_RH: Tensor, order: ExpertOrder) -> Tensor:
    """Sum each token's rows: [T, H]. The backward is ``permute``."""
    return _Unpermute.apply(rows_RH, *order)


class _Permute(torch.autograd.Function):
    # The order is passed as saved tensors, so that recomputation and offloading hooks see it.
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, *order: Any) -> Tensor:
        ctx.save_for_backward(*order)
        return gather_rows(x_TH, ExpertOrder(*order))

    @staticmethod
    def backward(ctx: Any, grad_RH: Tensor) -> tuple[Tensor, None, None, None, None]:
        return gather_sum(grad_RH, ExpertOrder(*ctx.saved_tensors)), None, None, None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RH: Tensor, *order: Any) -> Tensor:
        ctx.save_for_backward(*order)
        return gather_sum(rows_RH, ExpertOrder(*order))

    @staticmethod
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor, None, None, None, None]:
        return gather_rows(grad_TH, ExpertOrder(*ctx.saved_tensors)), None, None, None, None


def gather_rows(x_TH: Tensor, order: ExpertOrder) -> Tensor:
    """Compute ``permute`` outside autograd."""
    return op("permute", x_TH)(x_TH, *order)


def gather_sum(rows_RH: Tensor, order: ExpertOrder) -> Tensor:
    """Compute ``unpermute`` outside autograd."""
    num_tokens = order.row.shape[0]
    if rows_RH.shape[0] == 0 or num_tokens == 0:
        return rows_RH.new_zeros(num_tokens, rows_RH.shape[1])
    return op("unpermute", rows_RH)(rows_RH, order.row, order.pair_kept)
