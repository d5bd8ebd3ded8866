"""Attention slice by slice of the sequence when the ranks of cp share every slice.

    forward    kv of slice c ^             earlier slices, own keys     kv v     remote keys of slice c
    backward   remote keys of slice c      dkv of slice c ^             earlier slices, own keys     dkv v

(``^`` launch, ``v`` wait.) Slice c attends to the keys of slices 0..c, in order of position. They arrive block by block
around a ring or all at once, and are kept until the layer's backward, since later slices need them again. A key's
gradient is summed in max(fp32, dtype) over the slices that attended to it. It returns to its owner once the queries of
its own slice, which come last in the backward, have added their part. With an ``Expansion`` all of this holds of
latents in the place of keys and values (``latents``); each slice expands the columns that it attends to.

Shape letters: B batch, N query heads, G key-value heads, S sequence, s positions of this rank in a slice, D head size
of queries and keys, V of values and outputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar.core.attention_mask import AttentionMask
from megapar.core.comm.axis import Axis
from megapar.core.comm.exchange import AllGather, ReduceScatter, SendReceive
from megapar.core.comm.in_flight import CommContext, InFlight
from megapar.core.context_parallel.columns import Columns
from megapar.core.context_parallel.latents import ColumnReader, Expansion, reader_of
from megapar.core.context_parallel.online_softmax import OnlineSoftmax, OnlineSoftmaxBackward
from megapar.core.context_parallel.positions import SequenceLayout
from megapar.core.context_parallel.tiles import Tile, cut_columns, diagonal_tiles, tiles_before
from megapar.core.device.block_attention import AttentionBlock
from megapar.core.sharding.gradient_sink import GradientSink


@dataclass(frozen=True)
class SlicePlan:
    """The tiles of one slice that this rank computes. The columns of tiles are positions of the whole sequence.

    Attributes:
        runs: The positions of each rank in this slice.
        near: Tiles over the keys of earlier slices and over this rank's own keys, which need no message.
        others: Tiles over the keys of other ranks in this slice, one tuple per arrival.
    """

    runs: tuple[range, ...]
    near: tuple[Tile, ...]
    others: tuple[tuple[Tile, ...], ...]


def slice_plans(
    layout: SequenceLayout, rank: int, mask: AttentionMask, *, ring: bool, most: int | None = None
) -> tuple[SlicePlan, ...]:
    """Plan every slice of ``layout``.

    Args:
        layout: The positions of each rank.
        mask: The attention mask.
        ring: Remote keys arrive one block at a time from the ranks before this one, nearest first; otherwise all at
            once.
        most: The maximum number of columns of a tile, for columns that are expanded piece by piece; None for any
            number.
    """
    plans, start = [], 0
    for runs in zip(*(layout.runs(mask.length, other) for other in range(layout.size)), strict=True):
        own = runs[rank]
        near = [*tiles_before(own, range(start), mask), *diagonal_tiles(own, mask)]
        arrivals = [range(start, own.start)]
        if ring:
            sources = (runs[(rank - step) % layout.size] for step in range(1, layout.size))
            arrivals = [run if run.start < own.start else range(0) for run in sources]
        groups = [near, *(tiles_before(own, keys, mask) for keys in arrivals)]
        if most is not None:
            groups = [cut_columns(tiles, most) for tiles in groups]
        near, *others = groups
        plans.append(SlicePlan(runs, tuple(near), tuple(map(tuple, others))))
        start += sum(map(len, runs))
    return tuple(plans)


# Attends to tiles; in a backward it also adds to the gradients of their columns.
SeeTiles = Callable[[Iterable[Tile]], None]


class SliceTransport(Protocol):
    """Transport of the keys and values of a slice to the other ranks, and of their gradients back to the owner."""

    def fetch(self, columns: Tensor, plan: SlicePlan, see: SeeTiles) -> None:
        """Call ``see`` for all tiles, filling in the slice's remote ``columns`` [S, ..] as they arrive."""
        ...

    def return_gradients(self, gradients: Tensor, plan: SlicePlan, see: SeeTiles) -> Tensor:
        """Call ``see`` for all tiles; return the other ranks' part of the gradients of this rank's columns, [s, ..].

        gradients: [S, ..], of all columns, summed over the slices so far.
        """
        ...


