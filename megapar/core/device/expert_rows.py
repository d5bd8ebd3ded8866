"""Rows of experts: their orders, copies of tokens in these orders, messages of tokens and weights, and sums of rows.

Every form gives the same numbers, but for sums, which are taken in max(fp32, dtype), in the order of a token's choices.

Shape letters: T tokens, k choices per token, H hidden, E experts, L experts on this rank, R rows, w columns of a
weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megapar.core.device import triton_operators


class RowOrder(NamedTuple):
    """An order of rows with the rows of each expert.

    Attributes:
        pair: [R] int64, the pair of each row.
        row: [T, k] int64, the row of each pair; of pairs that are not kept, any row.
        kept: bool; for ``sort_pairs`` [R], False for rows without a kept pair; for ``order_runs`` [T, 1], False for
            places without a row. None: all are kept.
        counts: [E] int64, rows of each expert.
        ends: [E] int32, the row after the last one of each expert, as ``grouped_mm`` takes it; None: not computed.
    """

    pair: Tensor
    row: Tensor
    kept: Tensor | None
    counts: Tensor
    ends: Tensor | None


def sort_pairs_reference(
    experts_Tk: Tensor,
    kept_Tk: Tensor | None,
    num_experts: int,
    rows: int,
    *,
    fill: bool = False,
    counts_kE: Tensor | None = None,
) -> RowOrder:
    """Sort the kept pairs by expert into ``rows`` rows; pairs of one expert stay in token order.

    Args:
        kept_Tk: bool; None: every pair is kept.
        rows: R, from the number of kept pairs to that of all.
        fill: Give the rows beyond the kept pairs to the last expert; they have a pair, but are not kept.
        counts_kE: The kept pairs of each choice and expert, if they have been counted.
    """
    key = _keys(experts_Tk, kept_Tk, num_experts)
    order = torch.sort(key, stable=True).indices
    row = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    if rows < order.numel():
        order, row = order[:rows], row.clamp(max=max(rows - 1, 0))
    counts_E = _counts(key, num_experts) if counts_kE is None else counts_kE.sum(0)
    kept_R = None
    if fill:
        num_kept = counts_E.sum()
        kept_R = torch.arange(rows, device=order.device) < num_kept
        counts_E[-1] += rows - num_kept
    return RowOrder(order, row.view_as(experts_Tk), kept_R, counts_E, None)


def sort_pairs_cuda(
    experts_Tk: Tensor,
    kept_Tk: Tensor | None,
    num_experts: int,
    rows: int,
    *,
    fill: bool = False,
    counts_kE: Tensor | None = None,
) -> RowOrder:
    """Compute ``sort_pairs_reference`` by counting, in two passes over the pairs."""
    if not triton_operators.takes_experts(experts_Tk, num_experts):
        return sort_pairs_reference(experts_Tk, kept_Tk, num_experts, rows, fill=fill, counts_kE=counts_kE)
    pair, row, kept, counts, ends = triton_operators.sort_pairs(experts_Tk, kept_Tk, num_experts, rows, None, fill=fill)
    return RowOrder(pair, row, kept if fill else None, counts, ends)


def spread_pairs_reference(
    experts_Tk: Tensor, kept_Tk: Tensor | None, num_experts: int, capacity: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the kept pairs by expert, with ``capacity`` rows for each: (pair [R], row [T, k], row_kept [R]).

    No expert may have more kept pairs than ``capacity``. The host does not wait for the device.
    """
    key = _keys(experts_Tk, kept_Tk, num_experts)
    order = torch.sort(key, stable=True).indices
    counts_E = _counts(key, num_experts)
    sorted_key, rows = key[order], num_experts * capacity
    first = F.pad(counts_E.cumsum(0), (1, 0))
    place = torch.arange(order.numel(), device=order.device) - first[sorted_key]
    # Pairs that are not kept share one row after the last, which is cut off.
    row_sorted = torch.where(sorted_key < num_experts, sorted_key * capacity + place, rows)
    pair = order.new_zeros(rows + 1).scatter_(0, row_sorted, order)[:rows]
    row = torch.empty_like(order).scatter_(0, order, row_sorted).clamp(max=max(rows - 1, 0))
    row_kept = torch.arange(capacity, device=order.device) < counts_E[:, None]
    return pair, row.view_as(experts_Tk), row_kept.flatten()


