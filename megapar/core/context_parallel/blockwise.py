"""Blockwise attention: keys and values of other ranks arrive while this rank attends to its local.

    forward    kv ^      local tiles        kv v        remote tiles                          (^ launch, v wait)
    backward   kv ^      first local        kv v        remote tiles       dkv ^   last local   dkv v

The ``Transport`` moves keys and values: block by block around a ring (``ring``), or all at once (``gathered``).
Remote keys and values are not kept for the backward, which fetches them again. Their gradients are summed and sent in
max(fp32, dtype). With an ``Expansion``, latents travel in the place of keys and values and are kept in their place
(``columns``).

Shape letters: B batch, N query heads, G key-value heads, S positions of this rank, D head size of queries and keys, V
of values and outputs, R features of a latent, Dr of a rotary key.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar.core.attention_mask import AttentionMask
from megapar.core.context_parallel.columns import ColumnReader, Columns, Expansion, reader_of
from megapar.core.context_parallel.online_softmax import OnlineSoftmax, OnlineSoftmaxBackward
from megapar.core.context_parallel.positions import SequenceLayout
from megapar.core.context_parallel.tiles import Tile, halves, local_tiles
from megapar.core.device.attention.blocks import AttentionBlock
from megapar.core.device.attention.row_statistic import Rows
from megapar.core.sharding.gradient_sink import GradientSink

# Attends to tiles of columns that have arrived; in a backward it also adds to the columns' gradients.
Compute = Callable[[Iterable[Tile], Columns], None]
ComputeBackward = Callable[[Iterable[Tile], Columns, Columns], None]


@dataclass(frozen=True)
class TilePlan:
    """The tiles that this rank computes in one micro-batch.

    Attributes:
        local_tiles: Tiles over this rank's columns.
        first_local_tiles: Those that a backward computes first, while remote columns arrive.
        last_local_tiles: The rest, computed last, while gradients return.
        remote_tiles: Tiles over the columns of other ranks, one tuple per arrival.
    """

    local_tiles: tuple[Tile, ...]
    first_local_tiles: tuple[Tile, ...]
    last_local_tiles: tuple[Tile, ...]
    remote_tiles: tuple[tuple[Tile, ...], ...]

    @classmethod
    def of(cls, layout: SequenceLayout, rank: int, mask: AttentionMask, remote: Iterable[Iterable[Tile]]) -> TilePlan:
        """Plan the local tiles of a rank, with the remote tiles of each arrival."""
        local = local_tiles(layout, rank, mask)
        first, last = halves(local, len(layout.runs(mask.length, rank)[0]))
        return cls(tuple(local), tuple(first), tuple(last), tuple(map(tuple, remote)))


class Transport(Protocol):
    """Transport of columns to the ranks whose rows attend to them, and of their gradients back."""

    def forward(self, local: Columns, plan: TilePlan, compute: Compute) -> None:
        """Attend to all columns: call ``compute`` for the local tiles and for each arrival."""

    def backward(self, local: Columns, plan: TilePlan, compute: ComputeBackward) -> Columns:
        """Call ``compute`` for all columns; return the gradients of this rank's columns, summed over all ranks."""


def attend_blockwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    transport: Transport,
    plan: TilePlan,
    *,
    flash: bool,
    dropout: float = 0.0,
    expansion: Expansion | None = None,
    seen_by: Rows = None,
) -> Tensor:
    """Attend from this rank's positions to those of all ranks; returns [B, N, S, V].

    q is [B, N, S, D], k [B, G, S, D] and v [B, G, S, V] of this rank's positions. With an expansion, which makes keys
    and values of the columns where they arrive, k is latents [B, 1, S, R] and v rotary keys [B, 1, S, Dr]. They are
    sent in q's dtype. In a wider dtype they get gradients that are not rounded. ``seen_by`` is the end of the rows.
    """
    defer_wgrad = None if expansion is None else expansion.defer_wgrad
    call = _BlockwiseCall(transport, plan, flash, dropout, defer_wgrad, seen_by)
    out, lse = _Blockwise.apply(q, k, v, None if expansion is None else expansion.weight, call)
    return out if seen_by is None else seen_by.weigh(out, lse)


@dataclass(frozen=True)
class _BlockwiseCall:
    """The non-tensor arguments of ``attend_blockwise``."""

    transport: Transport
    plan: TilePlan
    flash: bool
    dropout: float
    defer_wgrad: GradientSink | None
    seen_by: Rows

    def reader(self, q: Tensor, v: Tensor, weight: Tensor | None, *, needs_wgrad: bool = False) -> ColumnReader:
        """Return the reader of the columns; latents are expanded for as many positions as q [B, N, S, D] has."""
        return reader_of(weight, self.defer_wgrad, v.shape[-1], q.shape[2], needs_wgrad=needs_wgrad)


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None, call: _BlockwiseCall
    ) -> tuple[Tensor, Tensor]:
        reader = call.reader(q, v, weight)
        value_dim = reader.value_dim(q, v)
        rows = OnlineSoftmax(q, value_dim, flash=call.flash, dropout=call.dropout, seen_by=call.seen_by)
        local = Columns.of(k, v, q.dtype)
        call.transport.forward(local, call.plan, lambda tiles, columns: reader.attend(rows, tiles, columns))
        result = rows.result()
        ctx.call, ctx.drawn, ctx.key_dim, ctx.column_dtype = call, rows.drawn, local.key_dim, k.dtype
        # Latents may be in a wider dtype than the message, which is what the backward needs of them.
        kept = (k, v) if weight is None else (local.message,)
        ctx.save_for_backward(q, weight, *result[:2], *kept)
        ctx.mark_non_differentiable(result.lse)
        ctx.set_materialize_grads(False)
        return result.out, result.lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, weight, out, lse, *kept = ctx.saved_tensors
        local = Columns.of(*kept) if weight is None else Columns(kept[0], ctx.key_dim)
        call: _BlockwiseCall = ctx.call
        drawn: Iterator[tuple[Any, ...]] = iter(ctx.drawn)
        plan = call.plan
        if call.dropout:
            # Dropout masks were drawn per tile in the forward, so the backward must use exactly the same tiles.
            first = len(plan.local_tiles)
            drawn = itertools.chain(ctx.drawn[first:], ctx.drawn[:first])
            plan = TilePlan(plan.local_tiles, (), plan.local_tiles, plan.remote_tiles)
        else:
            drawn = itertools.repeat(ctx.drawn[0] if ctx.drawn else ())
        merged = AttentionBlock(out, lse)
        rows = OnlineSoftmaxBackward(grads[0], q, merged, drawn, flash=call.flash, dropout=call.dropout)
        reader = call.reader(q, local.v, weight, needs_wgrad=ctx.needs_input_grad[3])

        def compute(tiles: Iterable[Tile], columns: Columns, gradients: Columns) -> None:
            reader.differentiate(rows, tiles, columns, gradients)

        summed = call.transport.backward(local, plan, compute)
        dk, dv = (x.to(ctx.column_dtype) for x in (summed.k, summed.v))
        return rows.dq.to(q.dtype), dk, dv, reader.weight_gradient(), None
