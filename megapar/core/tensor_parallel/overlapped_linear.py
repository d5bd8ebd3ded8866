"""Products of layers cut over mp, with their collectives in flight under them: one autograd Function per layer.

Program order (``^`` launch, ``v`` wait). ``own``: this rank's rows; ``1``, ``2``: pieces of the rows of all ranks;
``g`` all-gather, ``r`` reduce-scatter, ``a`` all-reduce.

    sequence parallel
        column  forward    g1^ g2^  own product  g1v product 1  g2v product 2
                backward   g^ (of x, again)  dgrad  r^  gv wgrad  rv
        row     forward    product 1  r1^  product 2  r2^  r1v r2v
                backward   g1^ g2^  own dgrad  own wgrad  g1v dgrad 1  g2v dgrad 2  wgrad of the others
    otherwise
        column  forward    product
                backward   dgrad 1  a1^  dgrad 2  a2^  wgrad  a1v a2v
        row     forward    product 1  a1^  product 2  a2^  a1v a2v
                backward   dgrad  wgrad

Where nothing is to be hidden, and where torch's operators hide it, there is one product for each of forward, dgrad and
wgrad: ``LinearComm.gather_product`` and ``.product_scatter`` are it and its collective. A piece of the others' rows is
two products, of the ranks before this one and of those behind it.

What is launched inside a call is waited for inside it: nothing is in flight where hooks, casts or a recomputation look.
Of a gathered input only the own rows are kept for the backward pass, which gathers the others again, under dgrad.

Shape letters: B batch, M ranks of mp, S sequence, s = S/M own positions, p positions of a piece, I in features and
O out features on this rank, H features outside the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar.core.comm.axis import Axis
from megapar.core.comm.exchange import AllGather, Exchange, Reduce, ReduceScatter
from megapar.core.comm.in_flight import CommContext, InFlight
from megapar.core.recompute.replay import Replay
from megapar.core.tensor_parallel.collective_product import fused_gather_product, fused_product_scatter

Grads = tuple[Tensor | None, Tensor | None, Tensor | None, None]


@dataclass(frozen=True)
class Overlap:
    """How finely a collective is cut, so that one piece travels while another is computed; what pays is the device's.

    pieces: at most so many. piece_bytes: and none sends less than about this to a rank, where latency would cost more
    than it hides. least_rows: nor is a product of fewer rows cut off, all its batches together. batched: products of
    several batches are one kernel. blocking: nothing is hidden: whole products, whole collectives, waited for at once.
    fused: nothing is cut here: torch's operators hide the collective inside the product (``collective_product``).
    """

    pieces: int = 4
    piece_bytes: int = 1 << 20
    least_rows: int = 1
    batched: bool = False
    blocking: bool = False
    fused: bool = False

    @property
    def whole(self) -> bool:
        """Products are not cut."""
        return self.blocking or self.fused

    def cut(self, rows: int, row_bytes: int, products: int = 1) -> list[slice]:
        """Slices of ``rows`` rows that each send ``row_bytes``; the same on every rank that has the same rows.

        products: rows that are multiplied for each of them.
        """
        worth = min(rows * row_bytes // max(1, self.piece_bytes), rows * products // self.least_rows)
        count = max(1, min(self.pieces, rows, worth))
        length = max(1, -(-rows // count))
        return [slice(start, min(start + length, rows)) for start in range(0, rows, length)] or [slice(0, 0)]

    def multiply(self, x: Tensor, right: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """out [.., p, O] = x [.., p, I] @ right [I, O] (+ bias [O]), by few and large products.

        Of the leading dims those that are contiguous to each other in both become rows. Where products are batched, one
        of the remaining dims goes into the product, the longest; there is one product for every index of the others.
        """
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
    """How a layer communicates: over which axis, how finely cut, and who counts.

    later: takes the product of a weight's gradient and gives the gradient, or None where it is made later; None: now.
    closing: the recomputed unit whose output needs the layer's and nothing else does.
    """

    mp: Axis
    overlap: Overlap
    comm: CommContext
    later: Callable[[Callable[[], Tensor]], Tensor | None] | None = None
    closing: Replay | None = None

    @property
    def unused(self) -> bool:
        """Nobody needs the layer's output: the unit that ends with it is computed again, for what its parts keep."""
        return self.closing is not None and self.closing.again

    def weight_gradient(self, product: Callable[[], Tensor]) -> Tensor | None:
        """The product, or None where somebody makes it later."""
        return product() if self.later is None else self.later(product)

    def gather_product(
        self, x: Tensor, right: Tensor | None, bias: Tensor | None, keep: bool = False
    ) -> tuple[Tensor | None, Tensor | None]:
        """(all ranks' x [B, S, I] where ``keep``, that @ right [I, O] (+ bias)), behind or inside one collective."""
        if self.overlap.fused and right is not None:
            return fused_gather_product(x, right, bias, self.mp, keep=keep)
        ((_, x_MBsI),) = _landings(_gather(x, self, Overlap(pieces=1)), self)
        whole = x_MBsI.transpose(0, 1).flatten(1, 2)  # of one sample a view
        y = None if right is None else F.linear(whole, right.t(), bias)
        return whole if keep else None, y

    def product_scatter(self, x: Tensor, right: Tensor) -> Tensor:
        """x [B, S, I] @ right [I, O] -> summed over the ranks, this one's rows [B, s, O]."""
        if self.overlap.fused:
            return fused_product_scatter(x, right, self.mp)
        y = x @ right
        by_rank = y.unflatten(1, (self.mp.size, -1)).transpose(0, 1).flatten(0, 1)
        return self.comm.wait(self.launch(ReduceScatter(self.mp), by_rank))

    def launch(self, exchange: Exchange, x: Tensor) -> InFlight:
        """Start a collective."""
        flight = self.comm.launch(exchange, x)
        if self.overlap.blocking and flight.work is not None:
            self.comm.meter.wait(flight.work, flight.kind)
        return flight


