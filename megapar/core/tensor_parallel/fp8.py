"""Matrix products of linear layers in fp8: the forward and the input gradient. Weight gradients stay in the dtype.

A weight is cast, as it is and transposed, when a product first needs it after an update, and both casts are kept until
the next update. Under FSDP they live as long as the gathered weight, for one product. Nothing is kept in checkpoints.
``core.device.fp8`` has the casts and their numbers.

On one mp rank, norms and swiglu cast what they compute in the same kernel, and leave it to the product that reads it;
on several without sequence parallelism norms do, as no rank sends what they compute:

    forward     norm -> y, its cast -> qkv or gate_up           swiglu -> y, its cast -> down
    backward    swiglu's backward -> dx, its cast -> the input gradient of gate_up
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar.core.device import triton_operators
from megapar.core.device.fp8 import ScaledRows, ScaledWeight
from megapar.core.device.kinds import BLOCKWISE
from megapar.core.device.ops import op

Factor = Tensor | ScaledWeight
"""The right operand [K, N] of a product: a matrix of the dtype, or one in fp8."""


class Fp8Casts:
    """The casts of the weights of a model's linear layers, and that of the last activation that its kernel has cast.

    Attributes:
        kept: Casts are kept until ``forget``; otherwise each product casts its weight.
        recipe: ``blockwise`` or ``tensorwise`` (``--fp8-recipe``).
        updates: Number of calls of ``forget``.
    """

    def __init__(self, *, kept: bool = False, recipe: str = BLOCKWISE) -> None:
        self.kept, self.recipe, self.updates = kept, recipe, 0
        self._left: tuple[Tensor, tuple[Any, ...], ScaledRows] | None = None

    def forget(self) -> None:
        """Cast every weight again before its next product, because weights have changed."""
        self.updates += 1
        self._left = None

    def leave(self, x: Tensor, values: Tensor, scale: Tensor) -> None:
        """Keep the cast of x [.., K], and x itself, so that no other tensor takes its memory, for the next product."""
        self._left = x.detach(), _place(x), ScaledRows(values, scale)

    def take(self, x: Tensor) -> ScaledRows | None:
        """Return the cast that was left, if it is that of x [.., K], contiguous and unchanged."""
        if self._left is None or self._left[1] != _place(x):
            return None
        cast, self._left = self._left[2], None
        return cast


def _place(x: Tensor) -> tuple[Any, ...]:
    where = x.untyped_storage()._cdata, x.storage_offset(), x.numel(), x.shape[-1], x.is_contiguous()
    return *where, x.dtype, x._version


def leaves_casts(casts: Fp8Casts | None, x: Tensor) -> TypeGuard[Fp8Casts]:
    """Return True if norm and swiglu of x leave their casts: in training, where the device has such kernels."""
    blockwise = casts is not None and casts.recipe == BLOCKWISE
    return blockwise and torch.is_grad_enabled() and (not x.is_cuda or triton_operators.usable(x.device))


def cast_norm(x: Tensor, weight: Tensor, epsilon: float, casts: Fp8Casts) -> Tensor:
    """Return the RMS norm of x [.., H], and leave its cast to the next product."""
    y, values, scale = op("fp8_norm", x)(x, weight, epsilon)
    casts.leave(y, values, scale)
    return y


def cast_swiglu(gate_up: Tensor, casts: Fp8Casts, *, clamped: bool) -> Tensor:
    """Return swiglu, plain or clamped, of gate_up [.., 2, F]; leave its cast, and that of its gradient, to products."""
    y: Tensor = _CastSwiglu.apply(gate_up, casts, clamped)
    return y


class _CastSwiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, casts: Fp8Casts, clamped: bool) -> Tensor:
        ctx.casts, ctx.clamped = casts, clamped
        ctx.save_for_backward(gate_up)
        y, values, scale = op("fp8_swiglu", gate_up)(gate_up, clamped)
        casts.leave(y, values, scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (gate_up,) = ctx.saved_tensors
        gradient, values, scale = op("fp8_swiglu_backward", gate_up)(grads[0], gate_up, ctx.clamped)
        ctx.casts.leave(gradient.flatten(-2), values, scale)
        return gradient, None, None


class Fp8Weight:
    """The casts of a layer's weight by ``cast``, ``fp8_experts`` if it is stacked; None: by the recipe's operator."""

    def __init__(self, casts: Fp8Casts, cast: str | None = None) -> None:
        self.casts, self._updates = casts, -1
        self._cast_by = cast or ("fp8_weight" if casts.recipe == BLOCKWISE else "fp8_tensor_weight")
        self._pair: tuple[ScaledWeight, ScaledWeight] | None = None

    def forward(self, weight: Tensor) -> ScaledWeight:
        """Return the right operand of x [.., I] @ weight [O, I]^T."""
        return self._cast(weight)[0]

    def backward(self, weight: Tensor) -> ScaledWeight:
        """Return the right operand of dy [.., O] @ weight [O, I]."""
        return self._cast(weight)[1]

    def _cast(self, weight: Tensor) -> tuple[ScaledWeight, ScaledWeight]:
        if self._pair is None or self._updates != self.casts.updates:
            self._pair = None  # its memory is free for the new one
            cast: Callable[[Tensor], tuple[ScaledWeight, ScaledWeight]] = op(self._cast_by, weight)  # type: ignore[assignment]
            pair = cast(weight.detach())
            if not self.casts.kept:
                return pair
            self._pair, self._updates = pair, self.casts.updates
        return self._pair


def forward_factor(weight: Tensor, fp8: Fp8Weight | None) -> Factor:
    """Return the right operand [I, O] of x @ weight [O, I]^T."""
    return weight.t() if fp8 is None else fp8.forward(weight)


def backward_factor(weight: Tensor, fp8: Fp8Weight | None) -> Factor:
    """Return the right operand [O, I] of dy @ weight [O, I]."""
    return weight if fp8 is None else fp8.backward(weight)


def product(x: Tensor, right: Factor, bias: Tensor | None = None, casts: Fp8Casts | None = None) -> Tensor:
    """Return x [.., K] @ right [K, N] (+ bias [N]); no gradient. casts: Where a kernel may have left the cast of x."""
    if isinstance(right, Tensor):
        return x @ right if bias is None else F.linear(x, right.t(), bias)
    y: Tensor = op("fp8_product", x)(x.flatten(0, -2), right, None if casts is None else casts.take(x))
    return (y if bias is None else y.add_(bias)).view(*x.shape[:-1], right.values.shape[0])
