"""Matrix products of linear layers in fp8: the forward and the input gradient. Weight gradients stay in the dtype.

A weight is cast, as it is and transposed, when a product first needs it after an update, and both casts are kept until
the next update. Under FSDP they live as long as the gathered weight, for one product. Nothing is kept in checkpoints.
``core.device.fp8`` has the casts and their numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from megapar.core.device.fp8 import ScaledWeight
from megapar.core.device.ops import op

Factor = Tensor | ScaledWeight
"""The right operand [K, N] of a product: a matrix of the dtype, or one in fp8."""


class Fp8Casts:
    """The casts of the weights of a model's linear layers.

    Attributes:
        kept: Casts are kept until ``forget``; otherwise each product casts its weight.
        updates: Number of calls of ``forget``.
    """

    def __init__(self, *, kept: bool = False) -> None:
        self.kept, self.updates = kept, 0

    def forget(self) -> None:
        """Cast every weight again before its next product, because weights have changed."""
        self.updates += 1


class Fp8Weight:
    """The casts of the weight of one layer.

    Args:
        cast: The operator that casts it: ``fp8_weight``, or ``fp8_experts`` for stacked weights.
    """

    def __init__(self, casts: Fp8Casts, cast: str = "fp8_weight") -> None:
        self._casts, self._cast_by, self._updates = casts, cast, -1
        self._pair: tuple[ScaledWeight, ScaledWeight] | None = None

    def forward(self, weight: Tensor) -> ScaledWeight:
        """Return the right operand of x [.., I] @ weight [O, I]^T."""
        return self._cast(weight)[0]

    def backward(self, weight: Tensor) -> ScaledWeight:
        """Return the right operand of dy [.., O] @ weight [O, I]."""
        return self._cast(weight)[1]

    def _cast(self, weight: Tensor) -> tuple[ScaledWeight, ScaledWeight]:
        if self._pair is None or self._updates != self._casts.updates:
            self._pair = None  # its memory is free for the new one
            cast: Callable[[Tensor], tuple[ScaledWeight, ScaledWeight]] = op(self._cast_by, weight)  # type: ignore[assignment]
            pair = cast(weight.detach())
            if not self._casts.kept:
                return pair
            self._pair, self._updates = pair, self._casts.updates
        return self._pair


def fp8_weight(casts: Fp8Casts | None, cast: str = "fp8_weight") -> Fp8Weight | None:
    """Return the casts of one more layer's weight, for the arguments of ``Fp8Weight``; None for layers without fp8."""
    return None if casts is None else Fp8Weight(casts, cast)


def forward_factor(weight: Tensor, fp8: Fp8Weight | None) -> Factor:
    """Return the right operand [I, O] of x @ weight [O, I]^T."""
    return weight.t() if fp8 is None else fp8.forward(weight)


def backward_factor(weight: Tensor, fp8: Fp8Weight | None) -> Factor:
    """Return the right operand [O, I] of dy @ weight [O, I]."""
    return weight if fp8 is None else fp8.backward(weight)


def product(x: Tensor, right: Factor, bias: Tensor | None = None) -> Tensor:
    """Return x [.., K] @ right [K, N] (+ bias [N]); no gradient."""
    if isinstance(right, Tensor):
        return x @ right if bias is None else F.linear(x, right.t(), bias)
    y: Tensor = op("fp8_product", x)(x.flatten(0, -2), right)
    return (y if bias is None else y.add_(bias)).view(*x.shape[:-1], right.values.shape[0])