@dataclass(frozen=True)
class GatheredSlices:
    """A transport with one all-gather and one reduce-scatter per slice.

    Attributes:
        axis: cp, at least two ranks.
        comm: Launches the collectives and tracks those in flight.
    """

    axis: Axis
    comm: CommContext

    def fetch(self, columns: Tensor, plan: SlicePlan, see: SeeTiles) -> None:
        """Overlap the all-gather with the near tiles."""
        flight = self.comm.launch(AllGather(self.axis), _rows(columns, plan.runs[self.axis.rank]).clone())
        see(plan.near)
        pieces = self.comm.wait(flight).chunk(self.axis.size)
        for rank, run in enumerate(plan.runs):
            if rank != self.axis.rank:
                _rows(columns, run).copy_(pieces[rank])
        see(plan.others[0])

    def return_gradients(self, gradients: Tensor, plan: SlicePlan, see: SeeTiles) -> Tensor:
        """Overlap the reduce-scatter with the near tiles."""
        see(plan.others[0])
        message = torch.cat([_rows(gradients, run) for run in plan.runs])
        message.chunk(self.axis.size)[self.axis.rank].zero_()  # already in ``gradients``
        flight = self.comm.launch(ReduceScatter(self.axis), message)
        see(plan.near)
        return self.comm.wait(flight)


@dataclass(frozen=True)
class RingSlices:
    """A transport around a ring: each block is forwarded before it is used, and its gradients follow it.

    Attributes:
        axis: cp, at least two ranks.
        comm: Launches the messages and tracks those in flight.
    """

    axis: Axis
    comm: CommContext

    def fetch(self, columns: Tensor, plan: SlicePlan, see: SeeTiles) -> None:
        """Overlap the first block's arrival with the near tiles."""
        flight = self._pass_on(_rows(columns, plan.runs[self.axis.rank]).clone())
        see(plan.near)
        for step, tiles in enumerate(plan.others, start=1):
            block = self.comm.wait(flight)
            if step < len(plan.others):
                flight = self._pass_on(block)
            _rows(columns, self._source(plan, step)).copy_(block)
            see(tiles)

    def return_gradients(self, gradients: Tensor, plan: SlicePlan, see: SeeTiles) -> Tensor:
        """Overlap the return of this rank's gradients with the near tiles."""
        returning: InFlight | None = None
        for step, tiles in enumerate(plan.others, start=1):
            see(tiles)
            remote_gradients = _rows(gradients, self._source(plan, step)).clone()
            if returning is not None:
                remote_gradients.add_(self.comm.wait(returning))
            returning = self._pass_on(remote_gradients)
        see(plan.near)
        assert returning is not None
        return self.comm.wait(returning)

    def _source(self, plan: SlicePlan, step: int) -> range:
        return plan.runs[(self.axis.rank - step) % self.axis.size]

    def _pass_on(self, block: Tensor) -> InFlight:
        size, rank = self.axis.size, self.axis.rank
        return self.comm.launch(SendReceive(self.axis, (rank + 1) % size, (rank - 1) % size), block)


