"""Token permutation: sort tokens by expert, and sum the expert outputs per token, by indices without one-hot matrices.

    tokens [T, H]   a        b        c         each with k choices: pairs a1 a2 b1 b2 c1 c2
    permute         stable sort of the pairs by expert, one row per kept pair
    rows [R, H]     a2 c1 | b1 | a1 b2 c2       experts 0, 1, 2
    unpermute       sum each token's rows, after multiplication by the gate weights (``weigh``)

``permute`` and ``unpermute`` are adjoint: the backward of each is the forward of the other. Only indices are saved.
The token dispatcher (``token_dispatcher``) uses both, and sends the rows between ranks.

Shape letters: T tokens, k choices per token, H hidden, E experts, R rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megapar.core.device.ops import op
from megapar.moe.stats import count_pairs


class ExpertOrder(NamedTuple):
    """The order of rows sorted by expert: a map between rows and (token, choice) pairs.

    Pairs are numbered token · k + choice.

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


def weigh(rows_RH: Tensor, weights_R: Tensor) -> Tensor:
    """Multiply each row by its weight, rounded to the rows' dtype first: [R, H]."""
    return rows_RH * weights_R.to(rows_RH.dtype)[:, None]


def sort_by_expert(experts_Tk: Tensor, kept_Tk: Tensor | None, num_experts: int, rows: int) -> ExpertOrder:
    """Return the order that sorts the kept pairs by expert into ``rows`` rows, at least as many as there are pairs.

    Pairs of one expert stay in token order.
    """
    key = experts_Tk if kept_Tk is None else torch.where(kept_Tk, experts_Tk, num_experts)
    order = torch.sort(key.flatten(), stable=True).indices
    row = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    if rows < order.numel():
        order, row = order[:rows], row.clamp(max=max(rows - 1, 0))
    return ExpertOrder(order, row.view_as(experts_Tk), kept_Tk, None)


def fill_last_expert_(order: ExpertOrder, counts_E: Tensor) -> ExpertOrder:
    """Give the rows beyond the kept pairs to the last expert, and add them to the kept pairs ``counts_E``."""
    rows, num_kept = order.pair.shape[0], counts_E.sum()
    counts_E[-1] += rows - num_kept
    return order._replace(row_kept=torch.arange(rows, device=counts_E.device) < num_kept)


def spread_by_expert(experts_Tk: Tensor, kept_Tk: Tensor | None, num_experts: int, capacity: int) -> ExpertOrder:
    """Return the order that gives every expert ``capacity`` rows, its kept pairs first, in token order.

    No expert may have more kept pairs than ``capacity``. The host does not wait for the device.
    """
    key = (experts_Tk if kept_Tk is None else torch.where(kept_Tk, experts_Tk, num_experts)).flatten()
    order = torch.sort(key, stable=True).indices
    counts_E = count_pairs(experts_Tk, kept_Tk, num_experts).sum(0)
    sorted_key, rows = key[order], num_experts * capacity
    first = F.pad(counts_E.cumsum(0), (1, 0))
    place = torch.arange(order.numel(), device=order.device) - first[sorted_key]
    # Pairs that are not kept share one row after the last, which is cut off.
    row_sorted = torch.where(sorted_key < num_experts, sorted_key * capacity + place, rows)
    pair = order.new_zeros(rows + 1).scatter_(0, row_sorted, order)[:rows]
    row = torch.empty_like(order).scatter_(0, order, row_sorted).clamp(max=max(rows - 1, 0))
    row_kept = torch.arange(capacity, device=order.device) < counts_E[:, None]
    return ExpertOrder(pair, row.view_as(experts_Tk), kept_Tk, row_kept.flatten())


def permute(x_TH: Tensor, order: ExpertOrder) -> Tensor:
    """Copy the token of each row, zeros beyond the kept pairs: [R, H]. The backward is ``unpermute``."""
    rows_RH: Tensor = _Permute.apply(x_TH, *order)
    return rows_RH


def unpermute(rows_RH: Tensor, order: ExpertOrder) -> Tensor:
    """Sum each token's rows: [T, H]. The backward is ``permute``."""
    y_TH: Tensor = _Unpermute.apply(rows_RH, *order)
    return y_TH


class _Permute(torch.autograd.Function):
    # The order is passed as saved tensors, so that recomputation and offloading hooks see it.
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, *order: Any) -> Tensor:
        ctx.save_for_backward(*order)
        return _gather(x_TH, ExpertOrder(*order))

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
        return _gather(grad_TH, ExpertOrder(*ctx.saved_tensors)), None, None, None, None


def _gather(x_TH: Tensor, order: ExpertOrder) -> Tensor:
    rows_RH = op("permute", x_TH)(x_TH, order.pair, order.row, order.pair_kept)
    if order.row_kept is None:
        return rows_RH
    return rows_RH.masked_fill_(~order.row_kept[:, None], 0)


def gather_sum(rows_RH: Tensor, order: ExpertOrder) -> Tensor:
    """Compute ``unpermute`` outside autograd."""
    num_tokens, topk = order.row.shape
    if rows_RH.shape[0] == 0 or num_tokens == 0:
        return rows_RH.new_zeros(num_tokens, rows_RH.shape[1])
    kept = order.pair_kept
    if topk == 1:
        y_TH = rows_RH.index_select(0, order.row.flatten())
        return y_TH if kept is None else y_TH.masked_fill_(~kept, 0)
    return op("unpermute", rows_RH)(rows_RH, order.row, kept)
