"""Rotary position embedding (rope) on interleaved pairs, as in Hugging Face's Ernie4_5.

Tested in ``tests/model/layers/test_self_attention.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megapar.core.device.dtypes import at_least_fp32
from megapar.core.device.ops import op


class RotaryEmbedding:
    """The angles of positions: position * theta^(-2i / D).

    The frequencies are computed at the first use and kept as a plain attribute: no buffer has to be stored or loaded.
    """

    def __init__(self, head_dim: int, theta: float, dtype: torch.dtype) -> None:
        self._head_dim, self._theta, self._dtype = head_dim, theta, at_least_fp32(dtype)
        self._frequencies: Tensor | None = None

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return (cos, sin) of the angles, each [B, S, D / 2] in max(fp32, dtype), for positions [B, S]."""
        if self._frequencies is None or self._frequencies.device != positions.device:
            exponents = torch.arange(0, self._head_dim, 2, device=positions.device).to(self._dtype) / self._head_dim
            self._frequencies = 1.0 / self._theta**exponents
        angles = positions.unsqueeze(-1) * self._frequencies
        return angles.cos(), angles.sin()


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate each pair (x[2i], x[2i + 1]) of x [B, S, N, D] by its position's angle. The result has x's dtype."""
    return op("rotary", x)(x, *angles)
