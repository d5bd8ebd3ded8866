"""The dispatch message: tokens and the gate weights of their expert outputs.

    message [R, H + w]   x x x x x ... | g g - -   one row per pair; the first of w columns hold the weight's bits

The weight is sent along because it is multiplied on the expert's rank, so the backward never needs the result of the
combine. They share one message because every collective has a fixed cost. Weights are max(fp32, dtype) and keep all
their bits: in bf16 a weight takes two columns.

A row is a multiple of 16 bytes, so that with any splits each rank's part is aligned: NCCL copies unaligned parts byte
by byte (nccl#413). The columns after the weight are padding, which is never written or read.

Shape letters: T tokens, k choices per token, H hidden, R rows, w columns after the token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megapar.core.device.grouped import token_of
from megapar.model.decoder.expert_rows import row_columns
from megapar.moe.expert_order import ExpertOrder, gather_sum


def pack(x_TH: Tensor, weights_Tk: Tensor, order: ExpertOrder) -> Tensor:
    """Build the message [R, H + w]: token and weight of each row, zeros in rows without a pair; padding is not set."""
    message: Tensor = _Pack.apply(x_TH, weights_Tk, *order)
    return message


def unpack(
    message: Tensor, hidden: int, dtype: torch.dtype, order: ExpertOrder | None, room: int, *, sort_weights: bool
) -> tuple[Tensor, Tensor]:
    """Split a message into (tokens [room, H], weights [R] of ``dtype``).

    Args:
        message: [R, H + w].
        hidden: H.
        dtype: dtype of the weights.
        order: Sorts the tokens; None: leave them in message order, with zeros up to ``room`` rows.
        room: Rows of the result.
        sort_weights: Sort the weights like the tokens; otherwise they stay in message order, in which the rows are sent
            back.
    """
    parts: tuple[Tensor, Tensor] = _Unpack.apply(message, hidden, dtype, room, sort_weights, *(order or ()))
    return parts


def fill(x_TH: Tensor, weights_Tk: Tensor, order: ExpertOrder) -> Tensor:
    """Compute ``pack`` outside autograd."""
    hidden, rows = x_TH.shape[1], order.pair.shape[0]
    shape = (rows, _columns(hidden, weights_Tk.dtype, x_TH.dtype))
    if not x_TH.shape[0]:
        return x_TH.new_zeros(shape)
    message = x_TH.new_empty(shape)
    torch.index_select(x_TH, 0, token_of(order.pair, weights_Tk.shape[1]), out=message[:, :hidden])
    _put_weights(message, hidden, weights_Tk.flatten()[order.pair])
    if order.row_kept is not None:
        message.masked_fill_(~order.row_kept[:, None], 0)
    return message


def unpack_gradient(grad: Tensor, order: ExpertOrder, hidden: int, weight_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Split a message's gradient into (dx [T, H], dweights [T, k])."""
    grad_TH = gather_sum(grad[:, :hidden], order)
    row_Tk, kept_Tk = order.row, order.pair_kept
    if not grad.shape[0]:
        grad_Tk = grad.new_zeros(row_Tk.shape, dtype=weight_dtype)
    else:
        grad_Tk = _weights(grad, hidden, weight_dtype)[row_Tk]
    return grad_TH, grad_Tk if kept_Tk is None else torch.where(kept_Tk, grad_Tk, 0)


@dataclass(frozen=True)
class RowsOfTokens:
    """A message for ``async_pairs.defer``: tokens and weights, in an order determined after the node was made.

    Attributes:
        order: Pairs to rows, as sent.
        hidden: H.
        weight_dtype: dtype of the weights.
    """

    order: ExpertOrder
    hidden: int
    weight_dtype: torch.dtype

    def build(self, *inputs: Tensor) -> Tensor:
        """Build [R, H + w] from tokens [T, H] and weights [T, k]."""
        x_TH, weights_Tk = inputs
        return fill(x_TH, weights_Tk, self.order)

    def gradients(self, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the tokens and of the weights."""
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
        pair_R = None
        if fields:
            order = ExpertOrder(*fields)
            tokens = message[:, :hidden].index_select(0, order.pair)
            pair_R = order.pair if sort_weights else None
        else:
            tokens = message.new_empty(room, hidden)
            tokens[: message.shape[0]] = message[:, :hidden]
            if room > message.shape[0]:
                tokens[message.shape[0] :] = 0
        return tokens, _weights(message, hidden, dtype, pair_R)

    @staticmethod
    def backward(ctx: Any, grad_RH: Tensor, grad_R: Tensor) -> tuple[Tensor | None, ...]:
        hidden = grad_RH.shape[1]
        grad = grad_RH.new_empty(ctx.received, _columns(hidden, grad_R.dtype, grad_RH.dtype))
        row_R = None
        if ctx.fields and ctx.received:
            order = ExpertOrder(*ctx.saved_tensors)
            torch.index_select(grad_RH, 0, order.row.flatten(), out=grad[:, :hidden])
            row_R = order.row.flatten() if ctx.sort_weights else None
        else:
            grad[:, :hidden] = grad_RH[: ctx.received]
        _put_weights(grad, hidden, grad_R, row_R)
        return grad, None, None, None, None, *(None,) * ctx.fields


def _columns(hidden: int, weight: torch.dtype, row: torch.dtype) -> int:
    """Return the elements of dtype ``row`` in a row, H + w."""
    return row_columns(hidden, weight.itemsize, row.itemsize)


def _put_weights(message: Tensor, hidden: int, weights_R: Tensor, row_R: Tensor | None = None) -> None:
    """Write the bits of the weights, in the order ``row_R`` if given, after the first ``hidden`` columns."""
    bits = weights_R.contiguous().view(message.dtype).view(weights_R.shape[0], -1 if len(weights_R) else 0)
    columns = message[:, hidden : hidden + bits.shape[1]]
    if row_R is None:
        columns.copy_(bits)
    else:
        torch.index_select(bits, 0, row_R, out=columns)


def _weights(message: Tensor, hidden: int, dtype: torch.dtype, row_R: Tensor | None = None) -> Tensor:
    """Read the weights [R] of ``dtype`` that follow the first ``hidden`` columns of these rows; None: of all."""
    bits = message[:, hidden : hidden + dtype.itemsize // message.dtype.itemsize]
    # A copy even if the column is contiguous, because a view as another dtype needs an aligned start.
    bits = bits.clone(memory_format=torch.contiguous_format) if row_R is None else bits.index_select(0, row_R)
    return bits.flatten().view(dtype)
