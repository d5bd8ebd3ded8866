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

from megapar.core.axis import Axis
from megapar.core.exchange import AllGather, Exchange, Reduce, ReduceScatter
from megapar.core.replay import Replay
from megapar.core.traffic import Flight, Traffic

Grads = tuple[Tensor | None, Tensor | None, Tensor | None, None]


@dataclass(frozen=True)
class Overlap:
    """How finely a collective is cut, so that one piece travels while another is computed.

    pieces: at most so many. piece_bytes: and none sends less than about this, where latency would cost more than it
    hides. blocking: wait at the launch, so that nothing is hidden.
    """

    pieces: int = 4
    piece_bytes: int = 1 << 20
    blocking: bool = False

    def cut(self, rows: int, row_bytes: int) -> list[slice]:
        """Slices of ``rows`` rows that each send ``row_bytes``; the same on every rank that has the same rows."""
        count = max(1, min(self.pieces, rows, rows * row_bytes // max(1, self.piece_bytes)))
        length = max(1, -(-rows // count))
        return [slice(start, min(start + length, rows)) for start in range(0, rows, length)] or [slice(0, 0)]


class Road(NamedTuple):
    """How a layer communicates: over which axis, how finely cut, and who counts.

    later: takes the product of a weight's gradient and gives the gradient, or None where it is made later; None: now.
    closing: the recomputed unit whose output needs the layer's and nothing else does.
    """

    mp: Axis
    overlap: Overlap
    traffic: Traffic
    later: Callable[[Callable[[], Tensor]], Tensor | None] | None = None
    closing: Replay | None = None

    @property
    def unused(self) -> bool:
        """Nobody needs the layer's output: the unit that ends with it is computed again, for what its parts keep."""
        return self.closing is not None and self.closing.again

    def weight_gradient(self, product: Callable[[], Tensor]) -> Tensor | None:
        """The product, or None where somebody makes it later."""
        return product() if self.later is None else self.later(product)

    def launch(self, exchange: Exchange, x: Tensor) -> Flight:
        """Start a collective."""
        flight = self.traffic.launch(exchange, x)
        if self.overlap.blocking and flight.work is not None:
            self.traffic.meter.wait(flight.work, flight.kind)
        return flight


class GatheredColumn(torch.autograd.Function):
    """x [B, s, I] -> all-gather -> @ w [O, I]^T + b [O] -> y [B, S, O].

    dgrad: dy @ w [B, S, I] -> reduce-scatter -> dx [B, s, I]. wgrad: dy^T [O, B S] @ gathered x [B S, I] -> dw [O, I].
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, road: Road) -> Tensor:
        """y [B, S, O]."""
        ctx.road, ctx.biased = road, bias is not None
        ctx.save_for_backward(x, weight)
        flights = _gather(x, road, road.overlap)
        y = x.new_empty((x.shape[0], road.mp.size * x.shape[1], weight.shape[0]))
        y_BMsO, right = y.unflatten(1, (road.mp.size, -1)), weight.t()
        _multiply(x, right, bias, y_BMsO[:, road.mp.rank])
        for rows, x_MBpI in _landings(flights, road):
            for rank in _others(road.mp):
                _multiply(x_MBpI[rank], right, bias, y_BMsO[:, rank, rows])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        """dx [B, s, I], dw [O, I], db [O]."""
        road, (x, weight), dy = ctx.road, ctx.saved_tensors, grads[0].contiguous()
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        dx, back = None, None
        gathered = _gather(x, road, Overlap(pieces=1)) if needs_dw else []
        if needs_dx:
            back = road.launch(ReduceScatter(road.mp), _gathered_dgrad(dy, x, weight, road).flatten(0, 1))
        dw = _gathered_wgrad(dy, gathered, road)
        db = dy.sum((0, 1)) if ctx.biased else None
        if back is not None:
            dx = road.traffic.land(back)
        return dx, dw, db, None


class ArrivedColumn(torch.autograd.Function):
    """``GatheredColumn`` behind an all-gather that others launched and waited for (``core.tickets``).

    gathered [M B, s, I], x its rows of this rank [B, s, I], which are kept in its place -> y [B, S, O].
    dgrad: dy @ w [M B, s, I], for the reduce-scatter of those others. wgrad: as there, x is gathered again.
    """

    @staticmethod
    def forward(ctx: Any, gathered: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, road: Road) -> Tensor:
        """y [B, S, O]."""
        ctx.road, ctx.biased = road, bias is not None
        ctx.save_for_backward(x, weight)
        size = road.mp.size
        y, right = x.new_empty((x.shape[0], size * x.shape[1], weight.shape[0])), weight.t()
        if x.shape[0] == 1:  # the ranks' rows lie in order
            _multiply(gathered.flatten(0, 1).unsqueeze(0), right, bias, y)
        else:
            for x_BsI, y_BsO in zip(gathered.chunk(size), y.unflatten(1, (size, -1)).unbind(1), strict=True):
                _multiply(x_BsI, right, bias, y_BsO)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """dx [M B, s, I], nothing for x, dw [O, I], db [O]."""
        road, (x, weight), dy = ctx.road, ctx.saved_tensors, grads[0].contiguous()
        needs_dx, _, needs_dw = ctx.needs_input_grad[:3]
        flights = _gather(x, road, Overlap(pieces=1)) if needs_dw else []
        dx = _gathered_dgrad(dy, x, weight, road).flatten(0, 1) if needs_dx else None
        return dx, None, _gathered_wgrad(dy, flights, road), dy.sum((0, 1)) if ctx.biased else None, None


class ScatteredRow(torch.autograd.Function):
    """x [B, S, I] @ w [O, I]^T -> partial sums [B, S, O] -> reduce-scatter -> + b [O] -> y [B, s, O].

    dgrad: all-gather of dy [B, s, O] -> @ w -> dx [B, S, I]. wgrad: gathered dy^T [O, B S] @ x [B S, I] -> dw [O, I].
    db [O] is the sum over this rank's rows.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, road: Road) -> Tensor:
        """y [B, s, O]."""
        ctx.road, ctx.biased = road, bias is not None
        ctx.save_for_backward(x, weight)
        size, batch = road.mp.size, x.shape[0]
        x_BMsI, right = x.unflatten(1, (size, -1)), weight.t()
        y = x.new_empty((batch, x_BMsI.shape[2], weight.shape[0]))
        if road.unused:
            return y.zero_()
        flights = []
        for rows in road.overlap.cut(y.shape[1], batch * y.shape[2] * y.element_size()):
            x_BMpI = x_BMsI[:, :, rows]
            y_MBpO = y.new_empty((size, batch, x_BMpI.shape[2], y.shape[2]))
            for rank in range(size):
                _multiply(x_BMpI[:, rank], right, None, y_MBpO[rank])
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
        flights = _gather(dy, road, road.overlap) if needs_dx or needs_dw else []
        x_BMsI = x.unflatten(1, (mp.size, -1))
        if needs_dx:
            dx = x.new_empty(x.shape)
            _multiply(dy, weight, None, dx.unflatten(1, (mp.size, -1))[:, mp.rank])
        if needs_dw and road.later is None:  # under the gathers
            dw = _own_product(dy, x_BMsI, mp)
        pieces = []
        for rows, dy_MBpO in _landings(flights, road):
            pieces.append(dy_MBpO)
            if dx is not None:
                for rank in _others(mp):
                    _multiply(dy_MBpO[rank], weight, None, dx.unflatten(1, (mp.size, -1))[:, rank, rows])
        if needs_dw:
            dw = road.weight_gradient(lambda own=dw: _whole_product(own, dy, pieces, x_BMsI, mp))
        return dx, dw, dy.sum((0, 1)) if ctx.biased else None, None


class CopiedColumn(torch.autograd.Function):
    """x [.., I] @ w [O, I]^T + b [O] -> y [.., O].

    dgrad: dy @ w -> all-reduce -> dx [.., I]. wgrad: dy^T @ x -> dw [O, I].
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, road: Road) -> Tensor:
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
            road.traffic.land(flight)
        return None if dx is None else dx.view(x.shape), dw, db, None


class ReducedRow(torch.autograd.Function):
    """x [.., I] @ w [O, I]^T -> partial sums [.., O] -> all-reduce -> + b [O] -> y [.., O].

    dgrad: dy @ w -> dx [.., I]. wgrad: dy^T @ x -> dw [O, I]. No collective: dy is the same on every rank.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, road: Road) -> Tensor:
        """y [.., O]."""
        ctx.road, ctx.biased = road, bias is not None
        ctx.save_for_backward(x, weight)
        if road.unused:
            return x.new_zeros((*x.shape[:-1], weight.shape[0]))
        y, flights = _multiply_and_sum(x.flatten(0, -2), weight.t(), road)
        for flight in flights:
            road.traffic.land(flight)
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


def _gathered_dgrad(dy: Tensor, x: Tensor, weight: Tensor, road: Road) -> Tensor:
    """dx [M, B, s, I] of all ranks' rows; x: this rank's."""
    dx_MBsI = dy.new_empty((road.mp.size, *x.shape))
    if x.shape[0] == 1:  # the ranks' rows lie in order
        _multiply(dy, weight, None, dx_MBsI.flatten(0, 2).unsqueeze(0))
    else:
        for rank, dy_BsO in enumerate(dy.chunk(road.mp.size, 1)):
            _multiply(dy_BsO, weight, None, dx_MBsI[rank])
    return dx_MBsI


def _gathered_wgrad(dy: Tensor, gathered: list[tuple[slice, Flight]], road: Road) -> Tensor | None:
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
    for others in (slice(0, mp.rank), slice(mp.rank + 1, mp.size)):
        if others.start < others.stop:
            dw.addmm_(dy_BMsO[:, others].flatten(0, 2).t(), x_BMsI[:, others].flatten(0, 2))
    return dw


def _gather(x: Tensor, road: Road, overlap: Overlap) -> list[tuple[slice, Flight]]:
    """Launch the all-gathers of x [B, s, H]: per piece its rows of the sequence, and the flight of [M B, p, H]."""
    mp, flights = road.mp, []
    for rows in overlap.cut(x.shape[1], x.shape[0] * x.shape[2] * x.element_size()):
        piece = x[:, rows]
        whole = x.new_empty((mp.size, *piece.shape))
        # In place: x itself is used under the collective and kept behind it, so it does not travel.
        whole[mp.rank].copy_(piece)
        flights.append((rows, road.launch(AllGather(mp, whole.flatten(0, 1)), whole[mp.rank])))
    return flights


def _landings(flights: list[tuple[slice, Flight]], road: Road) -> Iterator[tuple[slice, Tensor]]:
    """Wait for one piece after the other: gathered ones as [M, B, p, H], the others as they are."""
    for rows, flight in flights:
        output = road.traffic.land(flight)
        gathered = isinstance(flight.exchange, AllGather)
        yield rows, output.unflatten(0, (road.mp.size, -1)) if gathered else output


def _multiply_and_sum(x: Tensor, right: Tensor, road: Road) -> tuple[Tensor, list[Flight]]:
    """x [N, I] @ right [I, O]: [N, O], piece by piece on its way through the sum over mp."""
    y, flights = x.new_empty((x.shape[0], right.shape[1])), []
    for rows in road.overlap.cut(x.shape[0], y.shape[1] * y.element_size()):
        torch.mm(x[rows], right, out=y[rows])
        flights.append(road.launch(Reduce(road.mp, in_place=True), y[rows]))
    return y, flights


def _multiply(x: Tensor, right: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out [B, p, O] = x [B, p, I] @ right [I, O] (+ bias [O]); samples may lie apart, a sample's rows do not."""
    for x_pI, out_pO in zip(x.unbind(), out.unbind(), strict=True):
        if bias is None:
            torch.mm(x_pI, right, out=out_pO)
        else:
            torch.addmm(bias, x_pI, right, out=out_pO)


def _others(mp: Axis) -> list[int]:
    """The other ranks of the axis."""
    return [rank for rank in range(mp.size) if rank != mp.rank]
