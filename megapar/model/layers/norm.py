"""Normalization over the last dim. Statistics are computed in max(fp32, dtype)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megapar.core.device.compiled import FunctionRunner, counted, plain
from megapar.core.device.ops import op
from megapar.core.tensor_parallel.layers import local, parameter


class RmsNorm(nn.Module):
    """RMS norm: x / sqrt(mean(x^2) + epsilon) * weight; x [.., H], weight [H] whole on all ranks.

    The weight of a norm over all heads is [N/mp, D]; ``GroupedQueryAttention`` applies it.
    """

    def __init__(
        self,
        size: int | tuple[int, int],
        epsilon: float,
        *,
        dtype: torch.dtype,
        device: torch.device | str | None,
        run: FunctionRunner = plain,
    ) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = parameter((size,) if isinstance(size, int) else size, dtype, device)
        self.run = run

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Normalize x [.., H]; with y see ``after``, which calls the module, so that FSDP unshards the weight."""
        if y is not None:
            return self.run(add_rms_norm, x, y, local(self.weight), self.epsilon)
        return self.run(rms_norm, x, local(self.weight), self.epsilon)

    def after(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return (x + y, norm(x + y)), as one function if functions are compiled."""
        return after(self, x, y)


class LayerNorm(nn.Module):
    """Layer norm: (x - mean) / sqrt(variance + epsilon) * weight + bias; weight and bias [H] whole on all ranks."""

    def __init__(
        self,
        size: int,
        epsilon: float,
        *,
        dtype: torch.dtype,
        device: torch.device | str | None,
        run: FunctionRunner = plain,
    ) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = parameter((size,), dtype, device)
        self.bias = parameter((size,), dtype, device)
        self.run = run

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Normalize x [.., H]; with y see ``after``. torch's kernel computes statistics of 16-bit inputs in fp32."""
        if y is not None:
            return self.run(add_layer_norm, x, y, local(self.weight), local(self.bias), self.epsilon)
        return self.run(layer_norm, x, local(self.weight), local(self.bias), self.epsilon)

    def after(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return (x + y, norm(x + y)), as one function if functions are compiled."""
        return after(self, x, y)


def after(norm: RmsNorm | LayerNorm, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return (x + y, norm(x + y)), as one function if functions are compiled, by a call of the module in each case."""
    if norm.run is plain:
        total = x + y
        return total, norm(total)
    both: tuple[Tensor, Tensor] = norm(x, y)
    return both


@counted(2)
def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Normalize x as ``RmsNorm`` does."""
    return op("rms_norm", x)(x, weight, epsilon)


@counted(2, 2)
def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return (x + y, norm(x + y))."""
    total = x + y
    return total, rms_norm(total, weight, epsilon)


@counted(2)
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """Normalize x as ``LayerNorm`` does."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, epsilon)


@counted(2, 2)
def add_layer_norm(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return (x + y, norm(x + y))."""
    total = x + y
    return total, layer_norm(total, weight, bias, epsilon)


def make_norm(
    kind: str,
    size: int,
    epsilon: float,
    *,
    dtype: torch.dtype,
    device: torch.device | str | None,
    run: FunctionRunner = plain,
) -> RmsNorm | LayerNorm:
    """Build the norm named ``kind``: ``rmsnorm`` or ``layernorm``."""
    return (RmsNorm if kind == "rmsnorm" else LayerNorm)(size, epsilon, dtype=dtype, device=device, run=run)
