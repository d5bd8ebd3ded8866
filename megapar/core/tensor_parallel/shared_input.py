"""Column parallel products of parts of an input that all ranks of mp have in common, such as latents.

    forward    x [B, S(/mp), parts.., rest] -> all-gather (sequence parallel) -> part @ weight^T for each, and the rest
    backward   gradients of the parts and of the rest -> one sum over mp in max(fp32, dtype) -> dx

Each rank uses parts and rest for its own heads, so their gradients are partial sums over mp, with and without sequence
parallelism. They are summed once: products in max(fp32, dtype), then the collective, then one rounding. The weight
gradients are computed while it is in flight.

The gathered input is kept for the backward: it is small, and attention makes its keys from it there.

Shape letters: B batch, M ranks of mp, S sequence, s = S/M, W width of the input, O out features of a weight on this
rank, R width of the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar.core.comm.async_pairs import Ticket
from megapar.core.comm.axis import Axis
from megapar.core.comm.exchange import AllGather, Exchange, Reduce, ReduceScatter
from megapar.core.comm.in_flight import CommContext, InFlight
from megapar.core.device.dtypes import WeightProduct, at_least_fp32
from megapar.core.device.ops import op
from megapar.core.tensor_parallel.weight_gradients import DeferWgrad


class SharedComm(NamedTuple):
    """Communication of the products.

    Attributes:
        mp: The axis, at least two ranks.
        sequence_parallel: Each rank has a part of the positions of x.
        defer_wgrads: Of each weight; see ``weight_gradients.linear``.
        ticket: All-gather of x that ``async_pairs.start`` launched; x is then its handle.
    """

    mp: Axis
    sequence_parallel: bool
    comm: CommContext
    defer_wgrads: tuple[DeferWgrad | None, ...]
    ticket: Ticket | None = None


class SharedProducts(NamedTuple):
    """Results of ``shared_products``.

    Attributes:
        products: One per weight, [B, S, O].
        rest: The last features of x, [B, S, R], in max(fp32, dtype), in which their gradient is summed.
        whole: x of all positions, [B, S, W], without gradient.
    """

    products: tuple[Tensor, ...]
    rest: Tensor
    whole: Tensor


def shared_products(x: Tensor, weights: Sequence[Tensor], comm: SharedComm) -> SharedProducts:
    """Multiply consecutive parts of x [B, S(/mp), W] by weights [O, part]; what remains of x is the rest."""
    *products, rest, whole = _SharedProducts.apply(x, comm, *weights)
    return SharedProducts(tuple(products), rest, whole)


class _SharedProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: SharedComm, *weights: Tensor) -> tuple[Tensor, ...]:
        whole = _gathered(x, comm)
        ctx.comm, ctx.dtype = comm, x.dtype
        ctx.save_for_backward(whole, *weights)
        *parts, rest = _parts(whole, weights)
        ctx.mark_non_differentiable(whole)
        products = [F.linear(part.flatten(0, 1), weight) for part, weight in zip(parts, weights, strict=True)]
        # The rest is a copy in any dtype: autograd would otherwise take it for a view of the whole.
        rows = whole.shape[:2]
        return *(y.unflatten(0, rows) for y in products), rest.to(at_least_fp32(x.dtype), copy=True), whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        comm: SharedComm = ctx.comm
        whole, *weights = ctx.saved_tensors
        *dys, drest, _ = grads
        dys = [dy.flatten(0, 1) for dy in dys]
        product: Callable[[Tensor, Tensor], Tensor] = op("wide_product", whole)
        sums = [product(dy, weight) for dy, weight in zip(dys, weights, strict=True)]
        dx = torch.cat([*sums, drest.flatten(0, 1)], dim=-1).view(whole.shape)
        flight = _launch_sum(dx, comm)
        parts = _parts(whole, weights)[:-1]
        needed = ctx.needs_input_grad[2:]
        dws = [
            _weight_gradient(dy, part, defer) if needs else None
            for dy, part, defer, needs in zip(dys, parts, comm.defer_wgrads, needed, strict=True)
        ]
        if comm.ticket is not None:  # the start of the pair waits
            comm.ticket.backward_flight = flight
            return comm.comm.zero(whole), None, *dws
        return comm.comm.wait(flight).to(ctx.dtype), None, *dws


def _gathered(x: Tensor, comm: SharedComm) -> Tensor:
    """Return x of all positions, [B, S, W]."""
    if not comm.sequence_parallel:
        return x.detach()
    if comm.ticket is not None:
        comm.ticket.claim()
        by_rank = comm.ticket.arrive()
    else:
        by_rank = comm.comm.wait(comm.comm.launch(AllGather(comm.mp), x.contiguous()))
    return by_rank.unflatten(0, (comm.mp.size, -1)).transpose(0, 1).flatten(1, 2)


def _launch_sum(dx: Tensor, comm: SharedComm) -> InFlight:
    """Launch the sum of dx [B, S, W] over the ranks, of which this one receives its own positions."""
    exchange: Exchange = Reduce(comm.mp, in_place=True)
    if comm.sequence_parallel:
        exchange = ReduceScatter(comm.mp)
        dx = dx.unflatten(1, (comm.mp.size, -1)).transpose(0, 1).flatten(0, 1)
    return comm.comm.launch(exchange, dx)


def _parts(whole: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Split x into the weights' parts and the rest."""
    widths = [weight.shape[1] for weight in weights]
    return whole.split((*widths, whole.shape[-1] - sum(widths)), dim=-1)


def _weight_gradient(dy: Tensor, part: Tensor, defer: DeferWgrad | None) -> Tensor | None:
    product = WeightProduct(dy.t(), part.flatten(0, 1))
    return product() if defer is None else defer(product)
