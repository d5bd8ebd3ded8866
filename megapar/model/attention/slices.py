"""Attention slice by slice of the sequence: slice c sees the keys and values of slices 0..c (AMPipe).

Shape letters: B samples, s positions of a slice, S sequence (each on this rank), H hidden, N query heads, G key-value
heads, D head size of queries and keys, V of values and outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megapar.core.comm.axis import Axis
from megapar.core.context_parallel.slices import SharedSlices
from megapar.core.device.attention.row_statistic import Rows
from megapar.core.device.attention.slices import attention_slice_reference, packed_attention_slice_reference
from megapar.core.device.attention.table import DOCUMENTS, WINDOW
from megapar.core.device.base import Indices
from megapar.core.device.dtypes import at_least_fp32
from megapar.core.device.ops import op
from megapar.core.recompute.replay import once
from megapar.core.recompute.selective import Rematerialized, consume
from megapar.core.tensor_parallel.layers import Started
from megapar.model.layers.context import Context
from megapar.moe.slicing import Slicing

if TYPE_CHECKING:
    from megapar.model.attention.self_attention import SelfAttention


class CausalSlices:
    """Attention of one layer over one micro-batch. Each slice calls enter, project, attend, leave, finish in order.

    If the whole input is available, ``prepare`` computes the heads of all slices with one product; otherwise each
    slice computes its own. Context parallel ranks either exchange the keys of their parts of a slice
    (``core.context_parallel.slices``; under a sliding window only the visible ones, ``window_keys``), or hold whole
    slices of some of the heads (Ulysses).

    Attributes:
        hides: The all-gathers over mp are in flight from ``enter`` to ``project``, and the sums over mp from ``leave``
            to ``finish``. The first all-gather and the last sum overlap only with parts of their own products.
        prepared: The heads of all slices have been made.
    """

    def __init__(self, attention: SelfAttention, context: Context, *, hides: bool = False) -> None:
        self._attention, self._context, self._mask = attention, context, attention.mask_of(context)
        self.hides = hides and attention.mp.size > 1 and len(context.slices) > 1
        self.prepared = False
        self._entering: dict[int, Started] = {}
        self._heads: dict[int, tuple[Tensor, ...]] = {}
        self._attended: dict[int, Tensor] = {}
        self._more: dict[int, tuple[Tensor, ...]] = {}
        self._leaving: dict[int, Started] = {}
        self._entered = 0
        self._keys, self._values, self._arrived = PrefixBuffer(), PrefixBuffer(), PrefixBuffer()
        self._latents: list[Sequence[Tensor]] = []
        self._remade: Rematerialized | None = None
        self._shared: SharedSlices | None = None
        self._halos = attention.halos(context)
        if context.slice_plans is not None and not self._halos:
            cp, plans = attention.cp, context.slice_plans
            # The backward reads the columns of the object made in the forward, so recomputation must refill that one.
            self._shared = once(
                context.replay, lambda: SharedSlices(cp.axis, cp.slice_transport, plans, flash=attention.sizes.flash)
            )

    def prepare(self, x_BSH: Tensor) -> None:
        """Compute queries, keys and values of all slices."""
        self.prepared = True
        heads = self._attention.project(x_BSH, self._attention.angles_of(self._context))
        pieces = (split_slices(x, self._context.slices) for x in heads)
        self._heads = dict(enumerate(zip(*pieces, strict=True)))
        self._latents = [heads[3:]] if heads[3:] else []
        if not self._attention.cp.active:
            self._keys, self._values = PrefixBuffer(heads[1].data), PrefixBuffer(heads[2].data)

    def enter(self, x_BsH: Tensor | None) -> None:
        """Take the next slice, [B, s, H]; None if all are prepared."""
        number, self._entered = self._entered, self._entered + 1
        if x_BsH is not None:
            hidden = self.hides and number > 0
            self._entering[number] = self._attention.start_project(x_BsH) if hidden else Started(x_BsH)

    def project(self, number: int) -> None:
        """Compute queries, keys and values of slice ``number``."""
        if self.prepared:
            return
        angles, place = self._attention.angles_of(self._context), self._context.slices[number]
        slice_angles = None if angles is None else (angles[0][:, place], angles[1][:, place])
        self._heads[number] = self._attention.finish_project(self._entering.pop(number), slice_angles)

    def attend(self, number: int) -> None:
        """Compute attention of slice ``number`` over the keys of all slices up to its own."""
        attention, context = self._attention, self._context
        q, k, v, *more = self._heads.pop(number)
        self._more[number] = tuple(more)
        if self._shared is not None:  # keys of other ranks are kept, because recomputation would send them again
            self._attended[number] = self._attend_shared(self._shared, q, k, v, number)
            return
        dealt: list[Tensor] = []
        if attention.cp.deals_heads:
            q, k, v, *dealt = attention.to_heads(q, k, v)
        if number == 0:
            self._remade = attention.remade(context, self._joined_latents)
        if dealt or not self.prepared:
            self._latents.append(dealt or more)
        places = context.slices if self._halos else context.whole_slices
        place, total = places[number], places[-1].stop
        columns = (self._keys.add(k, place, total), self._values.add(v, place, total))
        if self._halos:
            ends = [sum(map(len, halo.arrived)) for halo in self._halos]
            came = slice(ends[number] - sum(self._halos[number].received), ends[number])
            kept = partial(self._arrived.add, place=came, total=ends[-1])
            columns = attention.cp.window_keys.fetch(*columns, self._halos[number], kept)
        attend = partial(self._attend, number=number, rows=attention.rows(context, place))
        y = consume(attend, q, columns, self._remade, selective=attention.selective)
        if attention.cp.deals_heads:
            y = attention.to_positions(y)
        self._attended[number] = y

    def leave(self, number: int) -> None:
        """Project the heads of slice ``number`` to hidden features, or launch the sum over mp of their projection."""
        y, more, attention = self._attended.pop(number), self._more.pop(number), self._attention
        if self.hides and number < len(self._context.slices) - 1:
            self._leaving[number] = attention.start_output(y, *more)
        else:
            self._attended[number] = attention.output(y, *more)

    def finish(self, number: int) -> Tensor:
        """Return the output of slice ``number``, [B, s, H]."""
        started = self._leaving.pop(number, None)
        return self._attended.pop(number) if started is None else self._attention.finish_output(started)

    def _joined_latents(self) -> list[Tensor]:
        """Return what ``project`` returned after the values, of all positions."""
        return [x[0] if len(x) == 1 else torch.cat(x, dim=1) for x in zip(*self._latents, strict=True)]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, number: int, rows: Rows) -> Tensor:
        """Return [B, s, N, V] for q [B, s, N, D], k [B, end of the slice, G, D], v [B, end of the slice, G, V].

        With keys in a window from other cp ranks, k and v are those that the slice sees.
        """
        flash = self._attention.sizes.flash
        heads = tuple(x.transpose(1, 2) for x in (q, k, v))
        with self._drawing(q, number) as dropout:
            if self._mask.form in (DOCUMENTS, WINDOW):
                packed = op("packed_attention_slice", q) if flash else packed_attention_slice_reference
                cut = self._mask.cut(self._place(number), q.device)
                unseen = 0 if self._halos else cut.first_key
                heads = (heads[0], *(x[:, :, unseen:] for x in heads[1:]))
                y = packed(*heads, documents=cut, dropout=dropout, rows=rows)
            else:
                form = op("attention_slice", q) if flash else attention_slice_reference
                y = form(*heads, dropout=dropout, rows=rows)
        return y.transpose(1, 2)

    def _place(self, number: int) -> slice:
        """Return the positions of the queries of slice ``number`` in the sequence."""
        if not self._halos:
            return self._context.whole_slices[number]
        (run,) = self._halos[number].runs
        return slice(run.start, run.stop)

    def _attend_shared(self, shared: SharedSlices, q: Tensor, k: Tensor, v: Tensor, number: int) -> Tensor:
        """Return [B, s, N, V] for q [B, s, N, D], k [B, s, G, D], v [B, s, G, V]."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with self._drawing(q, number) as dropout:
            rows = self._attention.rows(self._context, self._context.slices[number])
            out = shared.attend(q, k, v, number, dropout, self._attention.expansion(), rows)
        replay = self._context.replay
        if replay is not None and not replay.recomputing and number == len(self._context.slices) - 1:
            shared.drop_columns()
        return out.transpose(1, 2)

    def _drawing(self, q: Tensor, number: int) -> AbstractContextManager[float]:
        """Return a context that draws the random numbers of slice ``number`` and yields its dropout probability."""
        place = self._context.place(self._attention.place, number)
        return self._attention.drawing(self._context, place, q.device)


