"""Attention whose keys and values come from other ranks while this rank's own are attended to.

    forward    kv ^        own tiles        kv v        tiles of others                     (^ launch, v wait)
    backward   kv ^        own, early       kv v        tiles of others    dkv ^   own, late   dkv v

How keys and values come is the ``Transport``'s matter: round a ring, block by block (``ring``), or all at once
(``gathered``). Nothing of them is kept for the backward: they come again. Their gradients are summed, and travel, in
max(fp32, dtype).

Shape letters: B batch, N query heads, G key-value heads, S positions of this rank, D head size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar.core.context_parallel.blocks import RowGradients, Rows
from megapar.core.context_parallel.tiles import Tile
from megapar.core.device.block import Block
from megapar.core.device.dtypes import wide


class Columns(NamedTuple):
    """Keys and values, or their gradients, as they travel: [S, 2, B, G, D]."""

    message: Tensor

    @classmethod
    def of(cls, k: Tensor, v: Tensor) -> Columns:
        """From k and v [B, G, S, D]; a copy."""
        return cls(torch.stack([x.permute(2, 0, 1, 3) for x in (k, v)], dim=1))

    def zeros(self) -> Columns:
        """Room for gradients."""
        return Columns(self.message.new_zeros(self.message.shape, dtype=wide(self.message.dtype)))

    @property
    def k(self) -> Tensor:
        """[B, G, S, D], a view."""
        return self.message[:, 0].permute(1, 2, 0, 3)

    @property
    def v(self) -> Tensor:
        """[B, G, S, D], a view."""
        return self.message[:, 1].permute(1, 2, 0, 3)


# What attends to tiles of columns that have arrived, and for a backward adds to the columns' gradients.
See = Callable[[Iterable[Tile], Columns], None]
SeeBack = Callable[[Iterable[Tile], Columns, Columns], None]


@dataclass(frozen=True)
class Plan:
    """The tiles of this rank in one micro-batch. own: of its own columns; early, late: the same in two parts, for a
    backward. others: of the columns of other ranks, one list for each arrival.
    """

    own: tuple[Tile, ...]
    early: tuple[Tile, ...]
    late: tuple[Tile, ...]
    others: tuple[tuple[Tile, ...], ...]


class Transport(Protocol):
    """How columns reach the rows of other ranks, and gradients their columns."""

    def forward(self, own: Columns, plan: Plan, see: See) -> None:
        """Let the rows see all columns."""
        ...

    def backward(self, own: Columns, plan: Plan, see: SeeBack) -> Columns:
        """The same with gradients; this rank's columns' gradients, summed over all ranks."""
        ...


@dataclass(frozen=True)
class Work:
    """One call: where keys come from, which tiles, and how they are computed."""

    transport: Transport
    plan: Plan
    flash: bool
    dropout: float


def attend_blockwise(q: Tensor, k: Tensor, v: Tensor, work: Work) -> Tensor:
    """q [B, N, S, D], k and v [B, G, S, D] of this rank's positions to [B, N, S, D]."""
    return _Blockwise.apply(q, k, v, work)  # type: ignore[no-any-return]


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, work: Work) -> Tensor:
        rows = Rows(q, flash=work.flash, dropout=work.dropout)
        work.transport.forward(
            Columns.of(k, v), work.plan, lambda tiles, columns: rows.see(tiles, columns.k, columns.v)
        )
        result = rows.result()
        ctx.work, ctx.drawn = work, rows.drawn
        ctx.save_for_backward(q, k, v, *result[:2])
        return result.out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        work: Work = ctx.work
        drawn: Iterator[tuple[Any, ...]] = iter(ctx.drawn)
        plan = work.plan
        if work.dropout:
            # Every tile drew numbers of its own, so the backward's tiles must be those of the forward.
            own = len(plan.own)
            drawn = itertools.chain(ctx.drawn[own:], ctx.drawn[:own])
            plan = Plan(plan.own, (), plan.own, plan.others)
        else:
            drawn = itertools.repeat(ctx.drawn[0])
        rows = RowGradients(grads[0], q, Block(out, lse), drawn, flash=work.flash, dropout=work.dropout)

        def see(tiles: Iterable[Tile], columns: Columns, gradients: Columns) -> None:
            rows.see(tiles, columns.k, columns.v, gradients.k, gradients.v)

        summed = work.transport.backward(Columns.of(k, v), plan, see)
        dk, dv = (x.to(k.dtype) for x in (summed.k, summed.v))
        return rows.dq.to(q.dtype), dk, dv, None
