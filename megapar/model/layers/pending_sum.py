"""Activations between two layers of a stack that are not added yet.

Shape letters: B batch, S sequence, H hidden; S is split over mp under sequence parallelism, written S(/mp).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class PendingSum(NamedTuple):
    """Residual and output of a layer, whose sum is the input of the next layer, added by that layer's first norm.

    A compiler makes one kernel of a sum and a norm, in each direction.

    Attributes:
        residual: [B, S(/mp), H].
        output: [B, S(/mp), H].
    """

    residual: Tensor
    output: Tensor
