"""What travels from a token to its expert: the token and the weight of its output, in one message.

    message [R, H + w]   x x x x x ... | g g - -   one row per pair; the first of w columns hold the weight's bits

The weight goes along because it multiplies at the expert, behind the sum over emp and before the way back, so that
backward never needs what the combine returns; one message, because every collective has a price of its own. Weights
are max(fp32, dtype) and keep all their bits: in bf16 one takes two columns.

A row is a multiple of 16 bytes, so that whatever the splits every rank's part begins at one: elsewhere NCCL copies byte
by byte (nccl#413). Columns behind the weight fill it up; nobody writes or reads them.

Shape letters: T tokens, k choices per token, H hidden, R rows, w columns behind the token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megapar.model.decoder.expert_rows import row_columns
from megapar.moe.dispatch import Permutation, gather_sum


def pack(x_TH: Tensor, weights_Tk: Tensor, permutation: Permutation) -> Tensor:
    """[R, H + w]: the token and the weight of each row, zeros where a row has no pair; what fills it up is not set."""
    return _Pack.apply(x_TH, weights_Tk, *permutation)  # type: ignore[no-any-return]


def unpack(
    message: Tensor, hidden: int, dtype: torch.dtype, order: Permutation | None, room: int
) -> tuple[Tensor, Tensor]:
    """(tokens [room, H], weights [R] of ``dtype``) of a message.

    hidden: H. order: puts the tokens in another order; None leaves them and adds zeros up to ``room`` rows. Weights
    always stay in the message's order, which is the way back.
    """
    return _Unpack.apply(message, hidden, dtype, room, *(order or ()))  # type: ignore[no-any-return]


def fill(x_TH: Tensor, weights_Tk: Tensor, permutation: Permutation) -> Tensor:
    """``pack`` outside autograd."""
    hidden, rows = x_TH.shape[1], permutation.pair.shape[0]
    shape = (rows, _columns(hidden, weights_Tk.dtype, x_TH.dtype))
    if not x_TH.shape[0]:
        return x_TH.new_zeros(shape)
    message = x_TH.new_empty(shape)
    torch.index_select(x_TH, 0, permutation.pair // weights_Tk.shape[1], out=message[:, :hidden])
    _put_weights(message, hidden, weights_Tk.flatten()[permutation.pair])
    if permutation.row_kept is not None:
        message.masked_fill_(~permutation.row_kept[:, None], 0)
    return message


def take_apart(grad: Tensor, permutation: Permutation, hidden: int, weight_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(dx [T, H], dweights [T, k]) from a message's gradient."""
    grad_TH = gather_sum(grad[:, :hidden], permutation)
    row_Tk, kept_Tk = permutation.row, permutation.pair_kept
    if not grad.shape[0]:
        grad_Tk = grad.new_zeros(row_Tk.shape, dtype=weight_dtype)
    else:
        grad_Tk = _weights(grad, hidden, weight_dtype)[row_Tk]
    return grad_TH, grad_Tk if kept_Tk is None else torch.where(kept_Tk, grad_Tk, 0)


@dataclass(frozen=True)
class RowsOfTokens:
    """A message as ``core.tickets.defer`` takes it: tokens and weights by a permutation that is known late."""

    permutation: Permutation
    hidden: int
    weight_dtype: torch.dtype

    def build(self, *inputs: Tensor) -> Tensor:
        """[R, H + w] from tokens [T, H] and weights [T, k]."""
        x_TH, weights_Tk = inputs
        return fill(x_TH, weights_Tk, self.permutation)

    def gradients(self, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Of the tokens and of the weights."""
        return take_apart(grad, self.permutation, self.hidden, self.weight_dtype)


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, weights_Tk: Tensor, *fields: Any) -> Tensor:
        ctx.save_for_backward(*fields)
        ctx.hidden, ctx.weight_dtype = x_TH.shape[1], weights_Tk.dtype
        return fill(x_TH, weights_Tk, Permutation(*fields))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        permutation = Permutation(*ctx.saved_tensors)
        return *take_apart(grad, permutation, ctx.hidden, ctx.weight_dtype), *(None,) * len(permutation)


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, message: Tensor, hidden: int, dtype: torch.dtype, room: int, *fields: Any
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*fields)
        ctx.received, ctx.fields = message.shape[0], len(fields)
        if fields:
            order = Permutation(*fields)
            tokens = message[:, :hidden].index_select(0, order.pair)
        else:
            tokens = message.new_zeros(room, hidden)
            tokens[: message.shape[0]] = message[:, :hidden]
        return tokens, _weights(message, hidden, dtype)

    @staticmethod
    def backward(ctx: Any, grad_RH: Tensor, grad_R: Tensor) -> tuple[Tensor | None, ...]:
        hidden = grad_RH.shape[1]
        grad = grad_RH.new_empty(ctx.received, _columns(hidden, grad_R.dtype, grad_RH.dtype))
        if ctx.fields and ctx.received:
            order = Permutation(*ctx.saved_tensors)
            grad[:, :hidden] = grad_RH.index_select(0, order.row.flatten())
        else:
            grad[:, :hidden] = grad_RH[: ctx.received]
        _put_weights(grad, hidden, grad_R)
        return grad, None, None, None, *(None,) * ctx.fields


def _columns(hidden: int, weight: torch.dtype, row: torch.dtype) -> int:
    """Elements of dtype ``row`` in a row (H + w)."""
    return row_columns(hidden, weight.itemsize, row.itemsize)


def _put_weights(message: Tensor, hidden: int, weights_R: Tensor) -> None:
    """The bits of each weight behind the first ``hidden`` columns."""
    bits = weights_R.contiguous().view(message.dtype).view(weights_R.shape[0], -1 if len(weights_R) else 0)
    message[:, hidden : hidden + bits.shape[1]] = bits


def _weights(message: Tensor, hidden: int, dtype: torch.dtype) -> Tensor:
    """[R] of ``dtype`` behind the first ``hidden`` columns."""
    bits = message[:, hidden : hidden + dtype.itemsize // message.dtype.itemsize]
    # A copy even where it lies together, because a view of other bits wants an aligned start.
    return bits.clone(memory_format=torch.contiguous_format).flatten().view(dtype)
