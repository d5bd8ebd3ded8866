"""What one MoE layer reports about its routing beside its output."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class MoeStats(NamedTuple):
    """Statistics of one layer over one micro-batch. Padding is in none of them.

    aux: scalar, load-balance loss without its coefficient, differentiable.
    z: scalar, mean squared log-sum-exp of the router logits without its coefficient, differentiable.
    load: [E] int64, (token, choice) pairs routed to each expert, before drops.
    dropped: int64 scalar, (token, choice) pairs that no expert had room for.
    """

    aux: Tensor
    z: Tensor
    load: Tensor
    dropped: Tensor