def spread_pairs_cuda(
    experts_Tk: Tensor, kept_Tk: Tensor | None, num_experts: int, capacity: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``spread_pairs_reference`` by counting, in two passes over the pairs."""
    if not triton_operators.takes_experts(experts_Tk, num_experts):
        return spread_pairs_reference(experts_Tk, kept_Tk, num_experts, capacity)
    rows = num_experts * capacity
    return triton_operators.sort_pairs(experts_Tk, kept_Tk, num_experts, rows, capacity, fill=False)[:3]


def order_runs_reference(counts_NSL: Tensor, room: int, rows: int) -> RowOrder:
    """Return the order that sorts gathered rows by expert; rows of one expert keep theirs, padding is left out.

    Args:
        counts_NSL: int64, rows in block n from source s for expert l, in this order.
        room: Rows of each block, including padding.
        rows: The sum of the counts, on the host.
    """
    blocks, device, total = counts_NSL.shape[0], counts_NSL.device, room * counts_NSL.shape[0]
    # The rows come in runs, one per count. Sorting moves whole runs, so no key of a row is compared.
    ends_LNS = counts_NSL.permute(2, 0, 1).flatten().cumsum(0)
    come_NSL = counts_NSL.flatten(1).cumsum(1).view_as(counts_NSL)
    if blocks > 1:
        come_NSL = come_NSL + room * torch.arange(blocks, device=device)[:, None, None]
    come_LNS = come_NSL.permute(2, 0, 1)
    ahead_Q = (ends_LNS.view(come_LNS.shape) - come_LNS).flatten()  # places that each run moves towards the end
    place_R = torch.arange(rows, device=device)
    pair_R = place_R - ahead_Q.index_select(0, torch.searchsorted(ends_LNS, place_R, right=True))
    counts_L = counts_NSL.sum((0, 1))
    if rows == total:
        row_P = torch.empty_like(pair_R).scatter_(0, pair_R, place_R)
        return RowOrder(pair_R, row_P[:, None], None, counts_L, None)
    row_P, real_P = place_R.new_zeros(total), place_R.new_zeros(total, dtype=torch.bool)
    row_P.scatter_(0, pair_R, place_R)
    return RowOrder(pair_R, row_P[:, None], real_P.scatter_(0, pair_R, True)[:, None], counts_L, None)


def order_runs_cuda(counts_NSL: Tensor, room: int, rows: int) -> RowOrder:
    """Compute ``order_runs_reference`` in one kernel, which moves one run per block of threads."""
    if not triton_operators.takes_runs(counts_NSL, counts_NSL.numel()):
        return order_runs_reference(counts_NSL, room, rows)
    pair, row, real, counts, ends = triton_operators.order_runs(counts_NSL, counts_NSL.shape, room, rows, 0)
    return RowOrder(pair, row, None if rows == room * counts_NSL.shape[0] else real[:, None], counts, ends)


def order_equal_runs_reference(like: Tensor, sources: int, experts: int, length: int) -> RowOrder:
    """Return ``order_runs_reference`` if each source sends ``length`` rows per expert, on the device of ``like``."""
    place_P = torch.arange(sources * experts * length, device=like.device)
    pair_R = place_P.view(sources, experts, length).transpose(0, 1).flatten()
    row_P = place_P.view(experts, sources, length).transpose(0, 1).flatten()
    counts_L = torch.full((experts,), sources * length, dtype=torch.int64, device=like.device)
    return RowOrder(pair_R, row_P[:, None], None, counts_L, None)


def order_equal_runs_cuda(like: Tensor, sources: int, experts: int, length: int) -> RowOrder:
    """Compute ``order_equal_runs_reference`` in one kernel."""
    runs = sources * experts
    if not triton_operators.takes_runs(like, runs):
        return order_equal_runs_reference(like, sources, experts, length)
    rows = runs * length
    pair, row, _, counts, ends = triton_operators.order_runs(like, (1, sources, experts), rows, rows, length)
    return RowOrder(pair, row, None, counts, ends)


def _keys(experts_Tk: Tensor, kept_Tk: Tensor | None, num_experts: int) -> Tensor:
    return (experts_Tk if kept_Tk is None else torch.where(kept_Tk, experts_Tk, num_experts)).flatten()


def _counts(key: Tensor, num_experts: int) -> Tensor:
    """Count the pairs of each expert, [E]; pairs that are not kept have key E."""
    # A number is added, not a tensor, for which torch's deterministic form would copy from pageable memory and wait.
    return key.new_zeros(num_experts + 1).scatter_(0, key, 1, reduce="add")[:-1]


def permute_reference(
    x_TH: Tensor, pair_R: Tensor, row_Tk: Tensor, kept_Tk: Tensor | None, row_kept_R: Tensor | None = None
) -> Tensor:
    """Return the token of each row's (token, choice) pair, [R, H].

    Args:
        pair_R: Number of the pair of each row, token * k + choice.
        row_Tk: Row of each pair, the inverse of ``pair_R``, which other forms use.
        kept_Tk: bool, True for pairs that are kept, or None if all are; also for other forms.
        row_kept_R: bool, False for rows of zeros; None: every row has a pair.
    """
    rows_RH = x_TH.index_select(0, token_of(pair_R, row_Tk.shape[1]))
    return rows_RH if row_kept_R is None else rows_RH.masked_fill_(~row_kept_R[:, None], 0)


def permute_cuda(
    x_TH: Tensor, pair_R: Tensor, row_Tk: Tensor, kept_Tk: Tensor | None, row_kept_R: Tensor | None = None
) -> Tensor:
    """Compute ``permute_reference`` in one pass."""
    if not triton_operators.takes_rows(x_TH):
        return permute_reference(x_TH, pair_R, row_Tk, kept_Tk, row_kept_R)
    return triton_operators.copy_rows(x_TH, pair_R, row_kept_R, row_Tk.shape[1])


def token_of(pair_R: Tensor, topk: int) -> Tensor:
    """Return the token of each pair, [R]."""
    return pair_R if topk == 1 else pair_R // topk


def rows_of_pairs(rows_RH: Tensor, row_T1: Tensor, kept_T1: Tensor | None) -> Tensor:
    """Return the row of each token's only pair, or zeros if it is not kept: [T, H]."""
    y_TH = rows_RH.index_select(0, row_T1.flatten())
    return y_TH if kept_T1 is None else y_TH.masked_fill_(~kept_T1, 0)


def unpermute_reference(rows_RH: Tensor, row_Tk: Tensor, kept_Tk: Tensor | None) -> Tensor:
    """Sum the rows of each token's kept pairs in max(fp32, dtype), [T, H].

    An embedding bag gathers and sums in one pass, without the intermediate [T, k, H]. Unlike index_add it is
    deterministic on every device.
    """
    if row_Tk.shape[1] == 1:
        return rows_of_pairs(rows_RH, row_Tk, kept_Tk)
    weights = None if kept_Tk is None else kept_Tk.to(rows_RH.dtype)
    return F.embedding_bag(row_Tk, rows_RH.contiguous(), mode="sum", per_sample_weights=weights)


def unpermute_cuda(rows_RH: Tensor, row_Tk: Tensor, kept_Tk: Tensor | None) -> Tensor:
    """Compute ``unpermute_reference`` without copying rows that are part of wider ones, such as those of a message.

    Uses the kernel that also sums messages, or else ``embedding_bag``'s, which reads rows of any stride; the function
    makes them contiguous before it calls it.
    """
    if triton_operators.takes_rows(rows_RH, row_Tk.shape[1]):
        return triton_operators.sum_rows(rows_RH, rows_RH.shape[1], row_Tk, kept_Tk)
    if row_Tk.shape[1] == 1:
        return rows_of_pairs(rows_RH, row_Tk, kept_Tk)
    weights = None if kept_Tk is None else kept_Tk.to(rows_RH.dtype).flatten()
    starts_T = torch.arange(0, row_Tk.numel(), row_Tk.shape[1], device=row_Tk.device)
    bag = torch.ops.aten._embedding_bag
    return bag(rows_RH, row_Tk.flatten(), starts_T, mode=0, per_sample_weights=weights)[0]


def pack_reference(
    x_NH: Tensor,
    weights: Tensor,
    columns: int,
    index_R: Tensor | None,
    kept_R: Tensor | None = None,
    topk: int = 1,
    *,
    sort_weights: bool = True,
) -> Tensor:
    """Build a message [R, columns]: the token and the bits of the weight of each row, then columns that are not set.

    Args:
        weights: One for each (token, choice) pair, or for each row.
        columns: Columns of the message, at least H + w.
        index_R: Pair of each row, token * k + choice; None: rows are the tokens, in their order.
        kept_R: bool, False for rows of zeros; None: every row has a pair.
        sort_weights: Weights are of pairs, and are put in the order ``index_R``; otherwise they are of rows.
    """
    hidden = x_NH.shape[1]
    rows = x_NH.shape[0] if index_R is None else index_R.shape[0]
    if not x_NH.shape[0]:
        return x_NH.new_zeros(rows, columns)
    message = x_NH.new_empty(rows, columns)
    if index_R is None:
        message[:, :hidden] = x_NH
    else:
        torch.index_select(x_NH, 0, token_of(index_R, topk), out=message[:, :hidden])
    bits = _bits(weights, x_NH.dtype)
    place = message[:, hidden : hidden + bits.shape[1]]
    if index_R is None or not sort_weights:
        place.copy_(bits)
    else:
        torch.index_select(bits, 0, index_R, out=place)
    return message if kept_R is None else message.masked_fill_(~kept_R[:, None], 0)


def pack_cuda(
    x_NH: Tensor,
    weights: Tensor,
    columns: int,
    index_R: Tensor | None,
    kept_R: Tensor | None = None,
    topk: int = 1,
    *,
    sort_weights: bool = True,
) -> Tensor:
    """Compute ``pack_reference`` in one pass."""
    if not triton_operators.takes_rows(x_NH):
        return pack_reference(x_NH, weights, columns, index_R, kept_R, topk, sort_weights=sort_weights)
    bits = _bits(weights, x_NH.dtype)
    return triton_operators.pack_rows(x_NH, bits, columns, index_R, kept_R, topk, sort_weights=sort_weights)


def unpack_reference(
    message: Tensor, hidden: int, dtype: torch.dtype, index_R: Tensor | None, room: int, *, sort_weights: bool
) -> tuple[Tensor, Tensor]:
    """Split a message into (tokens [room, H], weights of ``dtype``, one for each of its rows).

    Args:
        index_R: Row of the message for each token, each once; None: all rows in their order, then zeros up to ``room``.
        room: Rows of the result.
        sort_weights: Weights have the order ``index_R``, otherwise that of the message.
    """
    received = message.shape[0]
    if index_R is not None:
        tokens = message[:, :hidden].index_select(0, index_R)
        return tokens, weights_of(message, hidden, dtype, index_R if sort_weights else None)
    tokens = message.new_empty(room, hidden)
    tokens[:received] = message[:, :hidden]
    if room > received:
        tokens[received:] = 0
    return tokens, weights_of(message, hidden, dtype)


def unpack_cuda(
    message: Tensor, hidden: int, dtype: torch.dtype, index_R: Tensor | None, room: int, *, sort_weights: bool
) -> tuple[Tensor, Tensor]:
    """Compute ``unpack_reference`` in one pass."""
    if not triton_operators.takes_rows(message):
        return unpack_reference(message, hidden, dtype, index_R, room, sort_weights=sort_weights)
    return triton_operators.unpack_rows(message, hidden, dtype, index_R, room, sort_weights=sort_weights)


def sum_message_by(unpermute: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a form of the operator ``sum_message`` that sums rows by this form of ``unpermute``."""

    def sum_message(
        message: Tensor, hidden: int, dtype: torch.dtype, row_Tk: Tensor, kept_Tk: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return (the sum of the rows of each token's kept pairs [T, H], the weight of each pair [T, k]).

        row_Tk: the row of each pair. kept_Tk: bool, False for pairs without a row, whose weights are 0; None: every
        pair is kept.
        """
        if not (message.shape[0] and row_Tk.shape[0]):
            return message.new_zeros(row_Tk.shape[0], hidden), message.new_zeros(row_Tk.shape, dtype=dtype)
        weights_Tk = weights_of(message, hidden, dtype)[row_Tk]
        y_TH = unpermute(message[:, :hidden], row_Tk, kept_Tk)
        return y_TH, weights_Tk if kept_Tk is None else torch.where(kept_Tk, weights_Tk, 0)

    return sum_message


sum_message_reference = sum_message_by(unpermute_reference)
_sum_message_in_two = sum_message_by(unpermute_cuda)


def sum_message_cuda(
    message: Tensor, hidden: int, dtype: torch.dtype, row_Tk: Tensor, kept_Tk: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute ``sum_message_reference`` in one pass."""
    if not triton_operators.takes_rows(message, row_Tk.shape[1]):
        return _sum_message_in_two(message, hidden, dtype, row_Tk, kept_Tk)
    return triton_operators.sum_message(message, hidden, dtype, row_Tk, kept_Tk)


def weights_of(message: Tensor, hidden: int, dtype: torch.dtype, row_R: Tensor | None = None) -> Tensor:
    """Read the weights [R] of ``dtype`` that follow the first ``hidden`` columns of these rows; None: of all."""
    bits = message[:, hidden : hidden + dtype.itemsize // message.dtype.itemsize]
    # A copy even if the column is contiguous, because a view as another dtype needs an aligned start.
    bits = bits.clone(memory_format=torch.contiguous_format) if row_R is None else bits.index_select(0, row_R)
    return bits.flatten().view(dtype)


def _bits(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weights as columns of ``dtype``, [.., w]."""
    return weights.contiguous().view(dtype).view(weights.shape[0], weights.dtype.itemsize // dtype.itemsize)
