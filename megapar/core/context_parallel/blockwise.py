"""Attention whose keys and values come from other ranks while this rank attends to its own.

    forward    kv ^        own tiles        kv v        tiles of others                     (^ launch, v wait)
    backward   kv ^        own, early       kv v        tiles of others    dkv ^   own, late   dkv v

The ``Transport`` brings keys and values: round a ring, block by block (``ring``), or all at once (``gathered``).
Nothing of them is kept for the backward: they come again. Their gradients are summed, and travel, in max(fp32, dtype).

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
    """Keys and values, or their gradients, as one message: per head the features of the key, then those of the value.

    message: [S, B, G, D + V]. key_dim: D.
    """

    message: Tensor
    key_dim: int

    @classmethod
    def of(cls, k: Tensor, v: Tensor) -> Columns:
        """Copy k [B, G, S, D] and v [B, G, S, V]."""
        return cls(torch.cat([x.permute(2, 0, 1, 3) for x in (k, v)], dim=-1), k.shape[-1])

    def with_message(self, message: Tensor) -> Columns:
        """Columns of the same features at other positions, [any, B, G, D + V]."""
        return Columns(message, self.key_dim)

    def zeros(self) -> Columns:
        """Room for gradients."""
        return self.with_message(self.message.new_zeros(self.message.shape, dtype=at_least_fp32(self.message.dtype)))

    @property
    def k(self) -> Tensor:
        """[B, G, S, D], a view."""
        return self.message.narrow(-1, 0, self.key_dim).permute(1, 2, 0, 3)

    @property
    def v(self) -> Tensor:
        """[B, G, S, V], a view."""
        return self.message.narrow(-1, self.key_dim, self.message.shape[-1] - self.key_dim).permute(1, 2, 0, 3)


# Attends to tiles of columns that have arrived; in a backward it also adds to the columns' gradients.
SeeColumns = Callable[[Iterable[Tile], Columns], None]
SeeColumnsBackward = Callable[[Iterable[Tile], Columns, Columns], None]


@dataclass(frozen=True)
class TilePlan:
    """The tiles that this rank computes in one micro-batch.

    own: tiles of its own columns. early, late: the same in two parts, for a backward. others: tiles of the columns of
    other ranks, one list for each arrival.
    """

    own: tuple[Tile, ...]
    early: tuple[Tile, ...]
    late: tuple[Tile, ...]
    others: tuple[tuple[Tile, ...], ...]


class Transport(Protocol):
    """Brings columns to the rows of other ranks, and gradients back to their columns."""

    def forward(self, own: Columns, plan: TilePlan, see: SeeColumns) -> None:
        """Let the rows see all columns."""
        ...

    def backward(self, own: Columns, plan: TilePlan, see: SeeColumnsBackward) -> Columns:
        """Let the rows see all columns; return the gradients of this rank's columns, summed over all ranks."""
        ...


def attend_blockwise(
    q: Tensor, k: Tensor, v: Tensor, transport: Transport, plan: TilePlan, *, flash: bool, dropout: float = 0.0
) -> Tensor:
    """q [B, N, S, D], k [B, G, S, D] and v [B, G, S, V] of this rank's positions to [B, N, S, V].

    flash: fused kernels where the device has them. dropout: probability, on the weights.
    """
    call = _BlockwiseCall(transport, plan, flash, dropout)
    return _Blockwise.apply(q, k, v, call)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _BlockwiseCall:
    """The arguments of ``attend_blockwise`` that are not tensors."""

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
            # Every tile drew its numbers in the forward, so the backward's tiles must be the same ones.
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
