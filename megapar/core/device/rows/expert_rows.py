"""Rows of experts: copies of tokens in the order of experts, messages of tokens and gate weights, and sums of rows.

Copies are exact in every form. Sums are taken in max(fp32, dtype), in the order of a token's choices.

Shape letters: T tokens, k choices per token, H hidden, R rows, w columns of a weight.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megapar.core.device.rows import row_operators


def permute_reference(
    x_TH: Tensor, pair_R: Tensor, row_Tk: Tensor, kept_Tk: Tensor | None, row_kept_R: Tensor | None = None
) -> Tensor:
    """Return the token of each row's (token, choice) pair, [R, H].

    Args:
        x_TH: Tokens.
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
    if not row_operators.takes_rows(x_TH):
        return permute_reference(x_TH, pair_R, row_Tk, kept_Tk, row_kept_R)
    return row_operators.copy_rows(x_TH, pair_R, row_kept_R, row_Tk.shape[1])


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
    if row_operators.takes_rows(rows_RH, row_Tk.shape[1]):
        return row_operators.sum_rows(rows_RH, rows_RH.shape[1], row_Tk, kept_Tk)
    if row_Tk.shape[1] == 1:
        return rows_of_pairs(rows_RH, row_Tk, kept_Tk)
    weights = None if kept_Tk is None else kept_Tk.to(rows_RH.dtype).flatten()
    starts_T = torch.arange(0, row_Tk.numel(), row_Tk.shape[1], device=row_Tk.device)
    bag = torch.ops.aten._embedding_bag
    y_TH: Tensor = bag(rows_RH, row_Tk.flatten(), starts_T, mode=0, per_sample_weights=weights)[0]
    return y_TH


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
        x_NH: Tokens.
        weights: One for each (token, choice) pair, or for each row.
        columns: Columns of the message, at least H + w.
        index_R: Pair of each row, token * k + choice; None: rows are the tokens, in their order.
        kept_R: bool, False for rows of zeros; None: every row has a pair.
        topk: k.
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
    if not row_operators.takes_rows(x_NH):
        return pack_reference(x_NH, weights, columns, index_R, kept_R, topk, sort_weights=sort_weights)
    bits = _bits(weights, x_NH.dtype)
    return row_operators.pack_rows(x_NH, bits, columns, index_R, kept_R, topk, sort_weights=sort_weights)


def unpack_reference(
    message: Tensor, hidden: int, dtype: torch.dtype, index_R: Tensor | None, room: int, *, sort_weights: bool
) -> tuple[Tensor, Tensor]:
    """Split a message into (tokens [room, H], weights of ``dtype``, one for each of its rows).

    Args:
        message: Rows of a message.
        hidden: H.
        dtype: Dtype of the weights.
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
    if not row_operators.takes_rows(message):
        return unpack_reference(message, hidden, dtype, index_R, room, sort_weights=sort_weights)
    return row_operators.unpack_rows(message, hidden, dtype, index_R, room, sort_weights=sort_weights)


def sum_message_by(unpermute: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a form of the operator ``sum_message`` that sums rows by this form of ``unpermute``."""

    def sum_message(
        message: Tensor, hidden: int, dtype: torch.dtype, row_Tk: Tensor, kept_Tk: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return (the sum of the rows of each token's kept pairs [T, H], the weight of each pair [T, k]).

        Args:
            message: Rows of a message.
            hidden: H.
            dtype: Dtype of the weights.
            row_Tk: Row of each pair.
            kept_Tk: bool, False for pairs without a row, whose weights are 0; None: every pair is kept.
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
    if not row_operators.takes_rows(message, row_Tk.shape[1]):
        return _sum_message_in_two(message, hidden, dtype, row_Tk, kept_Tk)
    return row_operators.sum_message(message, hidden, dtype, row_Tk, kept_Tk)


def weights_of(message: Tensor, hidden: int, dtype: torch.dtype, row_R: Tensor | None = None) -> Tensor:
    """Read the weights [R] of ``dtype`` that follow the first ``hidden`` columns of these rows; None: of all."""
    bits = message[:, hidden : hidden + dtype.itemsize // message.dtype.itemsize]
    # A copy even if the column is contiguous, because a view as another dtype needs an aligned start.
    bits = bits.clone(memory_format=torch.contiguous_format) if row_R is None else bits.index_select(0, row_R)
    return bits.flatten().view(dtype)


def _bits(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weights as columns of ``dtype``, [.., w]."""
    return weights.contiguous().view(dtype).view(weights.shape[0], weights.dtype.itemsize // dtype.itemsize)
