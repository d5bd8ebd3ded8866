"""Sums that do not depend on the order of their terms, for terms that change their places between ranks.

A term is cut into whole multiples of 2^96, 2^64, .., 2^-256. Each of these parts is below 2^32 times its unit, so sums
of up to 2^21 of them are exact in fp64, in any order and over any ranks; only the last sum, over the units, rounds.

Source: a small superaccumulator, as in Kulisch's exact dot product; Demmel and Nguyen 2013, "Fast reproducible
floating-point summation".
"""

from __future__ import annotations

import torch
from torch import Tensor

UNITS = tuple(2.0**exponent for exponent in range(96, -257, -32))


def parts(terms_N: Tensor) -> Tensor:
    """Return the sums of the terms' parts, one for each of ``UNITS``: [U] fp64. They may be added to other ones.

    What is below the last unit is left out. A term that is not finite makes the sum NaN.

    terms_N: fp64, not negative, below 2^128.
    """
    whole = list(torch._foreach_mul([terms_N] * len(UNITS), [1 / unit for unit in UNITS]))
    torch._foreach_floor_(whole)  # multiples of each unit, larger units included; powers of two do not round
    cut = torch._foreach_add(whole[1:], whole[:-1], alpha=-UNITS[0] / UNITS[1])
    return torch.stack([whole[0], *cut]).sum(1)


def total(parts_U: Tensor) -> Tensor:
    """Return the sum of the terms from that of their parts, a scalar; small units first."""
    terms = torch._foreach_mul(parts_U.unbind()[::-1], UNITS[::-1])
    return torch.stack(list(terms)).cumsum(0)[-1]
