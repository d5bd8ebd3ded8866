"""Attention slice by slice of the sequence when the ranks of cp share every slice.

    forward    kv of slice c ^             earlier slices, own keys     kv v     remote keys of slice c
    backward   remote keys of slice c      dkv of slice c ^             earlier slices, own keys     dkv v

(``^`` launch, ``v`` wait.) Slice c attends to the keys of slices 0..c, in order of position. They arrive block by block
around a ring or all at once, and are kept until the layer's backward, since later slices need them again. A key's
gradient is summed in max(fp32, dtype) over the slices that attended to it. It returns to its owner once the queries of
its own slice, which come last in the backward, have added their part. With an ``Expansion`` all of this holds of
latents in the place of keys and values (``columns``); each slice expands the columns that it attends to.

Shape letters: B batch, N query heads, G key-value heads, S sequence, s positions of this rank in a slice, D head size
of queries and keys, V of values and outputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar.core.attention_mask import AttentionMask
from megapar.core.comm.axis import Axis
from megapar.core.comm.exchange import AllGather, ReduceScatter
from megapar.core.comm.in_flight import CommContext, InFlight
from megapar.core.context_parallel.columns import ColumnReader, Columns, Expansion, reader_of
from megapar.core.context_parallel.online_softmax import OnlineSoftmax, OnlineSoftmaxBackward
from megapar.core.context_parallel.positions import SequenceLayout
from megapar.core.context_parallel.ring import pass_on
from megapar.core.context_parallel.tiles import Tile, cut_columns, diagonal_tiles, tiles_before
from megapar.core.device.attention.blocks import AttentionBlock
from megapar.core.device.attention.row_statistic import Rows
from megapar.core.sharding.gradient_sink import GradientSink


@dataclass(frozen=True)
class SlicePlan:
    """The tiles of one slice that this rank computes. The columns of tiles are positions of the whole sequence.

    Attributes:
        runs: The positions of each rank in this slice.
        local_tiles: Tiles over the keys of earlier slices and over this rank's keys, which need no message.
        remote_tiles: Tiles over the keys of other ranks in this slice, one tuple per arrival.
    """

    runs: tuple[range, ...]
    local_tiles: tuple[Tile, ...]
    remote_tiles: tuple[tuple[Tile, ...], ...]


def slice_plans(
    layout: SequenceLayout, rank: int, mask: AttentionMask, *, ring: bool, most: int | None = None
) -> tuple[SlicePlan, ...]:
    """Plan every slice of ``layout``.

    Args:
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
ComputeTiles = Callable[[Iterable[Tile]], None]


@dataclass(frozen=True)
class GatheredSlices:
    """A transport with one all-gather and one reduce-scatter over cp per slice."""

    axis: Axis
    comm: CommContext

    def fetch(self, columns: Tensor, plan: SlicePlan, compute: ComputeTiles) -> None:
        """Compute all tiles, filling in the slice's remote ``columns`` [S, ..] as they arrive. Local tiles hide it."""
        flight = self.comm.launch(AllGather(self.axis), _rows(columns, plan.runs[self.axis.rank]).clone())
        compute(plan.local_tiles)
        pieces = self.comm.wait(flight).chunk(self.axis.size)
        for rank, run in enumerate(plan.runs):
            if rank != self.axis.rank:
                _rows(columns, run).copy_(pieces[rank])
        compute(plan.remote_tiles[0])

    def return_gradients(self, gradients: Tensor, plan: SlicePlan, compute: ComputeTiles) -> Tensor:
        """Compute all tiles; return the other ranks' part of the gradients of this rank's columns, [s, ..].

        gradients: [S, ..], of all columns, summed over the slices so far.
        """
        compute(plan.remote_tiles[0])
        message = torch.cat([_rows(gradients, run) for run in plan.runs])
        message.chunk(self.axis.size)[self.axis.rank].zero_()  # already in ``gradients``
        flight = self.comm.launch(ReduceScatter(self.axis), message)
        compute(plan.local_tiles)
        return self.comm.wait(flight)


