"""Blockwise attention: keys and values of other ranks arrive while this rank attends to its own.

    forward    kv ^        own tiles        kv v        remote tiles                        (^ launch, v wait)
    backward   kv ^        own, early       kv v        remote tiles       dkv ^   own, late   dkv v

The ``Transport`` moves keys and values: block by block around a ring (``ring``), or all at once (``gathered``).
Remote keys and values are not kept for the backward, which fetches them again. Their gradients are summed and sent in
max(fp32, dtype).

Shape letters: B batch, N query heads, G key-value heads, S positions of this rank, D head size of queries and keys, V
of values and outputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar.core.context_parallel.online_softmax import OnlineSoftmax, OnlineSoftmaxBackward
from megapar.core.context_parallel.tiles import Tile
from megapar.core.device.block_attention import AttentionBlock
from megapar.core.device.dtypes import at_least_fp32


class Columns(NamedTuple):
    """Keys and values, or their gradients, as one message: for each head the key's features, then the value's.

    Attributes:
        message: [S, B, G, D + V].
        key_dim: D.
    """

    message: Tensor
    key_dim: int

    @classmethod
    def of(cls, k: Tensor, v: Tensor) -> Columns:
        """Copy k [B, G, S, D] and v [B, G, S, V] into one message."""
        return cls(torch.cat([x.permute(2, 0, 1, 3) for x in (k, v)], dim=-1), k.shape[-1])

    def with_message(self, message: Tensor) -> Columns:
        """Return columns with the same features at other positions. message: [any, B, G, D + V]."""
        return Columns(message, self.key_dim)

    def zeros(self) -> Columns:
        """Return a zeroed buffer for the gradients of these columns, in max(fp32, dtype)."""
        return self.with_message(self.message.new_zeros(self.message.shape, dtype=at_least_fp32(self.message.dtype)))

    @property
    def k(self) -> Tensor:
        """Keys [B, G, S, D], a view."""
        return self.message.narrow(-1, 0, self.key_dim).permute(1, 2, 0, 3)

    @property
    def v(self) -> Tensor:
        """Values [B, G, S, V], a view."""
        return self.message.narrow(-1, self.key_dim, self.message.shape[-1] - self.key_dim).permute(1, 2, 0, 3)


# Attends to tiles of columns that have arrived; in a backward it also adds to the columns' gradients.
SeeColumns = Callable[[Iterable[Tile], Columns], None]
SeeColumnsBackward = Callable[[Iterable[Tile], Columns, Columns], None]


@dataclass(frozen=True)
class TilePlan:
    """The tiles that this rank computes in one micro-batch.

    Attributes:
        own: Tiles over this rank's own columns.
        early: The part of ``own`` that a backward computes first, while remote columns arrive.
        late: The rest of ``own``, computed last, while gradients return.
        others: Tiles over the columns of other ranks, one tuple per arrival.
    """

    own: tuple[Tile, ...]
    early: tuple[Tile, ...]
    late: tuple[Tile, ...]
    others: tuple[tuple[Tile, ...], ...]


class Transport(Protocol):
    """Transport of columns to the ranks whose rows attend to them, and of their gradients back."""

    def forward(self, own: Columns, plan: TilePlan, see: SeeColumns) -> None:
        """Attend to all columns: call ``see`` for this rank's own tiles and for each arrival."""
        ...

    def backward(self, own: Columns, plan: TilePlan, see: SeeColumnsBackward) -> Columns:
        """Call ``see`` for all columns; return the gradients of this rank's columns, summed over all ranks."""
        ...


def attend_blockwise(
    q: Tensor, k: Tensor, v: Tensor, transport: Transport, plan: TilePlan, *, flash: bool, dropout: float = 0.0
) -> Tensor:
    """Attend from this rank's positions to those of all ranks; returns [B, N, S, V].

    Args:
        q: [B, N, S, D], this rank's positions; k [B, G, S, D] and v [B, G, S, V] likewise.
        transport: Moves keys and values between ranks.
        plan: The tiles to compute.
        flash: Use fused kernels where the device has them.
        dropout: Probability, applied to the attention weights.
    """
    call = _BlockwiseCall(transport, plan, flash, dropout)
    out: Tensor = _Blockwise.apply(q, k, v, call)
    return out


@dataclass(frozen=True)
class _BlockwiseCall:
    """The non-tensor arguments of ``attend_blockwise``."""

    transport: Transport
    plan: TilePlan
    flash: bool
    dropout: float


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: _BlockwiseCall) -> Tensor:
        rows = OnlineSoftmax(q, v.shape[-1], flash=call.flash, dropout=call.dropout)
        call.transport.forward(
            Columns.of(k, v), call.plan, lambda tiles, columns: rows.see(tiles, columns.k, columns.v)
        )
        result = rows.result()
        ctx.call, ctx.drawn = call, rows.drawn
        ctx.save_for_backward(q, k, v, *result[:2])
        return result.out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        call: _BlockwiseCall = ctx.call
        drawn: Iterator[tuple[Any, ...]] = iter(ctx.drawn)
        plan = call.plan
        if call.dropout:
            # Dropout masks were drawn per tile in the forward, so the backward must use exactly the same tiles.
            own = len(plan.own)
            drawn = itertools.chain(ctx.drawn[own:], ctx.drawn[:own])
            plan = TilePlan(plan.own, (), plan.own, plan.others)
        else:
            drawn = itertools.repeat(ctx.drawn[0])
        merged = AttentionBlock(out, lse)
        rows = OnlineSoftmaxBackward(grads[0], q, merged, drawn, flash=call.flash, dropout=call.dropout)

        def see(tiles: Iterable[Tile], columns: Columns, gradients: Columns) -> None:
            rows.see(tiles, columns.k, columns.v, gradients.k, gradients.v)

        summed = call.transport.backward(Columns.of(k, v), plan, see)
        dk, dv = (x.to(k.dtype) for x in (summed.k, summed.v))
        return rows.dq.to(q.dtype), dk, dv, None
