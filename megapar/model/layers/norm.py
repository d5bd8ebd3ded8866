"""Normalization over the last dim. Statistics are computed in max(fp32, dtype)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megapar.core.device.apex import layer_norm_apex, rms_norm_apex
from megapar.core.device.compiled import FunctionRunner, counted, plain
from megapar.core.device.dtypes import at_least_fp32
from megapar.core.device.layer_ops import DroppedSumNorm
from megapar.core.device.ops import op
from megapar.core.tensor_parallel.fp8 import Fp8Casts, cast_norm, leaves_casts
from megapar.core.tensor_parallel.layers import local, parameter


class Norm(nn.Module):
    """Base class of the norms of x [.., H], with a weight [H] that is whole on all ranks.

    The weight of a norm over all heads is [N/mp, D]; ``GroupedQueryAttention`` applies it.

    Attributes:
        one_plus: Multiply by 1 + weight, in max(fp32, dtype).
        casts: Set by the layer if products in fp8 read the norm; ``RmsNorm`` leaves them its cast.
    """

    casts: Fp8Casts | None = None

    def __init__(
        self,
        size: int | tuple[int, int],
        epsilon: float,
        *,
        dtype: torch.dtype,
        device: torch.device | str | None,
        run: FunctionRunner = plain,
        one_plus: bool = False,
    ) -> None:
        super().__init__()
        self.epsilon, self.run, self.one_plus = epsilon, run, one_plus
        self.weight = parameter((size,) if isinstance(size, int) else size, dtype, device)

    def scale(self) -> Tensor:
        """Return what normalized features are multiplied by, in the shape of the weight."""
        weight = local(self.weight)
        return 1 + weight.to(at_least_fp32(weight.dtype)) if self.one_plus else weight

    def after(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return (x + y, norm(x + y)), as one function if functions are compiled."""
        if self.run is plain:
            total = x + y
            return total, self(total)
        return self(x, y)


class RmsNorm(Norm):
    """RMS norm: x / sqrt(mean(x^2) + epsilon) * weight."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Normalize x [.., H]; with y see ``after``, which calls the module, so that FSDP unshards the weight."""
        if y is not None:
            return self.run(add_rms_norm, x, y, self.scale(), self.epsilon)
        if self.run is plain and not self.one_plus and leaves_casts(self.casts, x):
            return cast_norm(x, self.scale(), self.epsilon, self.casts)
        return self.run(rms_norm, x, self.scale(), self.epsilon)


class LayerNorm(Norm):
    """Layer norm: (x - mean) / sqrt(variance + epsilon) * weight + bias; the bias [H] is whole on all ranks."""

    def __init__(
        self,
        size: int,
        epsilon: float,
        *,
        dtype: torch.dtype,
        device: torch.device | str | None,
        run: FunctionRunner = plain,
        one_plus: bool = False,
    ) -> None:
        super().__init__(size, epsilon, dtype=dtype, device=device, run=run, one_plus=one_plus)
        self.bias = parameter((size,), dtype, device)

    def forward(
        self, x: Tensor, y: Tensor | None = None, left: Tensor | None = None, dropped: float = 0.0
    ) -> Tensor | tuple[Tensor, Tensor]:
        """See ``RmsNorm.forward``. torch's kernel computes statistics of 16-bit inputs in fp32.

        left: The bias in y, whose layer leaves its gradient: return norm(x + dropout(y)), dropping a share ``dropped``.
        """
        if left is not None:
            return DroppedSumNorm.apply(x, y, self.scale(), local(self.bias), left, self.epsilon, dropped)
        if y is not None:
            return self.run(add_layer_norm, x, y, self.scale(), local(self.bias), self.epsilon)
        return self.run(layer_norm, x, self.scale(), local(self.bias), self.epsilon)


@counted(2)
def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Normalize x as ``RmsNorm`` does, in the dtype of the weight, and round the result to that of x."""
    if x.dtype == weight.dtype:
        return op("rms_norm", x)(x, weight, epsilon)
    return op("rms_norm", x)(x.to(weight.dtype), weight, epsilon).to(x.dtype)


@counted(2, 2)
def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return (x + y, norm(x + y))."""
    total = x + y
    return total, rms_norm(total, weight, epsilon)


@counted(2)
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """Normalize x as ``LayerNorm`` does, in the dtype of the weight, and round the result to that of x."""
    return F.layer_norm(x.to(weight.dtype), (x.shape[-1],), weight, bias.to(weight.dtype), epsilon).to(x.dtype)


@counted(2, 2)
def add_layer_norm(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return (x + y, norm(x + y))."""
    total = x + y
    return total, layer_norm(total, weight, bias, epsilon)


@counted(2, 2)
def _add_rms_norm_apex(x: Tensor, y: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    total = x + y
    return total, rms_norm_apex(total, weight, epsilon)


@counted(2, 2)
def _add_layer_norm_apex(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    total = x + y
    return total, layer_norm_apex(total, weight, bias, epsilon)


class ApexNorms:
    """A ``FunctionRunner`` that computes norms by NVIDIA apex's kernels; ``run`` calls all functions."""

    _forms: ClassVar[dict[Callable[..., Any], Callable[..., Any]]] = {
        rms_norm: rms_norm_apex,
        add_rms_norm: _add_rms_norm_apex,
        layer_norm: layer_norm_apex,
        add_layer_norm: _add_layer_norm_apex,
    }

    def __init__(self, run: FunctionRunner) -> None:
        self._run = run

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the function, or its form."""
        return self._run(self._forms.get(function, function), *arguments)


def make_norm(
    kind: str,
    size: int,
    epsilon: float,
    *,
    dtype: torch.dtype,
    device: torch.device | str | None,
    run: FunctionRunner = plain,
    one_plus: bool = False,
) -> Norm:
    """Build the norm named ``kind``: ``rmsnorm`` or ``layernorm``."""
    norm = RmsNorm if kind == "rmsnorm" else LayerNorm
    return norm(size, epsilon, dtype=dtype, device=device, run=run, one_plus=one_plus)
