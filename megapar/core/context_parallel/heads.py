"""Ulysses: trade some positions of every head for every position of some heads; one all-to-all in, one out.

    q [B, S/cp, N, D], k [.., G, D], v [.., G, V] -> all-to-all -> q [B, S, N/cp, D], k [.., G'/cp, D], v [.., G'/cp, V]
    y [B, S, N/cp, V] -> all-to-all -> [B, S/cp, N, V]

Positions stay in order. Where cp does not divide the G key-value heads, each is repeated (G' heads in all) and sent to
every rank that has query heads of its group; its gradients are summed. Source: DeepSpeed-Ulysses, arXiv 2309.14509.

Shape letters: B batch, S sequence, N query heads, G key-value heads, D head size of queries and keys, V of values.
Tested in ``tests/core/context_parallel/test_method.py``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megapar.core.comm.async_pairs import start, wait
from megapar.core.comm.axis import Axis
from megapar.core.comm.exchange import AllToAll
from megapar.core.comm.in_flight import CommContext


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


def to_positions(y: Tensor, cp: Axis, comm: CommContext) -> Tensor:
    """Trade all positions of this rank's heads for its positions of all heads."""
    # Always a copy: attention saves y for its backward, so y itself must not be the message.
    message = y.transpose(0, 1).clone(memory_format=torch.contiguous_format)
    received = wait(*start(AllToAll(cp), message, comm))
    mine: Tensor = received.unflatten(0, (cp.size, -1)).permute(2, 1, 0, 3, 4).flatten(2, 3)
    return mine
