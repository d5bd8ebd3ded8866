"""Master weights in fp32 as bf16 weights and remainders: the 16 bits that a weight lacks, in an int16.

    master        s eeeeeeee mmmmmmm | rrrrrrrrrrrrrrrr
    weight        the upper half, plus one if the lower one is at least 0x8000
    remainder     the lower half, as a signed integer: what the master's bits are above or below those of the weight

So a weight is its master rounded to nearest, ties away from zero (up in magnitude), where torch's cast takes ties to
even. Sums of bits lose nothing: infinities, zeros with their signs and subnormals come back as they were, and so does a
master above the largest weight, whose weight is infinite. A NaN comes back as the usual one, which no sum can turn into
a number.
"""

from __future__ import annotations

import torch
from torch import Tensor

HALF = 1 << 15
NAN = 0x7FC00000


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights in bf16, and the remainders in int16, of master weights in fp32."""
    bits = torch.where(master.isnan(), NAN, master.view(torch.int32))
    # int32 holds the sum: only a NaN, which is replaced, lies within HALF of the largest integer.
    weights = ((bits + HALF) >> 16).to(torch.int16).view(torch.bfloat16)
    return weights, ((bits + HALF & 0xFFFF) - HALF).to(torch.int16)


def join_master(weights: Tensor, remainders: Tensor) -> Tensor:
    """Return the master weights in fp32 that ``split_master`` split."""
    return ((weights.view(torch.int16).to(torch.int32) << 16) + remainders).view(torch.float32)
