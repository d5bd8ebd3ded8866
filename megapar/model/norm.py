"""Normalisation over the last dim. Statistics are computed in max(fp32, dtype)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megapar.core.device.ops import op
from megapar.core.tensor_parallel import local, parameter


class RmsNorm(nn.Module):
    """x / sqrt(mean(x^2) + epsilon) * weight; x [.., H], weight [H] on every rank."""

    def __init__(self, size: int, epsilon: float, *, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = parameter((size,), dtype, device)

    def forward(self, x: Tensor) -> Tensor:
        """[.., H] to [.., H]."""
        return op("rms_norm", x)(x, local(self.weight), self.epsilon)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + epsilon) * weight + bias; x [.., H], weight and bias [H] on every rank."""

    def __init__(self, size: int, epsilon: float, *, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = parameter((size,), dtype, device)
        self.bias = parameter((size,), dtype, device)

    def forward(self, x: Tensor) -> Tensor:
        """[.., H] to [.., H]. torch's kernel keeps its statistics in fp32 for 16-bit inputs."""
        return F.layer_norm(x, (x.shape[-1],), local(self.weight), local(self.bias), self.epsilon)


def make_norm(
    kind: str, size: int, epsilon: float, *, dtype: torch.dtype, device: torch.device | str | None
) -> RmsNorm | LayerNorm:
    """The norm called ``kind``: rmsnorm or layernorm."""
    return (RmsNorm if kind == "rmsnorm" else LayerNorm)(size, epsilon, dtype=dtype, device=device)
