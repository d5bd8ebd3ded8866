"""Blocking collectives over one axis, with their gradients, except ``all_reduce_``.

Each of the others runs an exchange, and its backward the conjugate (table in ``core/comm/exchange.py``). On an
axis of size 1 every function returns its input and communicates nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megapar.core.comm import collectives
from megapar.core.comm.axis import Axis
from megapar.core.comm.exchange import AllGather, BlockingExchange, Copy, Reduce, ReduceScatter


def copy(x: Tensor, axis: Axis) -> Tensor:
    """Return ``x``, the same on all ranks, for computations that differ per rank: the backward is an all-reduce."""
    return _run(Copy(axis), x)


def reduce(x: Tensor, axis: Axis) -> Tensor:
    """Return the sum of ``x`` over the axis: forward all-reduce, backward nothing."""
    return _run(Reduce(axis), x)


def all_gather(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Gather [.., n, ..] to [.., size * n, ..] for work that differs per rank: the backward is a reduce-scatter."""
    return _run(AllGather(axis), x, dim)


def all_gather_replicated(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Gather as ``all_gather`` for work that is the same on all ranks: the backward is this rank's piece."""
    return _run(AllGather(axis, alike=True), x, dim)


def reduce_scatter(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Sum [.., size * n, ..] and return this rank's piece [.., n, ..]: forward reduce-scatter, backward all-gather."""
    return _run(ReduceScatter(axis), x, dim)


def all_reduce_(x: Tensor, axis: Axis, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """All-reduce ``x`` in place, outside autograd, and return it."""
    if axis.size > 1:
        with axis.waiting("all_reduce"):
            collectives.all_reduce(x, axis, op)
    return x


def _run(exchange: BlockingExchange, x: Tensor, dim: int = 0) -> Tensor:
    if exchange.axis.size == 1:
        return x
    return _Run.apply(x, exchange, dim)


class _Run(torch.autograd.Function):
    """An exchange forward, its conjugate backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: BlockingExchange, dim: int) -> Tensor:
        ctx.exchange, ctx.dim = exchange, dim
        return exchange.run(x, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.exchange.conjugate().run(grads[0], ctx.dim), None, None
