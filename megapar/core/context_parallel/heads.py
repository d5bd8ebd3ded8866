"""Ulysses: trade some positions of every head for every position of some heads; one all-to-all in, one out.

    q [B, S/cp, N, D], k [.., G, D], v [.., G, V] -> all-to-all -> q [B, S, N/cp, D], k [.., G'/cp, D], v [.., G'/cp, V]
    y [B, S, N/cp, V] -> all-to-all -> [B, S/cp, N, V]

Positions stay in order. Where cp does not divide the G key-value heads, each is repeated (G' heads in all) and sent to
every rank that has query heads of its group; its gradients are summed. Source: DeepSpeed-Ulysses, arXiv 2309.14509.

Keys and values that are made of latents (``columns``) need not travel: queries take the all-to-all, the latents of all
positions are gathered, and each rank makes the keys and values of its heads.

Shape letters: B batch, S sequence, N query heads, G key-value heads, D head size of queries and keys, V of values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar.core.comm.async_pairs import start, wait
from megapar.core.comm.axis import Axis
from megapar.core.comm.exchange import AllGather, AllToAll, ReduceScatter
from megapar.core.comm.in_flight import CommContext
from megapar.core.context_parallel.columns import Expansion
from megapar.core.device.dtypes import at_least_fp32


def to_heads(q: Tensor, k: Tensor, v: Tensor, cp: Axis, comm: CommContext) -> tuple[Tensor, Tensor, Tensor]:
    """Trade this rank's positions of all heads for all positions of its heads."""
    copies = cp.size // math.gcd(cp.size, k.shape[2])
    k, v = (x.repeat_interleave(copies, dim=2) for x in (k, v))
    dealt = [x.unflatten(2, (cp.size, -1)) for x in (q, k, v)]
    # Heads of equal size are concatenated as heads. Otherwise all features of a position are, at the cost of a copy.
    equal = k.shape[-1] == v.shape[-1]
    joined = torch.cat(dealt if equal else [x.flatten(3) for x in dealt], dim=3)
    message = joined.transpose(0, 2).flatten(0, 1)  # [cp * S/cp, B, heads, D] or [.., features]
    received = wait(*start(AllToAll(cp), message, comm)).transpose(0, 1)
    parts = received.split([x.shape[3] if equal else x.shape[3:].numel() for x in dealt], dim=2)
    q, k, v = parts if equal else (part.unflatten(2, x.shape[3:]) for part, x in zip(parts, dealt, strict=True))
    return q, k, v


def queries_to_heads(q: Tensor, latents: Tensor, cp: Axis, comm: CommContext) -> tuple[Tensor, Tensor]:
    """Trade this rank's positions of all queries for all positions of its heads', and gather the latents.

    The other heads' keys and values are never made here: the weight that expands latents is cut by ``own_heads``. The
    gradient of the latents, a sum over the heads of all ranks, is reduce-scattered in max(fp32, dtype).
    q [B, S/cp, N, D] and latents [B, S/cp, F] become [B, S, N/cp, D] and [B, S, F], both in q's dtype. Latents in a
    wider dtype get a gradient that is not rounded.
    """
    return _DealQueries.apply(q, latents, cp, comm)


class _DealQueries(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, latents: Tensor, cp: Axis, comm: CommContext) -> tuple[Tensor, Tensor]:
        ctx.cp, ctx.comm, ctx.latent_dtype = cp, comm, latents.dtype
        arriving = comm.launch(AllGather(cp), latents.transpose(0, 1).to(q.dtype, copy=True))
        by_rank = q.unflatten(2, (cp.size, -1)).permute(2, 1, 0, 3, 4).flatten(0, 1)  # [cp * S/cp, B, heads, D]
        heads = comm.wait(comm.launch(AllToAll(cp), by_rank))
        return heads.transpose(0, 1), comm.wait(arriving).transpose(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dq, dlatents), cp, comm = grads, ctx.cp, ctx.comm
        wide = dlatents.transpose(0, 1).to(at_least_fp32(dlatents.dtype), copy=True)
        returning = comm.launch(ReduceScatter(cp), wide)
        message = dq.transpose(0, 1).clone(memory_format=torch.contiguous_format)
        by_rank = comm.wait(comm.launch(AllToAll(cp), message)).unflatten(0, (cp.size, -1))
        mine = by_rank.permute(2, 1, 0, 3, 4).flatten(2, 3)
        return mine, comm.wait(returning).transpose(0, 1).to(ctx.latent_dtype), None, None


def own_heads(expansion: Expansion, cp: Axis) -> Expansion:
    """Return the expansion of latents to this cp rank's share of the heads.

    Its gradient covers these heads alone. A deferred one has zeros for the other heads.
    """
    whole, later = expansion.weight, expansion.defer_wgrad
    heads = whole.shape[0] // cp.size
    own = slice(cp.rank * heads, (cp.rank + 1) * heads)
    if later is None:
        return Expansion(whole[own])
    shape = whole.shape

    def defer_rows(product: Callable[[], Tensor]) -> Tensor | None:
        def padded() -> Tensor:
            rows = product()
            gradient = rows.new_zeros(shape)
            gradient[own] = rows.view(gradient[own].shape)
            return gradient

        gradient = later(padded)
        return None if gradient is None else gradient[own].flatten(0, 1)

    return Expansion(whole[own], defer_rows)


def to_positions(y: Tensor, cp: Axis, comm: CommContext) -> Tensor:
    """Trade all positions of this rank's heads for its positions of all heads."""
    # Always a copy: attention saves y for its backward, so y itself must not be the message.
    message = y.transpose(0, 1).clone(memory_format=torch.contiguous_format)
    received = wait(*start(AllToAll(cp), message, comm))
    return received.unflatten(0, (cp.size, -1)).permute(2, 1, 0, 3, 4).flatten(2, 3)
