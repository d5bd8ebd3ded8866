"""AMPipe: a layer's work from attention to experts, slice by slice of the sequence, so that the all-to-alls hide.

Every slice runs attention, projection, dropout, residual, norm, router, dispatch, experts and combine by itself; only
keys and values are shared: slice c sees those of slices 0..c. Program order of a layer, two slices (``^`` launch,
``v`` wait):

    attn0 D0^  attn1 D1^  |  D0v exp0 C0^  D1v exp1 C1^  |  C0v C1v

With ``cross_layer`` the last column moves into the next layer, slice by slice, and only the last layer's slices are put
together: ``C0v attn0 D0^  C1v attn1 D1^``. What flies between two layers is passed as tokens (``core.tickets``), which
stand bare in the output, because hooks of sharding must see what autograd sees. A recomputed unit waits for what enters
it once, in its forward, and keeps what arrived (``Entering``).
Source: AMPipe (openreview.net/forum?id=yLgr02IsXY); the backward is the mirror by itself.

Shape letters: B samples, s positions of a slice on this rank, S sequence, H hidden, N query heads, G key-value heads,
D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from megapar.core.context_parallel.heads import to_heads, to_positions
from megapar.core.context_parallel.slices import SharedSlices
from megapar.core.device.attention_slice import attention_slice_reference, packed_attention_slice_reference
from megapar.core.device.dtypes import wide
from megapar.core.device.ops import op
from megapar.core.replay import Replay
from megapar.core.selective import again
from megapar.core.wide_sum import wide_sums
from megapar.model.context import Context
from megapar.moe.sliced import Arriving
from megapar.moe.stats import MoeStats

if TYPE_CHECKING:
    from megapar.model.attention import Attention
    from megapar.model.block import DecoderBlock, HiddenDropout


class Sliced(NamedTuple):
    """Activations between two layers, slice by slice: residual + dropout(what arrives + shared).

    residuals: [B, s, H] per slice. tokens: per slice those of its combines in flight. shared: [B, s, H] per slice, or
    nothing. arriving: the combines, and drop: the dropout of the layer that sent them; None where nothing is in flight.
    entered: the recomputed unit whose input this is.
    """

    residuals: tuple[Tensor, ...]
    tokens: tuple[tuple[Tensor, ...], ...] = ()
    shared: tuple[Tensor, ...] = ()
    arriving: Arriving | None = None
    drop: HiddenDropout | None = None
    entered: Replay | None = None

    def take(self, number: int, context: Context) -> Tensor:
        """[B, s, H]: wait for one slice."""
        if self.entered is None:
            return self._finish(number, context)
        return self.entered.arrival(lambda: self._finish(number, context))

    def _finish(self, number: int, context: Context) -> Tensor:
        x = self.residuals[number]
        if self.arriving is None or self.drop is None:
            return x
        y = self.arriving.finish(number, self.tokens[number]).view_as(x)
        if self.shared:
            y = y + self.shared[number]
        out: Tensor = x + self.drop(y, context, "mlp", number)
        return out


class Entering:
    """Slices on their way into a recomputed unit: the unit keeps what arrives of them, not what it is made of."""

    def __init__(self, sliced: Sliced, unit: Replay) -> None:
        self._sliced = sliced._replace(entered=unit)
        self._unit = unit

    def take(self) -> Sliced:
        """The slices; when the unit runs again, nothing but where to ask for what arrived."""
        sliced, self._sliced = self._sliced, Sliced((), entered=self._unit)
        return sliced


def join(sliced: Sliced, context: Context) -> Tensor:
    """[B, S(/mp), H]: wait for every slice and put them together."""
    return torch.cat([sliced.take(number, context) for number in range(len(context.own_slices))], dim=1)


def run_sliced(block: DecoderBlock, x: Tensor | Sliced, context: Context) -> tuple[Tensor | Sliced, MoeStats | None]:
    """``block.forward`` slice by slice; x and the result are whole or, between layers that let slices pass, not."""
    with wide_sums(block.parameters()):
        return _run(block, x, context)


def _run(block: DecoderBlock, x: Tensor | Sliced, context: Context) -> tuple[Tensor | Sliced, MoeStats | None]:
    attention = CausalSlices(block.attention, context)
    if isinstance(x, Tensor):
        if not context.cut:
            attention.prepare(block.attention_norm(x))
        x = Sliced(_cut(x, context.own_slices))
    passage, residuals = None, []
    for number, own in enumerate(context.own_slices):
        x_BsH = x.take(number, context)
        normed = None if attention.prepared else block.attention_norm(x_BsH)
        x_BsH = x_BsH + block.drop(attention.attend(number, normed), context, "attention", number)
        normed = block.mlp_norm(x_BsH)
        if block.moe is None:
            assert block.mlp is not None
            x_BsH = x_BsH + block.drop(block.mlp(normed, context.closing), context, "mlp", number)
        else:
            if passage is None:
                length = context.own_slices[-1].stop
                passage = block.moe.passage(
                    length, context.valid_tokens, context.own_valid, x_BsH.shape[0], context.replay, context.closing
                )
            passage.send(normed, None if context.own_valid is None else context.own_valid[:, own])
        residuals.append(x_BsH)
    out = Sliced(tuple(residuals))
    stats = None
    if passage is not None:
        arriving, tokens, shared = passage.work()
        stats = passage.stats()
        beside = tuple(y for y in shared if y is not None)
        out = Sliced(tuple(residuals), tuple(tokens), beside, arriving, block.drop)
    return (out if block.slicing.cross_layer else join(out, context)), stats


class CausalSlices:
    """Attention of one layer over one micro-batch, slice after slice.

    prepare: heads of all slices by one product, where the whole input is there; else each slice makes its own. Where
    ranks share slices, their keys come to each other (``core.context_parallel.slices``), or whole slices of some heads.
    """

    def __init__(self, attention: Attention, context: Context) -> None:
        self._attention, self._context = attention, context
        self._heads: list[tuple[Tensor, ...]] = []
        self._keys, self._values = Growing(), Growing()
        self._shared: SharedSlices | None = None
        if context.slice_plans is not None:
            cp = attention.cp
            self._shared = SharedSlices(cp.axis, cp.slice_transport, context.slice_plans, flash=attention.sizes.flash)

    @property
    def prepared(self) -> bool:
        """Whether ``prepare`` was called."""
        return bool(self._heads)

    def prepare(self, x_BSH: Tensor) -> None:
        """Queries, keys and values of every slice."""
        q, k, v = self._attention.heads(x_BSH, self._context.angles)
        self._heads = list(zip(*(_cut(x, self._context.slices) for x in (q, k, v)), strict=True))
        if not self._attention.cp.active:
            self._keys, self._values = Growing(k.data), Growing(v.data)

    def attend(self, number: int, x_BsH: Tensor | None) -> Tensor:
        """[B, s, H]: attention and projection of slice ``number``; x_BsH: its input, unless prepared."""
        attention, context = self._attention, self._context
        if self._heads:
            q, k, v = self._heads[number]
        else:
            assert x_BsH is not None
            angles, place = context.angles, context.slices[number]
            here = None if angles is None else (angles[0][:, place], angles[1][:, place])
            q, k, v = attention.heads(x_BsH, here)
        if self._shared is not None:  # what came from other ranks is kept; to compute again would be to send again
            out: Tensor = attention.proj(self._attend_shared(self._shared, q, k, v, number))
            return out
        if attention.cp.deals_heads:
            q, k, v = to_heads(q, k, v, attention.cp.axis, attention.cp.traffic)
        place, total = context.whole_slices[number], context.whole_slices[-1].stop
        heads = (q, self._keys.add(k, place, total), self._values.add(v, place, total), number)
        y = again(self._attend, *heads) if attention.selective else self._attend(*heads)
        if attention.cp.deals_heads:
            y = to_positions(y, attention.cp.axis, attention.cp.traffic)
        out = attention.proj(y.flatten(2))
        return out

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, number: int) -> Tensor:
        """q [B, s, N, D], k and v [B, end of the slice, G, D] to [B, s, N, D]."""
        context, documents = self._context, self._context.documents
        flash, heads = self._attention.sizes.flash, tuple(x.transpose(1, 2) for x in (q, k, v))
        with self._drawing(q, number) as dropout:
            if documents is not None:
                packed = op("packed_attention_slice", q) if flash else packed_attention_slice_reference
                y = packed(*heads, pieces=documents.cut(context.whole_slices[number], q.shape[0]), dropout=dropout)
            else:
                form = op("attention_slice", q) if flash else attention_slice_reference
                y = form(*heads, dropout=dropout)
        return y.transpose(1, 2)

    def _attend_shared(self, shared: SharedSlices, q: Tensor, k: Tensor, v: Tensor, number: int) -> Tensor:
        """q [B, s, N, D], k and v [B, s, G, D] to [B, s, N D]."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with self._drawing(q, number) as dropout:
            return shared.attend(q, k, v, number, dropout).transpose(1, 2).flatten(2)

    @contextmanager
    def _drawing(self, q: Tensor, number: int) -> Iterator[float]:
        """Dropout's probability, and inside it the slice's own random numbers."""
        attention, context = self._attention, self._context
        dropout = attention.dropout if attention.training else 0.0
        place = context.place(attention.place, number)
        with context.streams.drawing(q.device, place, attention.stream) if dropout else nullcontext():
            yield dropout


