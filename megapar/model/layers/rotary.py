"""Rotary position embedding (rope) on interleaved pairs, as in Hugging Face's Ernie4_5."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megapar.core.device.dtypes import at_least_fp32
from megapar.core.device.ops import op
from megapar.model.rope_scaling import LINEAR, LLAMA3, RopeScaling


class RotaryEmbedding:
    """The angles of positions: position * theta^(-2i / Dr), or of scaled frequencies.

    The frequencies are computed at the first use and kept as a plain attribute: no buffer has to be stored or loaded.

    Args:
        rotary_dim: Leading features of a head that are rotated (Dr).
        scaling: Scaling of the frequencies; None for theta^(-2i / Dr).
        head_dim: Features that the angles cover (D >= Dr); those after Dr have angle 0. None for Dr.
    """

    def __init__(
        self,
        rotary_dim: int,
        theta: float,
        dtype: torch.dtype,
        scaling: RopeScaling | None = None,
        head_dim: int | None = None,
    ) -> None:
        self._rotary_dim, self._theta, self._dtype = rotary_dim, theta, at_least_fp32(dtype)
        self._scaling, self._still = scaling, ((head_dim or rotary_dim) - rotary_dim) // 2
        self._frequencies: Tensor | None = None
        self._factor: float | Tensor = 1.0 if scaling is None else scaling.rotated_factor

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return (cos, sin) [B, S, D / 2] in max(fp32, dtype) for positions [B, S], times yarn's factor if rotated."""
        if self._frequencies is None or self._frequencies.device != positions.device:
            self._frequencies = self._make_frequencies(positions.device)
        angles = positions.unsqueeze(-1) * self._frequencies
        if isinstance(self._factor, float) and self._factor == 1:
            return angles.cos(), angles.sin()
        return angles.cos() * self._factor, angles.sin() * self._factor

    def _make_frequencies(self, device: torch.device) -> Tensor:
        """Return the frequencies [D / 2], and let features without rotation keep the factor 1."""
        exponents = torch.arange(0, self._rotary_dim, 2, device=device).to(self._dtype) / self._rotary_dim
        frequencies = scaled_frequencies(self._theta**exponents, self._theta, self._scaling)
        if not self._still:
            return frequencies
        if self._scaling is not None and self._scaling.rotated_factor != 1:
            factors = torch.full_like(frequencies, self._scaling.rotated_factor)
            self._factor = torch.cat((factors, factors.new_ones(self._still)))
        return torch.cat((frequencies, frequencies.new_zeros(self._still)))


def scaled_frequencies(wavelengths: Tensor, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Return the frequencies [Dr / 2] of pairs of features in the order of operations of transformers.

    wavelengths: positions in one radian without scaling, theta^(2i / Dr), [Dr / 2]. ``RopeScaling`` has the sources.
    """
    frequencies = 1.0 / wavelengths
    if scaling is None:
        return frequencies
    if scaling.rope_type == LINEAR:
        return frequencies / scaling.factor
    if scaling.rope_type == LLAMA3:
        return _llama3(frequencies, scaling)
    low, high = scaling.kept_and_divided(2 * len(wavelengths), theta)
    number = torch.arange(len(wavelengths), device=wavelengths.device).to(wavelengths.dtype)
    kept = 1 - torch.clamp((number - low) / ((high + 0.001 if low == high else high) - low), 0, 1)
    return 1.0 / (scaling.factor * wavelengths) * (1 - kept) + frequencies * kept


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    low, high, length = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_position_embeddings
    turn = 2 * math.pi / frequencies  # positions of a whole turn
    found = torch.where(turn > length / low, frequencies / scaling.factor, frequencies)
    kept = (length / turn - low) / (high - low)
    between = ~(turn < length / high) * ~(turn > length / low)
    return torch.where(between, (1 - kept) * found / scaling.factor + kept * found, found)


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate each pair (x[2i], x[2i + 1]) of x [B, S, N, D] by its position's angle. The result has x's dtype."""
    return op("rotary", x)(x, *angles)
