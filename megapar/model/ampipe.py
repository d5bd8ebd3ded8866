"""AMPipe: a layer's work from attention to experts, slice by slice of the sequence, so that the all-to-alls hide.

Every slice runs attention, projection, dropout, residual, norm, router, dispatch, experts and combine by itself; only
keys and values are shared: slice c sees those of slices 0..c. Program order of a layer, two slices (``^`` launch,
``v`` wait):

    attn0 D0^  attn1 D1^  |  D0v exp0 C0^  D1v exp1 C1^  |  C0v C1v

With ``cross_layer`` the last column moves into the next layer, slice by slice, and only the last layer's slices are put
together: ``C0v attn0 D0^  C1v attn1 D1^``. What flies between two layers is passed as tokens (``core.tickets``), which
stand bare in the output, because hooks of sharding must see what autograd sees.
Source: AMPipe (openreview.net/forum?id=yLgr02IsXY); the backward is the mirror by itself.

Shape letters: B samples, s positions of a slice on this rank, S sequence, H hidden, N query heads, G key-value heads,
D head size.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from megapar.core.device.ops import attention_slice_reference, op
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
    """

    residuals: tuple[Tensor, ...]
    tokens: tuple[tuple[Tensor, ...], ...] = ()
    shared: tuple[Tensor, ...] = ()
    arriving: Arriving | None = None
    drop: HiddenDropout | None = None

    def take(self, number: int, context: Context) -> Tensor:
        """[B, s, H]: wait for one slice."""
        x = self.residuals[number]
        if self.arriving is None or self.drop is None:
            return x
        y = self.arriving.finish(number, self.tokens[number]).view_as(x)
        if self.shared:
            y = y + self.shared[number]
        out: Tensor = x + self.drop(y, context, "mlp", number)
        return out


def join(sliced: Sliced, context: Context) -> Tensor:
    """[B, S(/mp), H]: wait for every slice and put them together."""
    return torch.cat([sliced.take(number, context) for number in range(len(sliced.residuals))], dim=1)


def run_sliced(block: DecoderBlock, x: Tensor | Sliced, context: Context) -> tuple[Tensor | Sliced, MoeStats | None]:
    """``block.forward`` slice by slice; x and the result are whole or, between layers that let slices pass, not."""
    with wide_sums(block.parameters()):
        return _run(block, x, context)


def _run(block: DecoderBlock, x: Tensor | Sliced, context: Context) -> tuple[Tensor | Sliced, MoeStats | None]:
    attention = CausalSlices(block.attention, context)
    if isinstance(x, Tensor) and not context.cut:
        attention.prepare(block.attention_norm(x))
    passage, residuals = None, []
    for number, own in enumerate(context.own_slices):
        x_BsH = x[:, own] if isinstance(x, Tensor) else x.take(number, context)
        normed = None if attention.prepared else block.attention_norm(x_BsH)
        x_BsH = x_BsH + block.drop(attention.attend(number, normed), context, "attention", number)
        normed = block.mlp_norm(x_BsH)
        if block.moe is None:
            assert block.mlp is not None
            x_BsH = x_BsH + block.drop(block.mlp(normed), context, "mlp", number)
        else:
            if passage is None:
                length = context.own_slices[-1].stop
                passage = block.moe.passage(length, context.valid_tokens, context.own_valid, x_BsH.shape[0])
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
    """Attention of one layer over one micro-batch, slice after slice; keys and values lie in one buffer.

    prepare: heads of all slices by one product, where the whole input is there; else each slice makes its own.
    """

    def __init__(self, attention: Attention, context: Context) -> None:
        self._attention, self._context = attention, context
        self._heads: tuple[Tensor, Tensor, Tensor] | None = None
        self._buffers: list[Tensor] = []
        self._seen: list[Tensor | None] = [None, None]

    @property
    def prepared(self) -> bool:
        """Whether ``prepare`` was called."""
        return self._heads is not None

    def prepare(self, x_BSH: Tensor) -> None:
        """Queries, keys and values of every slice."""
        self._heads = self._attention.heads(x_BSH, self._context.angles)

    def attend(self, number: int, x_BsH: Tensor | None) -> Tensor:
        """[B, s, H]: attention and projection of slice ``number``; x_BsH: its input, unless prepared."""
        attention, place = self._attention, self._context.slices[number]
        if self._heads is not None:
            q, k, v = self._heads
            q, k, v = q[:, place], k[:, : place.stop], v[:, : place.stop]
        else:
            assert x_BsH is not None
            angles = self._context.angles
            here = None if angles is None else (angles[0][:, place], angles[1][:, place])
            q, *pieces = attention.heads(x_BsH, here)
            k, v = self._append(pieces, place)
        form = op("attention_slice", q) if attention.sizes.flash else attention_slice_reference
        dropout = attention.dropout if attention.training else 0.0
        streams, name = self._context.streams, self._context.place(attention.place, number)
        with streams.drawing(q.device, name, attention.mp.rank) if dropout else nullcontext():
            y = form(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), dropout=dropout)
        out: Tensor = attention.proj(y.transpose(1, 2).flatten(2))
        return out

    def _append(self, pieces: list[Tensor], place: slice) -> tuple[Tensor, Tensor]:
        """Keys and values of this slice and all before it, [B, end of the slice, G, D]."""
        total = self._context.slices[-1].stop
        if not self._buffers:
            self._buffers = [piece.new_empty((piece.shape[0], total, *piece.shape[2:])) for piece in pieces]
        seen = [
            _Append.apply(before, piece, buffer, place.start)
            for before, piece, buffer in zip(self._seen, pieces, self._buffers, strict=True)
        ]
        self._seen = list(seen)
        return seen[0], seen[1]


class _Append(torch.autograd.Function):
    """The buffer up to the end of a new piece, behind what it held: rows are copied once, whatever is kept of them."""

    @staticmethod
    def forward(ctx: Any, before: Tensor | None, piece: Tensor, buffer: Tensor, start: int) -> Tensor:
        ctx.start, ctx.first = start, before is None
        stop = start + piece.shape[1]
        # ``data`` has a version counter of its own: what earlier slices have saved of the buffer is not touched.
        buffer.data[:, start:stop] = piece
        return buffer[:, :stop].data

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        grad = grads[0]
        return None if ctx.first else grad[:, : ctx.start], grad[:, ctx.start :], None, None