@dataclass(frozen=True)
class RingSlices:
    """A transport around a ring: each block is forwarded before it is used, and its gradients follow it."""

    axis: Axis
    comm: CommContext

    def fetch(self, columns: Tensor, plan: SlicePlan, compute: ComputeTiles) -> None:
        """See ``GatheredSlices.fetch``. Local tiles hide the first block's arrival."""
        flight = pass_on(self.axis, self.comm, _rows(columns, plan.runs[self.axis.rank]).clone())
        compute(plan.local_tiles)
        for step, tiles in enumerate(plan.remote_tiles, start=1):
            block = self.comm.wait(flight)
            if step < len(plan.remote_tiles):
                flight = pass_on(self.axis, self.comm, block)
            _rows(columns, self._source(plan, step)).copy_(block)
            compute(tiles)

    def return_gradients(self, gradients: Tensor, plan: SlicePlan, compute: ComputeTiles) -> Tensor:
        """See ``GatheredSlices.return_gradients``. Local tiles hide the return of this rank's gradients."""
        returning: InFlight | None = None
        for step, tiles in enumerate(plan.remote_tiles, start=1):
            compute(tiles)
            remote_gradients = _rows(gradients, self._source(plan, step)).clone()
            if returning is not None:
                remote_gradients.add_(self.comm.wait(returning))
            returning = pass_on(self.axis, self.comm, remote_gradients)
        compute(plan.local_tiles)
        assert returning is not None
        return self.comm.wait(returning)

    def _source(self, plan: SlicePlan, step: int) -> range:
        return plan.runs[(self.axis.rank - step) % self.axis.size]


SliceTransport = GatheredSlices | RingSlices


class SharedSlices:
    """Attention of one layer over one micro-batch whose slices ranks share; call ``attend`` slice by slice.

    Attributes:
        length: S, positions of all slices.
        columns: Keys and values, or latents, of all slices so far.
        gradients: The gradients of ``columns`` while the backward runs.
    """

    def __init__(self, axis: Axis, transport: SliceTransport, plans: Sequence[SlicePlan], *, flash: bool) -> None:
        self.axis, self.transport, self.plans, self.flash = axis, transport, plans, flash
        self.length = sum(len(run) for plan in plans for run in plan.runs)
        self.columns: Columns | None = None
        self.gradients: Columns | None = None
        self._handle: Tensor | None = None
        self._refilled = False

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        number: int,
        dropout: float,
        expansion: Expansion | None = None,
        seen_by: Rows = None,
    ) -> Tensor:
        """Attend from slice ``number`` to itself and earlier slices; returns [B, N, s, V].

        q is [B, N, s, D], k [B, G, s, D] and v [B, G, s, V] of this rank's positions of the slice; with an expansion as
        in ``attend_blockwise``. ``seen_by`` is the end of the slice's rows.
        """
        weight, defer_wgrad = (None, None) if expansion is None else (expansion.weight, expansion.defer_wgrad)
        out: Tensor
        call = _Call(self, number, dropout, defer_wgrad, seen_by)
        out, self._handle, lse = _Attend.apply(q, k, v, weight, self._handle, call)
        if number == len(self.plans) - 1:
            self._handle = None  # its graph refers to this object
        return out if seen_by is None else seen_by.weigh(out, lse)

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
    seen_by: Rows

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
    """Attention of one slice. The handle passed from slice to slice makes the backward run last slice first."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None, handle: Tensor | None, call: _Call
    ) -> tuple[Tensor, Tensor, Tensor]:
        shared, reader = call.shared, call.reader(v.shape[-1], weight)
        columns = shared.put(Columns.of(k, v, q.dtype), call.own)
        value_dim = reader.value_dim(q, v)
        rows = OnlineSoftmax(q, value_dim, flash=shared.flash, dropout=call.dropout, seen_by=call.seen_by)
        shared.transport.fetch(columns.message, call.plan, lambda tiles: reader.attend(rows, tiles, columns))
        result = rows.result()
        ctx.call, ctx.drawn, ctx.first, ctx.column_dtype = call, rows.drawn, handle is None, k.dtype
        ctx.save_for_backward(q, weight, *result[:2])
        ctx.mark_non_differentiable(result.lse)
        return result.out, q.new_zeros(1), result.lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, weight, out, lse = ctx.saved_tensors
        call: _Call = ctx.call
        shared, columns = call.shared, call.shared.columns
        assert columns is not None
        if shared.gradients is None:
            shared.gradients = columns.zeros()
        sums, near = shared.gradients, len(call.plan.local_tiles)
        # The forward computed the local tiles first; the backward computes them last.
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
        handle = None if ctx.first else grads[1]
        dk, dv = (x.to(ctx.column_dtype) for x in (own.k, own.v))
        return rows.dq.to(q.dtype), dk, dv, reader.weight_gradient(), handle, None


def _rows(x: Tensor, run: range) -> Tensor:
    return x[run.start : run.stop]