class GatheredColumn(torch.autograd.Function):
    """x [B, s, I] -> all-gather -> @ w [O, I]^T + b [O] -> y [B, S, O].

    dgrad: dy @ w [B, S, I] -> reduce-scatter -> dx [B, s, I]. wgrad: dy^T [O, B S] @ gathered x [B S, I] -> dw [O, I].
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, road: LinearComm) -> Tensor:
        """y [B, S, O]."""
        ctx.road, ctx.biased = road, bias is not None
        ctx.save_for_backward(x, weight)
        if road.overlap.whole:
            return road.gather_product(x, weight.t(), bias)[1]  # type: ignore[return-value]
        flights = _gather(x, road, road.overlap)
        y = x.new_empty((x.shape[0], road.mp.size * x.shape[1], weight.shape[0]))
        y_MBsO, right = y.unflatten(1, (road.mp.size, -1)).transpose(0, 1), weight.t()
        road.overlap.multiply(x, right, bias, y_MBsO[road.mp.rank])
        for rows, x_MBpI in _landings(flights, road):
            for others in _others(road.mp):
                road.overlap.multiply(x_MBpI[others], right, bias, y_MBsO[others, :, rows])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        """dx [B, s, I], dw [O, I], db [O]."""
        road, (x, weight), dy = ctx.road, ctx.saved_tensors, grads[0].contiguous()
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        dx, back = None, None
        if road.overlap.whole:
            return *_whole_column_gradients(dy, x, weight, road, needs_dx, needs_dw), _bias_gradient(dy, ctx), None
        gathered = _gather(x, road, Overlap(pieces=1)) if needs_dw else []
        if needs_dx:
            back = road.launch(ReduceScatter(road.mp), _gathered_dgrad(dy, x, weight, road).flatten(0, 1))
        dw = _gathered_wgrad(dy, gathered, road)
        db = _bias_gradient(dy, ctx)
        if back is not None:
            dx = road.comm.wait(back)
        return dx, dw, db, None


class ArrivedColumn(torch.autograd.Function):
    """``GatheredColumn`` behind an all-gather that others launched and waited for (``core.comm.async_pairs``).

    gathered [M B, s, I], x its rows of this rank [B, s, I], which are kept in its place -> y [B, S, O].
    dgrad: dy @ w [M B, s, I], for the reduce-scatter of those others. wgrad: as there, x is gathered again.
    """

    @staticmethod
    def forward(ctx: Any, gathered: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, road: LinearComm) -> Tensor:
        """y [B, S, O]."""
        ctx.road, ctx.biased = road, bias is not None
        ctx.save_for_backward(x, weight)
        size = road.mp.size
        y, right = x.new_empty((x.shape[0], size * x.shape[1], weight.shape[0])), weight.t()
        y_MBsO = y.unflatten(1, (size, -1)).transpose(0, 1)
        road.overlap.multiply(gathered.unflatten(0, (size, -1)), right, bias, y_MBsO)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """dx [M B, s, I], nothing for x, dw [O, I], db [O]."""
        road, (x, weight), dy = ctx.road, ctx.saved_tensors, grads[0].contiguous()
        needs_dx, _, needs_dw = ctx.needs_input_grad[:3]
        flights = _gather(x, road, Overlap(pieces=1)) if needs_dw else []
        dx = _gathered_dgrad(dy, x, weight, road).flatten(0, 1) if needs_dx else None
        return dx, None, _gathered_wgrad(dy, flights, road), _bias_gradient(dy, ctx), None


class ScatteredRow(torch.autograd.Function):
    """x [B, S, I] @ w [O, I]^T -> partial sums [B, S, O] -> reduce-scatter -> + b [O] -> y [B, s, O].

    dgrad: all-gather of dy [B, s, O] -> @ w -> dx [B, S, I]. wgrad: gathered dy^T [O, B S] @ x [B S, I] -> dw [O, I].
    db [O] is the sum over this rank's rows.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, road: LinearComm) -> Tensor:
        """y [B, s, O]."""
        ctx.road, ctx.biased = road, bias is not None
        ctx.save_for_backward(x, weight)
        size, batch = road.mp.size, x.shape[0]
        x_MBsI, right = x.unflatten(1, (size, -1)).transpose(0, 1), weight.t()
        if road.unused:
            return x.new_zeros((batch, x_MBsI.shape[2], weight.shape[0]))
        if road.overlap.whole:
            y = road.product_scatter(x, right)
            return y if bias is None else y.add_(bias)
        y = x.new_empty((batch, x_MBsI.shape[2], weight.shape[0]))
        flights = []
        for rows in road.overlap.cut(y.shape[1], batch * y.shape[2] * y.element_size(), size * batch):
            x_MBpI = x_MBsI[:, :, rows]
            y_MBpO = y.new_empty((*x_MBpI.shape[:3], y.shape[2]))
            road.overlap.multiply(x_MBpI, right, None, y_MBpO)
            # Rows of one sample lie together and can land where they belong.
            into = y[:, rows] if batch == 1 else None
            flights.append((rows, road.launch(ReduceScatter(road.mp, into), y_MBpO.flatten(0, 1))))
        for rows, y_BpO in _landings(flights, road):
            if batch > 1:
                y[:, rows] = y_BpO
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        """dx [B, S, I], dw [O, I], db [O]."""
        road, (x, weight), dy = ctx.road, ctx.saved_tensors, grads[0].contiguous()
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        mp, dx, dw = road.mp, None, None
        if road.overlap.whole:
            return *_whole_row_gradients(dy, x, weight, road, needs_dx, needs_dw), _bias_gradient(dy, ctx), None
        flights = _gather(dy, road, road.overlap) if needs_dx or needs_dw else []
        x_BMsI = x.unflatten(1, (mp.size, -1))
        if needs_dx:
            dx = x.new_empty(x.shape)
            dx_MBsI = dx.unflatten(1, (mp.size, -1)).transpose(0, 1)
            road.overlap.multiply(dy, weight, None, dx_MBsI[mp.rank])
        if needs_dw and road.later is None:  # under the gathers
            dw = _own_product(dy, x_BMsI, mp)
        pieces = []
        for rows, dy_MBpO in _landings(flights, road):
            pieces.append(dy_MBpO)
            if dx is not None:
                for others in _others(mp):
                    road.overlap.multiply(dy_MBpO[others], weight, None, dx_MBsI[others, :, rows])
        if needs_dw:
            dw = road.weight_gradient(lambda own=dw: _whole_product(own, dy, pieces, x_BMsI, mp))
        return dx, dw, _bias_gradient(dy, ctx), None


