"""Products of layers sharded over mp, with their collectives in flight under them: one autograd Function per layer.

Program order: ``^`` launch, ``v`` wait, ``own`` this rank's rows, ``1`` and ``2`` pieces of the rows of all ranks,
``g`` all-gather, ``r`` reduce-scatter, ``a`` all-reduce.

    sequence parallel
        column  forward    g1^ g2^  own rows  g1v rows of 1  g2v rows of 2
                backward   g^ (of x, again)  dgrad  r^  gv wgrad  rv
        row     forward    rows of 1  r1^  rows of 2  r2^  r1v r2v
                backward   g1^ g2^  own dgrad  own wgrad  g1v dgrad 1  g2v dgrad 2  wgrad of the other ranks
    otherwise
        column  forward    product
                backward   dgrad 1  a1^  dgrad 2  a2^  wgrad  a1v a2v
        row     forward    rows of 1  a1^  rows of 2  a2^  a1v a2v
                backward   dgrad  wgrad

With ``blocking`` (no overlap) and with ``fused`` (torch overlaps inside its operator), forward, dgrad and wgrad are one
product each: ``LinearComm.gather_product`` and ``.product_scatter`` compute a product and its collective. A piece of
the other ranks' rows is two products, of the ranks before this one and of those after it.

Everything launched inside a call is waited for inside it, so nothing is in flight when hooks, casts or a recomputation
run. Only this rank's rows of a gathered input are kept for the backward, which gathers the others again under dgrad.

Shape letters: B batch, M ranks of mp, S sequence, s = S/M own positions, p positions of a piece, I in features and
O out features on this rank, H features outside the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar.core.comm.axis import Axis
from megapar.core.comm.exchange import AllGather, Exchange, Reduce, ReduceScatter
from megapar.core.comm.in_flight import CommContext, InFlight
from megapar.core.device.dtypes import WeightProduct
from megapar.core.recompute.replay import Replay
from megapar.core.tensor_parallel.collective_product import fused_gather_product, fused_product_scatter
from megapar.core.tensor_parallel.fp8 import Factor, Fp8Weight, backward_factor, forward_factor, product

Grads = tuple[Tensor | None, Tensor | None, Tensor | None, None]


@dataclass(frozen=True)
class Overlap:
    """Cut of a collective into pieces, so that one piece is sent while another is computed. Depends on the device.

    Attributes:
        piece_bytes: Minimum bytes of a piece to each rank, below which latency costs more than is hidden.
        least_rows: Minimum rows of a product, all its batches together.
        batched: Products of several batches are one kernel.
        blocking: Hide nothing: whole products and collectives, waited for at once.
        fused: Cut nothing: torch's operators hide the collective inside the product (``collective_product``).
    """

    pieces: int = 4
    piece_bytes: int = 1 << 20
    least_rows: int = 1
    batched: bool = False
    blocking: bool = False
    fused: bool = False

    @property
    def whole(self) -> bool:
        """True if products are not cut."""
        return self.blocking or self.fused

    def cut(self, rows: int, row_bytes: int, products: int = 1) -> list[slice]:
        """Return slices of ``rows`` rows, equal on all ranks. ``products``: Rows multiplied for each row sent."""
        worth = min(rows * row_bytes // max(1, self.piece_bytes), rows * products // self.least_rows)
        count = max(1, min(self.pieces, rows, worth))
        length = max(1, -(-rows // count))
        return [slice(start, min(start + length, rows)) for start in range(0, rows, length)] or [slice(0, 0)]

    def multiply(self, x: Tensor, right: Factor, bias: Tensor | None, out: Tensor) -> None:
        """Compute out [.., p, O] = x [.., p, I] @ right [I, O] (+ bias [O]) by few and large products.

        Leading dims that are contiguous to each other in both tensors become rows. If products are batched, the longest
        of the remaining dims becomes the batch. Each index of the others is a separate product. In fp8 all dims become
        rows, and the product is copied to ``out``.
        """
        if not isinstance(right, Tensor):
            out.copy_(product(x, right, bias))
            return
        x, out = _joined(x, out)
        if x.dim() == 2:
            _product(x, right, bias, out)
            return
        if x.dim() == 3 and self.batched:
            right_kIO = right.expand(x.shape[0], -1, -1)
            if bias is None:
                torch.bmm(x, right_kIO, out=out)
            else:
                torch.baddbmm(bias.expand_as(out), x, right_kIO, out=out)
            return
        along = min(range(x.dim() - 2), key=lambda dim: int(x.shape[dim])) if self.batched else 0
        for x_one, out_one in zip(x.unbind(along), out.unbind(along), strict=True):
            self.multiply(x_one, right, bias, out_one)


class LinearComm(NamedTuple):
    """Communication of a linear layer.

    Attributes:
        defer_wgrad: Called with the product of a weight gradient; returns it, or None if it is deferred or added to a
            bucket. None: compute it at once.
        ends_unit: The recomputed unit whose output is the output of this layer.
        fp8: Casts of the weight; None for products in its dtype.
    """

    mp: Axis
    overlap: Overlap
    comm: CommContext
    defer_wgrad: Callable[[Callable[[], Tensor]], Tensor | None] | None = None
    ends_unit: Replay | None = None
    fp8: Fp8Weight | None = None

    @property
    def output_unused(self) -> bool:
        """True if the output is not needed: the unit that ends with it is recomputed, for its saved tensors only."""
        return self.ends_unit is not None and self.ends_unit.recomputing

    def weight_gradient(self, product: Callable[[], Tensor]) -> Tensor | None:
        """Return the product, or None if it is deferred or added to a bucket."""
        return product() if self.defer_wgrad is None else self.defer_wgrad(product)

    def gather_product(
        self, x: Tensor, right: Factor | None, bias: Tensor | None, keep: bool = False
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return (gathered x [B, S, I], or None unless ``keep``, its product with right [I, O] (+ bias), or None)."""
        if self.overlap.fused and isinstance(right, Tensor):
            return fused_gather_product(x, right, bias, self.mp, keep=keep)
        ((_, x_MBsI),) = _landings(_gather(x, self, Overlap(pieces=1)), self)
        whole = x_MBsI.transpose(0, 1).flatten(1, 2)  # A view if there is one sample.
        y = None if right is None else product(whole, right, bias)
        return whole if keep else None, y

    def product_scatter(self, x: Tensor, right: Factor) -> Tensor:
        """Multiply x [B, S, I] by right [I, O], sum over the ranks, and return this rank's rows [B, s, O]."""
        if self.overlap.fused and isinstance(right, Tensor):
            return fused_product_scatter(x, right, self.mp)
        y = product(x, right)
        by_rank = y.unflatten(1, (self.mp.size, -1)).transpose(0, 1).flatten(0, 1)
        return self.comm.wait(self.launch(ReduceScatter(self.mp), by_rank))

    def launch(self, exchange: Exchange, x: Tensor) -> InFlight:
        """Launch a collective; if ``blocking``, wait for it too."""
        flight = self.comm.launch(exchange, x)
        if self.overlap.blocking and flight.work is not None:
            self.comm.meter.wait(flight.work, flight.kind)
        return flight