class PrefixBuffer:
    """One buffer for the keys, or the values, of all slices. Slice c reads the prefix of slices 0..c.

    The gradient of a slice is the sum over all slices that read it, computed in max(fp32, dtype) and rounded once.
    whole: keys or values of all slices, if they are known from the start.
    """

    def __init__(self, whole: Tensor | None = None) -> None:
        self._buffer, self._filled = whole, whole is not None
        self._handle: Tensor | None = None
        self._sum = _PrefixGradients()

    def add(self, piece: Tensor, place: slice, total: int) -> Tensor:
        """Add the keys or values of the next slice, [B, s, G, any], at ``place`` of ``total`` positions.

        Returns the prefix that the slice reads, [B, end of the slice, G, any].
        """
        if self._buffer is None:
            self._buffer = piece.new_empty((piece.shape[0], total, *piece.shape[2:]))
        if not self._filled:
            self._buffer.data[:, place] = piece.detach()
        prefix: Tensor
        prefix, self._handle = _Prefix.apply(self._handle, piece, self._buffer, place, self._sum)
        return prefix


class _PrefixGradients:
    """Sum of the gradients of the prefixes. The backward adds them in reverse slice order."""

    def __init__(self) -> None:
        self._total: Tensor | None = None

    def take(self, grad: Tensor, place: slice) -> Tensor:
        """Add the gradient of the prefix that slice ``place`` read. Return the slice's gradient, now complete."""
        if self._total is None:
            self._total = grad.to(at_least_fp32(grad.dtype), copy=True)
        else:
            self._total[:, : place.stop] += grad
        gradient = self._total[:, place].to(grad.dtype)
        if place.start == 0:
            self._total = None
        return gradient


