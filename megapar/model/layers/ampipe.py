"""AMPipe: a layer's work from attention to experts, slice by slice of the sequence, so that the all-to-alls hide.

Every slice runs attention, projection, dropout, residual, norm, router, dispatch, experts and combine by itself; only
keys and values are shared: slice c sees those of slices 0..c. Program order of a layer, two slices (``^`` launch,
``v`` wait):

    attn0 D0^  attn1 D1^  |  D0v exp0 C0^  D1v exp1 C1^  |  C0v C1v

With ``cross_layer`` the last column moves into the next layer, slice by slice, and only the last layer's slices are put
together: ``C0v attn0 D0^  C1v attn1 D1^``. What flies between two layers is passed as tokens (``async_pairs``), which
stand bare in the output, because hooks of sharding must see what autograd sees. A recomputed unit waits for what enters
it once, in its forward, and keeps what arrived (``IncomingSlices``).
Under ``overlap_mp`` what attention needs of the other ranks of mp flies as well (g all-gather before the heads, r
reduce-scatter behind the projection, q the product that makes queries, keys and values):

    q0 g1^ attn0 proj0 r0^  g1v q1 r0v D0^ attn1 proj1 r1  D1^  |  ..            whole activations come in
    q0 attn0  C1v g1^ proj0 r0^  g1v q1 r0v D0^ attn1 proj1 r1  D1^  |  ..       slices that still fly
Source: AMPipe (openreview.net/forum?id=yLgr02IsXY); the backward is the mirror by itself.

Shape letters: B samples, s positions of a slice on this rank, S sequence, H hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megapar.core.recompute.replay import Replay
from megapar.core.tensor_parallel.fp32_grad_sum import fp32_grad_sums
from megapar.model.layers.attention_slices import CausalSlices, split_slices
from megapar.model.layers.context import Context
from megapar.moe.passage import Passage, PendingCombines
from megapar.moe.stats import MoeStats

if TYPE_CHECKING:
    from megapar.model.layers.block import DecoderBlock, HiddenDropout


class Sliced(NamedTuple):
    """Activations between two layers, slice by slice: residual + dropout(what arrives + shared).

    residuals: [B, s, H] per slice. tokens: per slice those of its combines in flight. shared: [B, s, H] per slice, or
    nothing. arriving: the combines, and drop: the dropout of the layer that sent them; None where nothing is in flight.
    entered: the recomputed unit whose input this is.
    """

    residuals: tuple[Tensor, ...]
    tokens: tuple[tuple[Tensor, ...], ...] = ()
    shared: tuple[Tensor, ...] = ()
    arriving: PendingCombines | None = None
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


class IncomingSlices:
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
    with fp32_grad_sums(block.parameters()):
        return _run(block, x, context)


def _run(block: DecoderBlock, x: Tensor | Sliced, context: Context) -> tuple[Tensor | Sliced, MoeStats | None]:
    layer = _Layer(block, x, context)
    attention, last = layer.attention, len(context.own_slices) - 1
    if not attention.hides:
        for number in range(last + 1):
            layer.enter(number)
            attention.project(number)
            attention.attend(number)
            attention.leave(number)
            layer.finish(number)
        return layer.result()
    # What other layers still send is waited for as late as can be, what is here travels at once.
    here = isinstance(x, Tensor)
    layer.enter(0)
    for number in range(last + 1):
        attention.project(number)
        if number:
            layer.finish(number - 1)
        if here and number < last:
            layer.enter(number + 1)
        attention.attend(number)
        if not here and number < last:
            layer.enter(number + 1)
        attention.leave(number)
    layer.finish(last)
    return layer.result()


class _Layer:
    """One layer and one micro-batch: the parts of a slice's way around attention, each slice's in order."""

    def __init__(self, block: DecoderBlock, x: Tensor | Sliced, context: Context) -> None:
        self.block, self.context = block, context
        self.attention = CausalSlices(block.attention, context, hides=block.slicing.overlap_mp)
        if isinstance(x, Tensor):
            if not context.cut:
                self.attention.prepare(block.attention_norm(x))
            x = Sliced(split_slices(x, context.own_slices))
        self._x = x
        self._residuals: list[Tensor] = []
        self._passage: Passage | None = None

    def enter(self, number: int) -> None:
        """The slice arrives and goes into attention."""
        x_BsH = self._x.take(number, self.context)
        self._residuals.append(x_BsH)
        self.attention.enter(None if self.attention.prepared else self.block.attention_norm(x_BsH))

    def finish(self, number: int) -> None:
        """The slice leaves attention and goes through the MLP, or on its way to the experts."""
        block, context = self.block, self.context
        x_BsH = self._residuals[number] + block.drop(self.attention.finish(number), context, "attention", number)
        normed = block.mlp_norm(x_BsH)
        if block.moe is None:
            assert block.mlp is not None
            x_BsH = x_BsH + block.drop(block.mlp(normed, context.closing), context, "mlp", number)
        else:
            valid, own = context.own_valid, context.own_slices
            if self._passage is None:
                self._passage = block.moe.passage(
                    own[-1].stop, context.valid_tokens, valid, x_BsH.shape[0], context.replay, context.closing
                )
            self._passage.send(normed, None if valid is None else valid[:, own[number]])
        self._residuals[number] = x_BsH

    def result(self) -> tuple[Tensor | Sliced, MoeStats | None]:
        """What the block returns."""
        out, stats = Sliced(tuple(self._residuals)), None
        if self._passage is not None:
            arriving, tokens, shared = self._passage.work()
            stats = self._passage.stats()
            added = tuple(y for y in shared if y is not None)
            out = Sliced(tuple(self._residuals), tuple(tokens), added, arriving, self.block.drop)
        return (out if self.block.slicing.cross_layer else join(out, self.context)), stats