class Growing:
    """Keys, or values, to which slices are added: each slice sees its own and all before it, in one buffer.

    whole: all of them, where they are there from the start. The gradient of a slice comes from all that saw it; it is
    summed in max(fp32, dtype) and rounded once.
    """

    def __init__(self, whole: Tensor | None = None) -> None:
        self._buffer, self._filled = whole, whole is not None
        self._token: Tensor | None = None
        self._sum = _SeenSum()

    def add(self, piece: Tensor, place: slice, total: int) -> Tensor:
        """[B, s, G, D] of the next slice to [B, end of the slice, G, D]; total: positions of all slices."""
        if self._buffer is None:
            self._buffer = piece.new_empty((piece.shape[0], total, *piece.shape[2:]))
        if not self._filled:
            self._buffer.data[:, place] = piece.detach()
        seen: Tensor
        seen, self._token = _See.apply(self._token, piece, self._buffer, place, self._sum)
        return seen


class _SeenSum:
    """The gradients of what slices saw, which come back last slice first."""

    def __init__(self) -> None:
        self._total: Tensor | None = None

    def take(self, grad: Tensor, place: slice) -> Tensor:
        """Add what slice ``place`` saw; its own part is complete then."""
        if self._total is None:
            self._total = grad.to(wide(grad.dtype), copy=True)
        else:
            self._total[:, : place.stop] += grad
        own = self._total[:, place].to(grad.dtype)
        if place.start == 0:
            self._total = None
        return own


class _See(torch.autograd.Function):
    """The buffer up to the end of a piece. The token passed from slice to slice brings gradients back in order."""

    @staticmethod
    def forward(
        ctx: Any, token: Tensor | None, piece: Tensor, buffer: Tensor, place: slice, total: _SeenSum
    ) -> tuple[Tensor, Tensor]:
        ctx.place, ctx.total, ctx.first = place, total, token is None
        # ``data`` has a version counter of its own: what earlier slices have saved of the buffer is not touched.
        return buffer.data[:, : place.stop], piece.new_zeros(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, token = grads
        return None if ctx.first else token, ctx.total.take(grad, ctx.place), None, None, None


def _cut(x: Tensor, slices: Sequence[slice]) -> tuple[Tensor, ...]:
    """Dim 1 of ``x`` in slices, whose gradients are put together by one copy."""
    return torch.split(x, [place.stop - place.start for place in slices], dim=1)