class GatheredColumn(torch.autograd.Function):
    """Column parallel: x [B, s, I] -> all-gather -> @ w [O, I]^T + b [O] -> y [B, S, O].

    dgrad: dy @ w [B, S, I] -> reduce-scatter -> dx [B, s, I]. wgrad: dy^T [O, B S] @ gathered x [B S, I] -> dw [O, I].
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: LinearComm) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x, weight)
        if layer.overlap.whole:
            y = layer.gather_product(x, forward_factor(weight, layer.fp8), bias)[1]
            assert y is not None
            return y
        flights = _gather(x, layer, layer.overlap)
        y = x.new_empty((x.shape[0], layer.mp.size * x.shape[1], weight.shape[0]))
        y_MBsO, right = y.unflatten(1, (layer.mp.size, -1)).transpose(0, 1), forward_factor(weight, layer.fp8)
        layer.overlap.multiply(x, right, bias, y_MBsO[layer.mp.rank])
        for rows, x_MBpI in _landings(flights, layer):
            for others in _others(layer.mp):
                layer.overlap.multiply(x_MBpI[others], right, bias, y_MBsO[others, :, rows])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        layer, (x, weight), dy = ctx.layer, ctx.saved_tensors, grads[0].contiguous()
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        dx, back = None, None
        if layer.overlap.whole:
            return *_whole_column_gradients(dy, x, weight, layer, needs_dx, needs_dw), _bias_gradient(dy, ctx), None
        gathered = _gather(x, layer, Overlap(pieces=1)) if needs_dw else []
        if needs_dx:
            back = layer.launch(ReduceScatter(layer.mp), _gathered_dgrad(dy, x, weight, layer).flatten(0, 1))
        dw = _gathered_wgrad(dy, gathered, layer)
        db = _bias_gradient(dy, ctx)
        if back is not None:
            dx = layer.comm.wait(back)
        return dx, dw, db, None


class ArrivedColumn(torch.autograd.Function):
    """``GatheredColumn`` after an all-gather that ``core.comm.async_pairs`` launched and waited for.

    gathered [M B, s, I] and x, its rows of this rank [B, s, I], which are kept instead -> y [B, S, O].
    dgrad: dy @ w [M B, s, I], for the reduce-scatter of that pair. wgrad: gathers x again, as ``GatheredColumn`` does.
    """

    @staticmethod
    def forward(
        ctx: Any, gathered: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, layer: LinearComm
    ) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x, weight)
        size = layer.mp.size
        y, right = x.new_empty((x.shape[0], size * x.shape[1], weight.shape[0])), forward_factor(weight, layer.fp8)
        y_MBsO = y.unflatten(1, (size, -1)).transpose(0, 1)
        layer.overlap.multiply(gathered.unflatten(0, (size, -1)), right, bias, y_MBsO)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return dx [M B, s, I], None for x, dw [O, I], db [O]."""
        layer, (x, weight), dy = ctx.layer, ctx.saved_tensors, grads[0].contiguous()
        needs_dx, _, needs_dw = ctx.needs_input_grad[:3]
        flights = _gather(x, layer, Overlap(pieces=1)) if needs_dw else []
        dx = _gathered_dgrad(dy, x, weight, layer).flatten(0, 1) if needs_dx else None
        return dx, None, _gathered_wgrad(dy, flights, layer), _bias_gradient(dy, ctx), None


