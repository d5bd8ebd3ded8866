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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megapar.core.device.ops import op
from megapar.moe.expert_order import ExpertOrder
from megapar.moe.row_counts import row_columns


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
    columns = _columns(x_TH.shape[1], weights_Tk.dtype, x_TH.dtype)
    pairs = (order.pair, order.row_kept, order.row.shape[1])
    message: Tensor = op("pack", x_TH)(x_TH, weights_Tk.flatten(), columns, *pairs)
    return message


def unpack_gradient(grad: Tensor, order: ExpertOrder, hidden: int, weight_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Split a message's gradient into (dx [T, H], dweights [T, k])."""
    split: Callable[..., Any] = op("sum_message", grad)
    grad_TH, grad_Tk = split(grad, hidden, weight_dtype, order.row, order.pair_kept)
    return grad_TH, grad_Tk


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