class CopiedColumn(torch.autograd.Function):
    """x [.., I] @ w [O, I]^T + b [O] -> y [.., O].

    dgrad: dy @ w -> all-reduce -> dx [.., I]. wgrad: dy^T @ x -> dw [O, I].
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, road: LinearComm) -> Tensor:
        """y [.., O]."""
        ctx.road, ctx.biased = road, bias is not None
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        """dx [.., I], dw [O, I], db [O]."""
        road, (x, weight), dy = ctx.road, ctx.saved_tensors, grads[0].flatten(0, -2)
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        dx, flights = _multiply_and_sum(dy, weight, road) if needs_dx else (None, [])
        dw = road.weight_gradient(lambda: dy.t() @ x.flatten(0, -2)) if needs_dw else None
        db = dy.sum(0) if ctx.biased else None
        for flight in flights:
            road.comm.wait(flight)
        return None if dx is None else dx.view(x.shape), dw, db, None


class ReducedRow(torch.autograd.Function):
    """x [.., I] @ w [O, I]^T -> partial sums [.., O] -> all-reduce -> + b [O] -> y [.., O].

    dgrad: dy @ w -> dx [.., I]. wgrad: dy^T @ x -> dw [O, I]. No collective: dy is the same on every rank.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, road: LinearComm) -> Tensor:
        """y [.., O]."""
        ctx.road, ctx.biased = road, bias is not None
        ctx.save_for_backward(x, weight)
        if road.unused:
            return x.new_zeros((*x.shape[:-1], weight.shape[0]))
        y, flights = _multiply_and_sum(x.flatten(0, -2), weight.t(), road)
        for flight in flights:
            road.comm.wait(flight)
        if bias is not None:
            y.add_(bias)
        return y.view((*x.shape[:-1], weight.shape[0]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        """dx [.., I], dw [O, I], db [O]."""
        road, (x, weight), dy = ctx.road, ctx.saved_tensors, grads[0]
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        dx = dy @ weight if needs_dx else None
        dw = road.weight_gradient(lambda: dy.flatten(0, -2).t() @ x.flatten(0, -2)) if needs_dw else None
        return dx, dw, dy.flatten(0, -2).sum(0) if ctx.biased else None, None


def _gathered_dgrad(dy: Tensor, x: Tensor, weight: Tensor, road: LinearComm) -> Tensor:
    """dx [M, B, s, I] of all ranks' rows; x: this rank's."""
    dx_MBsI = dy.new_empty((road.mp.size, *x.shape))
    road.overlap.multiply(dy.unflatten(1, (road.mp.size, -1)).transpose(0, 1), weight, None, dx_MBsI)
    return dx_MBsI


def _whole_column_gradients(
    dy: Tensor, x: Tensor, weight: Tensor, road: LinearComm, needs_dx: bool, needs_dw: bool
) -> tuple[Tensor | None, Tensor | None]:
    """(dx [B, s, I], dw [O, I]) by one product each."""
    fused = road.overlap.fused
    flights = _gather(x, road, Overlap(pieces=1)) if needs_dw and fused else []  # under the product of dx
    dx = road.product_scatter(dy, weight) if needs_dx else None
    if needs_dw and not fused:
        flights = _gather(x, road, Overlap(pieces=1))
    return dx, _gathered_wgrad(dy, flights, road)


def _whole_row_gradients(
    dy: Tensor, x: Tensor, weight: Tensor, road: LinearComm, needs_dx: bool, needs_dw: bool
) -> tuple[Tensor | None, Tensor | None]:
    """(dx [B, S, I], dw [O, I]) by one product each; dy [B, s, O]."""
    if not needs_dx and not needs_dw:
        return None, None
    dy_BSO, dx = road.gather_product(dy, weight if needs_dx else None, None, keep=needs_dw)
    if not needs_dw or dy_BSO is None:
        return dx, None
    return dx, road.weight_gradient(lambda: dy_BSO.flatten(0, 1).t() @ x.flatten(0, 1))


def _bias_gradient(dy: Tensor, ctx: Any) -> Tensor | None:
    """db [O] of the rows that are here."""
    return dy.sum((0, 1)) if ctx.biased else None


def _gathered_wgrad(dy: Tensor, gathered: list[tuple[slice, InFlight]], road: LinearComm) -> Tensor | None:
    """dw [O, I], from all ranks' x in one flight; None without it."""
    if not gathered:
        return None
    ((_, x_MBsI),) = _landings(gathered, road)
    return road.weight_gradient(lambda: dy.flatten(0, 1).t() @ x_MBsI.transpose(0, 1).flatten(0, 2))


def _own_product(dy: Tensor, x_BMsI: Tensor, mp: Axis) -> Tensor:
    """dw [O, I] of this rank's rows."""
    return dy.flatten(0, 1).t() @ x_BMsI[:, mp.rank].flatten(0, 1)


def _whole_product(own: Tensor | None, dy: Tensor, pieces: list[Tensor], x_BMsI: Tensor, mp: Axis) -> Tensor:
    """dw [O, I] of all rows; ``own``: of this rank's, where it is there already. pieces: gathered dy [M, B, p, O]."""
    dw = _own_product(dy, x_BMsI, mp) if own is None else own
    dy_BMsO = (pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)).transpose(0, 1)
    for others in _others(mp):
        dw.addmm_(dy_BMsO[:, others].flatten(0, 2).t(), x_BMsI[:, others].flatten(0, 2))
    return dw


def _gather(x: Tensor, road: LinearComm, overlap: Overlap) -> list[tuple[slice, InFlight]]:
    """Launch the all-gathers of x [B, s, H]: per piece its rows of the sequence, and the flight of [M B, p, H]."""
    mp, flights = road.mp, []
    for rows in overlap.cut(x.shape[1], x.shape[0] * x.shape[2] * x.element_size(), x.shape[0]):
        piece = x[:, rows]
        whole = x.new_empty((mp.size, *piece.shape))
        # In place: x itself is used under the collective and kept behind it, so it does not travel.
        whole[mp.rank].copy_(piece)
        flights.append((rows, road.launch(AllGather(mp, whole.flatten(0, 1)), whole[mp.rank])))
    return flights


def _landings(flights: list[tuple[slice, InFlight]], road: LinearComm) -> Iterator[tuple[slice, Tensor]]:
    """Wait for one piece after the other: gathered ones as [M, B, p, H], the others as they are."""
    for rows, flight in flights:
        output = road.comm.wait(flight)
        gathered = isinstance(flight.exchange, AllGather)
        yield rows, output.unflatten(0, (road.mp.size, -1)) if gathered else output


def _multiply_and_sum(x: Tensor, right: Tensor, road: LinearComm) -> tuple[Tensor, list[InFlight]]:
    """x [N, I] @ right [I, O]: [N, O], piece by piece on its way through the sum over mp."""
    y, flights = x.new_empty((x.shape[0], right.shape[1])), []
    for rows in road.overlap.cut(x.shape[0], y.shape[1] * y.element_size()):
        torch.mm(x[rows], right, out=y[rows])
        flights.append(road.launch(Reduce(road.mp, in_place=True), y[rows]))
    return y, flights


def _product(x: Tensor, right: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out [p, O] = x [p, I] @ right [I, O] (+ bias [O])."""
    if bias is None:
        torch.mm(x, right, out=out)
    else:
        torch.addmm(bias, x, right, out=out)


def _joined(x: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Both with leading dims joined to the next one where in both that is a view."""
    dim = x.dim() - 3
    while dim >= 0:
        if all(t.shape[dim] == 1 or t.stride(dim) == t.shape[dim + 1] * t.stride(dim + 1) for t in (x, out)):
            x, out = x.flatten(dim, dim + 1), out.flatten(dim, dim + 1)
        dim -= 1
    return x, out


def _others(mp: Axis) -> list[slice]:
    """The other ranks of the axis: those before this one and those behind it."""
    parts = slice(0, mp.rank), slice(mp.rank + 1, mp.size)
    return [ranks for ranks in parts if ranks.start < ranks.stop]
