"""Conjugate autograd pairs of collectives over one axis: the backward of each is the forward of its conjugate.

    forward               backward              conjugate
    copy                  all-reduce            reduce
    reduce (all-reduce)   nothing               copy
    gather                own piece             scatter      (what follows is the same on every rank)
    scatter (own piece)   gather                gather
    all_gather            reduce-scatter        reduce_scatter (what follows differs per rank)
    reduce_scatter        all-gather            all_gather

``gather`` and ``all_gather`` have one forward. Which of them is right depends on what the ranks do with the
result: where all compute the same from it, each holds the whole gradient already (``gather``); where each uses it
for a part of its own, the parts must be summed (``all_gather``).

The axis is an argument; at size 1 every function returns its input and communicates nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megapar.core import transport
from megapar.core.axis import Axis


def copy(x: Tensor, axis: Axis) -> Tensor:
    """The input of parts that differ per rank: forward nothing, backward all-reduce."""
    return x if axis.size == 1 else _Copy.apply(x, axis)  # type: ignore[no-any-return]


def reduce(x: Tensor, axis: Axis) -> Tensor:
    """The sum over the axis: forward all-reduce, backward nothing."""
    return x if axis.size == 1 else _Reduce.apply(x, axis)  # type: ignore[no-any-return]


def gather(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """[.., n, ..] to [.., size * n, ..]: forward all-gather, backward this rank's piece."""
    return x if axis.size == 1 else _Gather.apply(x, axis, dim)  # type: ignore[no-any-return]


def scatter(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """[.., size * n, ..] to this rank's [.., n, ..]: forward a slice, backward all-gather."""
    return x if axis.size == 1 else _Scatter.apply(x, axis, dim)  # type: ignore[no-any-return]


def all_gather(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """[.., n, ..] to [.., size * n, ..]: forward all-gather, backward reduce-scatter."""
    return x if axis.size == 1 else _AllGather.apply(x, axis, dim)  # type: ignore[no-any-return]


def reduce_scatter(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """[.., size * n, ..] to this rank's piece [.., n, ..] of the sum: forward reduce-scatter, backward all-gather."""
    return x if axis.size == 1 else _ReduceScatter.apply(x, axis, dim)  # type: ignore[no-any-return]


def all_reduce_(x: Tensor, axis: Axis, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """All-reduce in place, outside autograd; returns its argument."""
    if axis.size > 1:
        transport.all_reduce(x, axis, op)
    return x


def own_piece(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's even piece of ``x`` along ``dim``, as a view; outside the conjugate pairs.

    Raises ValueError where the axis does not divide the dim.
    """
    if x.shape[dim] % axis.size:
        raise ValueError(f"dim {dim} of {tuple(x.shape)} is not divisible by the {axis.size} ranks of {axis.name}")
    length = x.shape[dim] // axis.size
    return x.narrow(dim, axis.rank * length, length)


def _sum(x: Tensor, axis: Axis) -> Tensor:
    return all_reduce_(x.clone(memory_format=torch.contiguous_format), axis)


def _join(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """All ranks' pieces, concatenated along ``dim`` in rank order."""
    piece = x.movedim(dim, 0).contiguous()
    whole = piece.new_empty((axis.size * piece.shape[0], *piece.shape[1:]))
    transport.all_gather(whole, piece, axis)
    return whole.movedim(0, dim).contiguous()


def _sum_piece(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's piece along ``dim`` of the sum over all ranks."""
    if x.shape[dim] % axis.size:
        raise ValueError(f"dim {dim} of {tuple(x.shape)} is not divisible by the {axis.size} ranks of {axis.name}")
    whole = x.movedim(dim, 0).contiguous()
    piece = whole.new_empty((whole.shape[0] // axis.size, *whole.shape[1:]))
    transport.reduce_scatter(piece, whole, axis)
    return piece.movedim(0, dim).contiguous()


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _sum(grads[0], ctx.axis), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return _sum(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _join(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return own_piece(grads[0], ctx.axis, ctx.dim).contiguous(), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return own_piece(x, axis, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _join(grads[0], ctx.axis, ctx.dim), None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _join(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _sum_piece(grads[0], ctx.axis, ctx.dim), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _sum_piece(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _join(grads[0], ctx.axis, ctx.dim), None, None
