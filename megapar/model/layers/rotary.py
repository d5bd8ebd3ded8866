"""Rotary position embedding (rope) on interleaved pairs, as in Hugging Face's Ernie4_5.

Tested in ``tests/model/layers/test_self_attention.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megapar.core.device.dtypes import at_least_fp32
from megapar.core.device.ops import op


def rotary_angles(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (cos, sin) of position * theta^(-2i / D), each [B, S, D / 2] in max(fp32, dtype), for positions [B, S].

    They are computed in each forward, so that no buffer has to be stored or updated.
    """
    exponents = torch.arange(0, head_dim, 2, device=positions.device).to(at_least_fp32(dtype)) / head_dim
    angles = positions.unsqueeze(-1).to(exponents.dtype) * (1.0 / theta**exponents)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate each pair (x[2i], x[2i + 1]) of x [B, S, N, D] by its position's angle. The result has x's dtype."""
    return op("rotary", x)(x, *angles)