class ScatteredRow(torch.autograd.Function):
    """Row parallel: x [B, S, I] @ w [O, I]^T -> partial sums [B, S, O] -> reduce-scatter -> + b [O] -> y [B, s, O].

    dgrad: all-gather of dy [B, s, O] -> @ w -> dx [B, S, I]. wgrad: gathered dy^T [O, B S] @ x [B S, I] -> dw [O, I].
    db [O] is the sum over this rank's rows.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: LinearComm) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x, weight)
        size, batch = layer.mp.size, x.shape[0]
        x_MBsI = x.unflatten(1, (size, -1)).transpose(0, 1)
        if layer.output_unused:
            return x.new_zeros((batch, x_MBsI.shape[2], weight.shape[0]))
        right = forward_factor(weight, layer.fp8)
        if layer.overlap.whole:
            y = layer.product_scatter(x, right)
            return y if bias is None else y.add_(bias)
        y = x.new_empty((batch, x_MBsI.shape[2], weight.shape[0]))
        flights = []
        for rows in layer.overlap.cut(y.shape[1], batch * y.shape[2] * y.element_size(), size * batch):
            x_MBpI = x_MBsI[:, :, rows]
            y_MBpO = y.new_empty((*x_MBpI.shape[:3], y.shape[2]))
            layer.overlap.multiply(x_MBpI, right, None, y_MBpO)
            # Rows of a single sample are contiguous and can be written in place.
            into = y[:, rows] if batch == 1 else None
            flights.append((rows, layer.launch(ReduceScatter(layer.mp, into), y_MBpO.flatten(0, 1))))
        for rows, y_BpO in _landings(flights, layer):
            if batch > 1:
                y[:, rows] = y_BpO
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        layer, (x, weight), dy = ctx.layer, ctx.saved_tensors, grads[0].contiguous()
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        mp, dx, dw = layer.mp, None, None
        if layer.overlap.whole:
            return *_whole_row_gradients(dy, x, weight, layer, needs_dx, needs_dw), _bias_gradient(dy, ctx), None
        flights = _gather(dy, layer, layer.overlap) if needs_dx or needs_dw else []
        x_BMsI = x.unflatten(1, (mp.size, -1))
        if needs_dx:
            right = backward_factor(weight, layer.fp8)
            dx = x.new_empty(x.shape)
            dx_MBsI = dx.unflatten(1, (mp.size, -1)).transpose(0, 1)
            layer.overlap.multiply(dy, right, None, dx_MBsI[mp.rank])
        if needs_dw and layer.defer_wgrad is None:  # under the gathers
            dw = _local_product(dy, x_BMsI, mp)
        pieces = []
        for rows, dy_MBpO in _landings(flights, layer):
            pieces.append(dy_MBpO)
            if dx is not None:
                for others in _others(mp):
                    layer.overlap.multiply(dy_MBpO[others], right, None, dx_MBsI[others, :, rows])
        if needs_dw:
            dw = layer.weight_gradient(lambda local=dw: _whole_product(local, dy, pieces, x_BMsI, mp))
        return dx, dw, _bias_gradient(dy, ctx), None


class CopiedColumn(torch.autograd.Function):
    """Column parallel: x [.., I] @ w [O, I]^T + b [O] -> y [.., O].

    dgrad: dy @ w -> all-reduce -> dx [.., I]. wgrad: dy^T @ x -> dw [O, I].
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: LinearComm) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x, weight)
        return product(x, forward_factor(weight, layer.fp8), bias, None if layer.fp8 is None else layer.fp8.casts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        layer, (x, weight), dy = ctx.layer, ctx.saved_tensors, grads[0].flatten(0, -2)
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        dx, flights = None, list[InFlight]()
        if needs_dx:
            dx, flights = _multiply_and_sum(dy, backward_factor(weight, layer.fp8), weight.shape[1], layer)
        dw = layer.weight_gradient(WeightProduct(dy.t(), x.flatten(0, -2))) if needs_dw else None
        db = dy.sum(0) if ctx.needs_input_grad[-2] else None
        for flight in flights:
            layer.comm.wait(flight)
        return None if dx is None else dx.view(x.shape), dw, db, None


class ReducedRow(torch.autograd.Function):
    """Row parallel: x [.., I] @ w [O, I]^T -> partial sums [.., O] -> all-reduce -> + b [O] -> y [.., O].

    dgrad: dy @ w -> dx [.., I]. wgrad: dy^T @ x -> dw [O, I]. Neither has a collective: dy is the same on every rank.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: LinearComm) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x, weight)
        if layer.output_unused:
            return x.new_zeros((*x.shape[:-1], weight.shape[0]))
        right = forward_factor(weight, layer.fp8)
        y, flights = _multiply_and_sum(x.flatten(0, -2), right, weight.shape[0], layer)
        for flight in flights:
            layer.comm.wait(flight)
        if bias is not None:
            y.add_(bias)
        return y.view((*x.shape[:-1], weight.shape[0]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        layer, (x, weight), dy = ctx.layer, ctx.saved_tensors, grads[0]
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        dx = product(dy, backward_factor(weight, layer.fp8)) if needs_dx else None
        dw = layer.weight_gradient(WeightProduct(dy.flatten(0, -2).t(), x.flatten(0, -2))) if needs_dw else None
        return dx, dw, dy.flatten(0, -2).sum(0) if ctx.needs_input_grad[-2] else None, None


def _gathered_dgrad(dy: Tensor, x: Tensor, weight: Tensor, layer: LinearComm) -> Tensor:
    """Return dx [M, B, s, I] for the rows of all ranks; ``x`` has the shape of this rank's rows."""
    dx_MBsI = dy.new_empty((layer.mp.size, *x.shape))
    right = backward_factor(weight, layer.fp8)
    layer.overlap.multiply(dy.unflatten(1, (layer.mp.size, -1)).transpose(0, 1), right, None, dx_MBsI)
    return dx_MBsI


def _whole_column_gradients(
    dy: Tensor, x: Tensor, weight: Tensor, layer: LinearComm, needs_dx: bool, needs_dw: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return (dx [B, s, I], dw [O, I]) by one product each."""
    fused = layer.overlap.fused
    flights = _gather(x, layer, Overlap(pieces=1)) if needs_dw and fused else []  # under the product of dx
    dx = layer.product_scatter(dy, backward_factor(weight, layer.fp8)) if needs_dx else None
    if needs_dw and not fused:
        flights = _gather(x, layer, Overlap(pieces=1))
    return dx, _gathered_wgrad(dy, flights, layer)


def _whole_row_gradients(
    dy: Tensor, x: Tensor, weight: Tensor, layer: LinearComm, needs_dx: bool, needs_dw: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return (dx [B, S, I], dw [O, I]) by one product each, for dy [B, s, O]."""
    if not needs_dx and not needs_dw:
        return None, None
    right = backward_factor(weight, layer.fp8) if needs_dx else None
    dy_BSO, dx = layer.gather_product(dy, right, None, keep=needs_dw)
    if not needs_dw or dy_BSO is None:
        return dx, None
    return dx, layer.weight_gradient(WeightProduct(dy_BSO.flatten(0, 1).t(), x.flatten(0, 1)))


def _bias_gradient(dy: Tensor, ctx: Any) -> Tensor | None:
    """Return db [O] of the rows on this rank."""
    return dy.sum((0, 1)) if ctx.needs_input_grad[-2] else None


def _gathered_wgrad(dy: Tensor, gathered: list[tuple[slice, InFlight]], layer: LinearComm) -> Tensor | None:
    """Return dw [O, I] from x of all ranks, gathered in one flight; None if it was not gathered."""
    if not gathered:
        return None
    ((_, x_MBsI),) = _landings(gathered, layer)
    return layer.weight_gradient(WeightProduct(dy.flatten(0, 1).t(), x_MBsI.transpose(0, 1).flatten(0, 2)))


def _local_product(dy: Tensor, x_BMsI: Tensor, mp: Axis) -> Tensor:
    """Return dw [O, I] of this rank's rows."""
    return dy.flatten(0, 1).t() @ x_BMsI[:, mp.rank].flatten(0, 1)


def _whole_product(local: Tensor | None, dy: Tensor, pieces: list[Tensor], x_BMsI: Tensor, mp: Axis) -> Tensor:
    """Return dw [O, I] of all rows, from gathered pieces of dy [M, B, p, O] and ``local``, dw of this rank's rows."""
    dw = _local_product(dy, x_BMsI, mp) if local is None else local
    dy_BMsO = (pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)).transpose(0, 1)
    for others in _others(mp):
        dw.addmm_(dy_BMsO[:, others].flatten(0, 2).t(), x_BMsI[:, others].flatten(0, 2))
    return dw


def _gather(x: Tensor, layer: LinearComm, overlap: Overlap) -> list[tuple[slice, InFlight]]:
    """Launch the all-gathers of x [B, s, H]. Returns (rows of the sequence, flight of [M B, p, H]) for each piece."""
    mp, flights = layer.mp, []
    for rows in overlap.cut(x.shape[1], x.shape[0] * x.shape[2] * x.element_size(), x.shape[0]):
        piece = x[:, rows]
        whole = x.new_empty((mp.size, *piece.shape))
        # The rows are copied into the output: x itself is used under the collective and kept after it.
        whole[mp.rank].copy_(piece)
        flights.append((rows, layer.launch(AllGather(mp, whole.flatten(0, 1)), whole[mp.rank])))
    return flights


def _landings(flights: list[tuple[slice, InFlight]], layer: LinearComm) -> Iterator[tuple[slice, Tensor]]:
    """Wait for the pieces one at a time. Yields gathered ones as [M, B, p, H], the others unchanged."""
    for rows, flight in flights:
        output = layer.comm.wait(flight)
        gathered = isinstance(flight.exchange, AllGather)
        yield rows, output.unflatten(0, (layer.mp.size, -1)) if gathered else output


def _multiply_and_sum(x: Tensor, right: Factor, width: int, layer: LinearComm) -> tuple[Tensor, list[InFlight]]:
    """Return x [N, I] @ right [I, O] as [N, O], and the flights of the sums of its pieces over mp. width: O."""
    y, flights = x.new_empty((x.shape[0], width)), []
    for rows in layer.overlap.cut(x.shape[0], y.shape[1] * y.element_size()):
        layer.overlap.multiply(x[rows], right, None, y[rows])
        flights.append(layer.launch(Reduce(layer.mp, in_place=True), y[rows]))
    return y, flights


def _product(x: Tensor, right: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Compute out [p, O] = x [p, I] @ right [I, O] (+ bias [O])."""
    if bias is None:
        torch.mm(x, right, out=out)
    else:
        torch.addmm(bias, x, right, out=out)


def _joined(x: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Join leading dims of both tensors to the next one if that is a view in both."""
    dim = x.dim() - 3
    while dim >= 0:
        if all(t.shape[dim] == 1 or t.stride(dim) == t.shape[dim + 1] * t.stride(dim + 1) for t in (x, out)):
            x, out = x.flatten(dim, dim + 1), out.flatten(dim, dim + 1)
        dim -= 1
    return x, out


def _others(mp: Axis) -> list[slice]:
    """Return slices of the other ranks of the axis: those before this one and those after it."""
    parts = slice(0, mp.rank), slice(mp.rank + 1, mp.size)
    return [ranks for ranks in parts if ranks.start < ranks.stop]
