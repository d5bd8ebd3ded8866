"""Stochastic rounding to bf16, with random numbers that do not depend on the layout.

A value between two neighbours in bf16 becomes the upper one with the probability of its distance to the lower one, so
that a sum of many small changes is right in the mean, where rounding to nearest would lose every one of them.

The random number of an element is a function of the run's seed, the Hugging Face tensor, the element's index in it, the
number of the update and the rounded state, and of nothing else: ranks that hold the tensor in other pieces round alike.
It is the index-th output of SplitMix64 from a start that seed, tensor and update determine; each state takes other 16
of its 64 bits.

Sources: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators" (SplitMix64); Salmon et al. 2011,
"Parallel random numbers: as easy as 1, 2, 3" (random numbers as a function of a counter); Gupta et al. 2015, "Deep
learning with limited numerical precision" (stochastic rounding).
"""

from __future__ import annotations

import torch
from torch import Tensor

BITS = 16  # of a random number: those of fp32 that bf16 lacks
# As signed integers of 64 bits, which torch and Triton multiply modulo 2**64.
GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
FACTORS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


def random_bits(key: int, update: Tensor, index: Tensor) -> Tensor:
    """Return 64 random bits for each element of a tensor.

    Args:
        key: Of the tensor and the seed, up to 63 bits.
        update: The number of the update, a scalar int64 tensor.
        index: Indices of the elements, int64.
    """
    return _mixed(index * GAMMA + _mixed(update * GAMMA + key))


def _mixed(x: Tensor) -> Tensor:
    """Return a permutation of 64-bit integers in which each bit of the result depends on all of ``x``."""
    x = _shifted(x, 30).mul_(FACTORS[0])
    x = _shifted(x, 27).mul_(FACTORS[1])
    return _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Return x ^ (x >> bits), shifted as an unsigned integer."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1).bitwise_xor_(x)


def rounded(x: Tensor, random: Tensor, state: int) -> Tensor:
    """Return ``x`` in bf16, rounded to one of its neighbours. What bf16 has, infinities and NaN stay.

    Args:
        x: In fp32; fp64 is first rounded to fp32, to nearest.
        random: ``random_bits`` of its elements.
        state: Number of the rounded state, 0 to 3.
    """
    x = x.to(torch.float32)
    added = (random >> state * BITS).bitwise_and_((1 << BITS) - 1).to(torch.int32)
    words = added.add_(x.view(torch.int32)).bitwise_and_(-1 << BITS)
    return torch.where(x.isnan(), x, words.view(torch.float32)).to(torch.bfloat16)
