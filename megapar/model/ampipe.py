"""AMPipe: pipelines a layer over slices of the sequence to hide the all-to-alls of its experts.

Each slice runs attention, projection, dropout, residual, norm, router, dispatch, experts and combine on its own. Only
keys and values are shared: slice c sees those of slices 0..c. Program order of a layer with two slices (``^`` launch,
``v`` wait; D dispatch, C combine; the numbers are at the lines that do the steps):

    attn0 D0^  attn1 D1^  |  D0v exp0 C0^  D1v exp1 C1^  |  C0v C1v
    [1]   [2]                [3]                            [4]

With ``cross_layer`` the last column moves into the next layer, slice by slice, and only the last layer concatenates its
slices: ``C0v attn0 D0^  C1v attn1 D1^``. Combines in flight between two layers are passed as handles (``async_pairs``).
The handles are plain tensors of the output, because sharding's hooks must see every tensor that autograd sees. A
recomputed unit waits for its incoming slices once, in its forward, and keeps the results (``IncomingSlices``).
With ``overlap_mp`` the collectives of attention over mp are in flight, too (g all-gather before the heads, r
reduce-scatter after the projection, q the product that makes queries, keys and values):

    q0 g1^ attn0 proj0 r0^  g1v q1 r0v D0^ attn1 proj1 r1  D1^  |  ..            the input is a whole tensor
    q0 attn0  C1v g1^ proj0 r0^  g1v q1 r0v D0^ attn1 proj1 r1  D1^  |  ..       the input's slices are in flight
Source: AMPipe (openreview.net/forum?id=yLgr02IsXY). Autograd runs the backward in the mirrored order.

Shape letters: B samples, s positions of a slice on this rank, S sequence, H hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from megapar.core.recompute.replay import Replay
from megapar.core.tensor_parallel.fp32_grad_sum import fp32_grad_sums
from megapar.model.attention.slices import CausalSlices, split_slices
from megapar.model.layers.context import Context
from megapar.moe.forward import MoeForward, PendingCombines
from megapar.moe.stats import MoeStats

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megapar.model.attention.self_attention import SelfAttention
    from megapar.model.layers.mlp import Mlp
    from megapar.model.layers.norm import Norm
    from megapar.model.layers.residual import HiddenDropout
    from megapar.moe.layer import MoeLayer


class SliceableBlock(Protocol):
    """A pre-norm layer that can run in slices, such as ``DecoderBlock``."""

    attention_norm: Norm
    attention: SelfAttention
    drop: HiddenDropout
    mlp_norm: Norm
    mlp: Mlp | None
    moe: MoeLayer | None

    def parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over the parameters of the layer."""


class Sliced(NamedTuple):
    """Activations between two layers, slice by slice: residual + dropout(combined + shared).

    Attributes:
        residuals: [B, s, H] per slice.
        handles: Handles of the combines in flight, per slice.
        shared: Output of the shared experts, [B, s, H] per slice; empty without shared experts.
        arriving: The combines; None if nothing is in flight.
        drop: Dropout of the layer that launched the combines; None if nothing is in flight.
        entered: The recomputed unit that takes this as its input.
    """

    residuals: tuple[Tensor, ...]
    handles: tuple[tuple[Tensor, ...], ...] = ()
    shared: tuple[Tensor, ...] = ()
    arriving: PendingCombines | None = None
    drop: HiddenDropout | None = None
    entered: Replay | None = None

    def take(self, number: int, context: Context) -> Tensor:
        """Wait for one slice and return it, [B, s, H]."""
        if self.entered is None:
            return self._finish(number, context)
        return self.entered.arrival(lambda: self._finish(number, context))

    def _finish(self, number: int, context: Context) -> Tensor:
        x = self.residuals[number]
        if self.arriving is None or self.drop is None:
            return x
        y = self.arriving.finish(number, self.handles[number]).view_as(x)  # [4]
        if self.shared:
            y = y + self.shared[number]
        return x + self.drop(y, context, "mlp", number)