class SharedSlices:
    """Attention of one layer over one micro-batch whose slices ranks share; call ``attend`` slice by slice.

    Attributes:
        axis: Cp.
        transport: Moves keys and values between ranks.
        plans: The tiles of each slice.
        flash: Use fused kernels where the device has them.
        length: S, positions of all slices.
        columns: Keys and values, or latents, of all slices so far.
        gradients: The gradients of ``columns`` while the backward runs.
    """

    def __init__(self, axis: Axis, transport: SliceTransport, plans: Sequence[SlicePlan], *, flash: bool) -> None:
        self.axis, self.transport, self.plans, self.flash = axis, transport, plans, flash
        self.length = sum(len(run) for plan in plans for run in plan.runs)
        self.columns: Columns | None = None
        self.gradients: Columns | None = None
        self._token: Tensor | None = None
        self._refilled = False

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, number: int, dropout: float, expansion: Expansion | None = None
    ) -> Tensor:
        """Attend from slice ``number`` to itself and earlier slices; returns [B, N, s, V].

        Args:
            q: [B, N, s, D], this rank's positions of the slice; k [B, G, s, D] and v [B, G, s, V] likewise.
            number: Number of the slice.
            dropout: Probability, applied to the attention weights.
            expansion: Makes keys and values of k and v, which are then latents; see ``attend_blockwise``.
        """
        weight, defer_wgrad = (None, None) if expansion is None else (expansion.weight, expansion.defer_wgrad)
        out: Tensor
        out, self._token = _Attend.apply(q, k, v, weight, self._token, _Call(self, number, dropout, defer_wgrad))
        if number == len(self.plans) - 1:
            self._token = None  # its graph refers to this object
        return out

    def drop_columns(self) -> None:
        """Free the columns of a recomputed unit after its forward; its recomputation fills them for the backward."""
        self.columns, self._refilled = None, True

    def finish(self) -> None:
        """End the backward; a recomputed unit, which may live longer, frees the columns."""
        self.gradients = None
        if self._refilled:
            self.columns = None

    def put(self, own: Columns, run: range) -> Columns:
        """Copy this rank's columns of a slice into those of the whole sequence."""
        if self.columns is None:
            self.columns = own.with_message(own.message.new_empty((self.length, *own.message.shape[1:])))
        _rows(self.columns.message, run).copy_(own.message)
        return self.columns


@dataclass(frozen=True)
class _Call:
    """The non-tensor arguments of one slice."""

    shared: SharedSlices
    number: int
    dropout: float
    defer_wgrad: GradientSink | None

    def reader(self, rotary_dim: int, weight: Tensor | None, *, needs_wgrad: bool = False) -> ColumnReader:
        """Return the reader of the columns; latents are expanded for as many positions as a rank holds in all."""
        most = self.shared.length // self.shared.axis.size
        return reader_of(weight, self.defer_wgrad, rotary_dim, most, needs_wgrad=needs_wgrad)

    @property
    def plan(self) -> SlicePlan:
        return self.shared.plans[self.number]

    @property
    def own(self) -> range:
        return self.plan.runs[self.shared.axis.rank]


class _Attend(torch.autograd.Function):
    """Attention of one slice. The token passed from slice to slice makes the backward run last slice first."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None, token: Tensor | None, call: _Call
    ) -> tuple[Tensor, Tensor]:
        shared, reader = call.shared, call.reader(v.shape[-1], weight)
        columns = shared.put(Columns.of(k, v, q.dtype), call.own)
        rows = OnlineSoftmax(q, reader.value_dim(q, v), flash=shared.flash, dropout=call.dropout)
        shared.transport.fetch(columns.message, call.plan, lambda tiles: reader.attend(rows, tiles, columns))
        result = rows.result()
        ctx.call, ctx.drawn, ctx.first, ctx.column_dtype = call, rows.drawn, token is None, k.dtype
        ctx.save_for_backward(q, weight, *result[:2])
        return result.out, q.new_zeros(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, weight, out, lse = ctx.saved_tensors
        call: _Call = ctx.call
        shared, columns = call.shared, call.shared.columns
        assert columns is not None
        if shared.gradients is None:
            shared.gradients = columns.zeros()
        sums, near = shared.gradients, len(call.plan.near)
        # The forward computed the near tiles first; the backward computes them last.
        drawn = itertools.chain(ctx.drawn[near:], ctx.drawn[:near])
        rows = OnlineSoftmaxBackward(
            grads[0], q, AttentionBlock(out, lse), drawn, flash=shared.flash, dropout=call.dropout
        )
        rotary_dim = columns.message.shape[-1] - columns.key_dim
        reader = call.reader(rotary_dim, weight, needs_wgrad=ctx.needs_input_grad[3])
        received = shared.transport.return_gradients(
            sums.message, call.plan, lambda tiles: reader.differentiate(rows, tiles, columns, sums)
        )
        own = columns.with_message(_rows(sums.message, call.own) + received)
        if ctx.first:
            shared.finish()
        token = None if ctx.first else grads[1]
        dk, dv = (x.to(ctx.column_dtype) for x in (own.k, own.v))
        return rows.dq.to(q.dtype), dk, dv, reader.weight_gradient(), token, None


def _rows(x: Tensor, run: range) -> Tensor:
    return x[run.start : run.stop]
