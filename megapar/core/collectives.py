"""Conjugate autograd pairs of collectives over one axis: the backward of each is the forward of its conjugate.

    forward               backward              conjugate
    copy                  all-reduce            reduce
    reduce (all-reduce)   nothing               copy
    gather                own piece             nothing has it (what follows is the same on every rank)
    all_gather            reduce-scatter        reduce_scatter (what follows differs per rank)
    reduce_scatter        all-gather            all_gather

``gather`` and ``all_gather`` have one forward. Which of them is right depends on what the ranks do with the
result: where all compute the same from it, each holds the whole gradient already (``gather``); where each uses it
for a part of its own, the parts must be summed (``all_gather``).

The axis is an argument; at size 1 every function returns its input and communicates nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megapar.core import transport
from megapar.core.axis import Axis

Operation = Callable[[Tensor], Tensor]


def copy(x: Tensor, axis: Axis) -> Tensor:
    """The input of parts that differ per rank: forward nothing, backward all-reduce."""
    return _pair(x, axis, _as_it_is, partial(_sum, axis=axis))


def reduce(x: Tensor, axis: Axis) -> Tensor:
    """The sum over the axis: forward all-reduce, backward nothing."""
    return _pair(x, axis, partial(_sum, axis=axis), _as_it_is)


def gather(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """[.., n, ..] to [.., size * n, ..]: forward all-gather, backward this rank's piece."""
    return _pair(x, axis, partial(_join, axis=axis, dim=dim), partial(_cut, axis=axis, dim=dim))


def all_gather(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """[.., n, ..] to [.., size * n, ..]: forward all-gather, backward reduce-scatter."""
    return _pair(x, axis, partial(_join, axis=axis, dim=dim), partial(_sum_piece, axis=axis, dim=dim))


def reduce_scatter(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """[.., size * n, ..] to this rank's piece [.., n, ..] of the sum: forward reduce-scatter, backward all-gather."""
    return _pair(x, axis, partial(_sum_piece, axis=axis, dim=dim), partial(_join, axis=axis, dim=dim))


def all_reduce_(x: Tensor, axis: Axis, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """All-reduce in place, outside autograd; returns its argument."""
    if axis.size > 1:
        with axis.waiting("all_reduce"):
            transport.all_reduce(x, axis, op)
    return x


def own_piece(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's even piece of ``x`` along ``dim``, as a view; outside the conjugate pairs.

    Raises ValueError where the axis does not divide the dim.
    """
    length = _piece_length(x, axis, dim)
    return x.narrow(dim, axis.rank * length, length)


def _piece_length(x: Tensor, axis: Axis, dim: int) -> int:
    if x.shape[dim] % axis.size:
        raise ValueError(f"dim {dim} of {tuple(x.shape)} is not divisible by the {axis.size} ranks of {axis.name}")
    return x.shape[dim] // axis.size


def _as_it_is(x: Tensor) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, axis: Axis) -> Tensor:
    return all_reduce_(x.clone(memory_format=torch.contiguous_format), axis)


def _join(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """All ranks' pieces, concatenated along ``dim`` in rank order."""
    piece = x.movedim(dim, 0).contiguous()
    whole = piece.new_empty((axis.size * piece.shape[0], *piece.shape[1:]))
    with axis.waiting("all_gather"):
        transport.all_gather(whole, piece, axis)
    return whole.movedim(0, dim).contiguous()


def _cut(x: Tensor, axis: Axis, dim: int) -> Tensor:
    return own_piece(x, axis, dim).contiguous()


def _sum_piece(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's piece along ``dim`` of the sum over all ranks."""
    length = _piece_length(x, axis, dim)
    whole = x.movedim(dim, 0).contiguous()
    piece = whole.new_empty((length, *whole.shape[1:]))
    with axis.waiting("reduce_scatter"):
        transport.reduce_scatter(piece, whole, axis)
    return piece.movedim(0, dim).contiguous()


def _pair(x: Tensor, axis: Axis, there: Operation, back: Operation) -> Tensor:
    if axis.size == 1:
        return x
    y: Tensor = _Pair.apply(x, there, back)
    return y


class _Pair(torch.autograd.Function):
    """One operation forward, its conjugate backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Operation, back: Operation) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grads[0]), None, None