class IncomingSlices:
    """Slices that enter a recomputed unit while in flight. The unit keeps the combined slices, not their inputs."""

    def __init__(self, sliced: Sliced, unit: Replay) -> None:
        self._sliced = sliced._replace(entered=unit)
        self._unit = unit

    def take(self) -> Sliced:
        """Return the slices; in the recomputation, only the unit, which has kept them."""
        sliced, self._sliced = self._sliced, Sliced((), entered=self._unit)
        return sliced


def join(sliced: Sliced, context: Context) -> Tensor:
    """Wait for all slices and concatenate them to [B, S(/mp), H]."""
    return torch.cat([sliced.take(number, context) for number in range(len(context.own_slices))], dim=1)


def run_sliced(block: SliceableBlock, x: Tensor | Sliced, context: Context) -> tuple[Tensor | Sliced, MoeStats | None]:
    """Run ``block.forward`` slice by slice. x and the result are tensors, or ``Sliced`` between such layers."""
    with fp32_grad_sums(block.parameters()):
        return _run(block, x, context)


def _run(block: SliceableBlock, x: Tensor | Sliced, context: Context) -> tuple[Tensor | Sliced, MoeStats | None]:
    layer = _Layer(block, x, context)
    attention, last = layer.attention, len(context.own_slices) - 1
    if not attention.hides:
        for number in range(last + 1):
            layer.enter(number)
            attention.project(number)  # [1]
            attention.attend(number)
            attention.leave(number)
            layer.finish(number)  # [2]
        return layer.result()
    # Launch the all-gathers of a complete input early. Wait for slices in flight as late as possible.
    complete = isinstance(x, Tensor)
    layer.enter(0)
    for number in range(last + 1):
        attention.project(number)
        if number:
            layer.finish(number - 1)
        if complete and number < last:
            layer.enter(number + 1)
        attention.attend(number)
        if not complete and number < last:
            layer.enter(number + 1)
        attention.leave(number)
    layer.finish(last)
    return layer.result()


class _Layer:
    """One layer and one micro-batch: the steps of a slice before and after attention, called in slice order."""

    def __init__(self, block: SliceableBlock, x: Tensor | Sliced, context: Context) -> None:
        self.block, self.context = block, context
        self.attention = CausalSlices(block.attention, context, hides=context.slicing.overlap_mp)
        if isinstance(x, Tensor):
            if not context.cut:
                self.attention.prepare(block.attention_norm(x))
            x = Sliced(split_slices(x, context.own_slices))
        self._x = x
        self._residuals: list[Tensor] = []
        self._moe_forward: MoeForward | None = None

    def enter(self, number: int) -> None:
        """Wait for the slice and start its attention."""
        x_BsH = self._x.take(number, self.context)
        self._residuals.append(x_BsH)
        self.attention.enter(None if self.attention.prepared else self.block.attention_norm(x_BsH))

    def finish(self, number: int) -> None:
        """Finish the slice's attention, then run the MLP or launch the dispatch to the experts."""
        block, context = self.block, self.context
        x_BsH = self._residuals[number] + block.drop(self.attention.finish(number), context, "attention", number)
        normed = block.mlp_norm(x_BsH)
        if block.moe is None:
            assert block.mlp is not None
            x_BsH = x_BsH + block.drop(block.mlp(normed, context.ends_unit), context, "mlp", number)
        else:
            valid, slices = context.own_valid, context.own_slices
            if self._moe_forward is None:
                self._moe_forward = block.moe.begin(
                    context.slicing,
                    slices[-1].stop,
                    context.valid_tokens,
                    valid,
                    x_BsH.shape[0],
                    context.replay,
                    context.ends_unit,
                )
            self._moe_forward.dispatch(normed, None if valid is None else valid[:, slices[number]])  # [2]
        self._residuals[number] = x_BsH

    def result(self) -> tuple[Tensor | Sliced, MoeStats | None]:
        """Return the output of the block and its routing statistics."""
        out, stats = Sliced(tuple(self._residuals)), None
        if self._moe_forward is not None:
            arriving, handles, shared = self._moe_forward.compute_experts()  # [3]
            stats = self._moe_forward.stats()
            added = tuple(y for y in shared if y is not None)
            out = Sliced(tuple(self._residuals), tuple(handles), added, arriving, self.block.drop)
        return (out if self.context.slicing.cross_layer else join(out, self.context)), stats
