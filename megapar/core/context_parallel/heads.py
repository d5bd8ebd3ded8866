"""Every position of some heads in place of some positions of every head: one all-to-all in, one out.

    q [B, S/cp, N, D], k and v [B, S/cp, G, D] -> all-to-all -> q [B, S, N/cp, D], k and v [B, S, G'/cp, D]
    y [B, S, N/cp, D] -> all-to-all -> [B, S/cp, N, D]

Positions lie in order. Where cp does not divide the G key-value heads each is sent as often as its query heads are
dealt to ranks (G' = G repeated), and its gradients are summed. Source: DeepSpeed-Ulysses, arXiv 2309.14509.

Shape letters: B batch, S sequence, N query heads, G key-value heads, D head size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megapar.core.axis import Axis
from megapar.core.exchange import AllToAll
from megapar.core.tickets import start, wait
from megapar.core.traffic import Traffic


def to_heads(q: Tensor, k: Tensor, v: Tensor, cp: Axis, traffic: Traffic) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's positions of all heads to all positions of its heads."""
    copies = cp.size // math.gcd(cp.size, k.shape[2])
    k, v = (x.repeat_interleave(copies, dim=2) for x in (k, v))
    dealt = [x.unflatten(2, (cp.size, -1)) for x in (q, k, v)]
    message = torch.cat(dealt, dim=3).permute(2, 1, 0, 3, 4).flatten(0, 1)  # [cp * S/cp, B, heads, D]
    received = wait(*start(AllToAll(cp), message, traffic)).transpose(0, 1)
    q, k, v = received.split([x.shape[3] for x in dealt], dim=2)
    return q, k, v


def to_positions(y: Tensor, cp: Axis, traffic: Traffic) -> Tensor:
    """All positions of this rank's heads to its positions of all heads."""
    # A copy in any case: what attention keeps for its backward does not travel.
    message = y.transpose(0, 1).clone(memory_format=torch.contiguous_format)
    received = wait(*start(AllToAll(cp), message, traffic))
    mine: Tensor = received.unflatten(0, (cp.size, -1)).permute(2, 1, 0, 3, 4).flatten(2, 3)
    return mine