class _Prefix(torch.autograd.Function):
    """The buffer up to the end of a slice. A handle passed from slice to slice orders the backward."""

    @staticmethod
    def forward(
        ctx: Any, handle: Tensor | None, piece: Tensor, buffer: Tensor, place: slice, total: _PrefixGradients
    ) -> tuple[Tensor, Tensor]:
        ctx.place, ctx.total, ctx.first = place, total, handle is None
        # ``data`` has a separate version counter, so autograd still accepts the prefixes that earlier slices saved.
        return buffer.data[:, : place.stop], piece.new_zeros(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, handle = grads
        return None if ctx.first else handle, ctx.total.take(grad, ctx.place), None, None, None


def split_slices(x: Tensor, slices: Sequence[slice]) -> tuple[Tensor, ...]:
    """Split dim 1 of ``x`` into slices, whose gradients are concatenated by one copy."""
    return torch.split(x, [place.stop - place.start for place in slices], dim=1)


class Arrangement:
    """Reorders positions so that the chunk of each mp rank holds its part of every slice.

    Attributes:
        slicing: The slices of the sequence. May change between two forwards.
    """

    def __init__(self, slicing: Slicing, mp: Axis, *, sequence_parallel: bool) -> None:
        self.slicing, self._parts = slicing, mp.size if sequence_parallel else 1
        self._indices = Indices()

    @property
    def moves(self) -> bool:
        """The order differs from the sequence's; otherwise all methods return their input."""
        return self.slicing.degree > 1 and self._parts > 1

    def index(self, length: int, device: torch.device) -> Tensor:
        """Return the source of each position, [length] int64."""
        key = length, self.slicing, "arrange"
        return self._indices.of(key, device, lambda: self.slicing.order(length, self._parts))

    def arrange(self, x_BS: Tensor) -> Tensor:
        """Reorder [B, S, ..]."""
        return x_BS.index_select(1, self.index(x_BS.shape[1], x_BS.device)) if self.moves else x_BS

    def restore(self, x_BS: Tensor) -> Tensor:
        """Undo ``arrange``."""
        if not self.moves:
            return x_BS
        length = x_BS.shape[1]

        def order() -> list[int]:
            chosen = self.slicing.order(length, self._parts)
            return sorted(range(length), key=chosen.__getitem__)

        return x_BS.index_select(1, self._indices.of((length, self.slicing, "restore"), x_BS.device, order))
