"""The residual stream: a layer adds the output of attention or MLP, with dropout and a factor.

Shape letters: B batch, S sequence, H hidden; S is split over mp under sequence parallelism, written S(/mp).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from megapar.model.layers.context import Context


class HiddenDropout(nn.Module):
    """Dropout on the output of attention or MLP, and the factor with which the output enters the residual sum.

    Attributes:
        rank: Number of this rank among those that hold other positions.
        share: Factor on the probability, for dropout that grows during training.
    """

    def __init__(self, probability: float, layer: int, rank: int, factor: float = 1.0) -> None:
        super().__init__()
        self.probability, self.layer, self.rank, self.factor = probability, layer, rank, factor
        self.share = 1.0

    def forward(self, x: Tensor, context: Context, half: str, number: int = 0) -> Tensor:
        """Multiply x [B, S(/mp), H] by the factor and drop elements.

        Args:
            half: ``attention`` or ``mlp``, whose output x is.
            number: Number of the slice, if x is one of several.
        """
        if self.factor != 1.0:
            x = x * self.factor
        if not self.training or not self.probability:
            return x
        place = context.place(f"layers.{self.layer}.{half}", number)
        return context.streams.dropout(x, self.probability * self.share, place, self.rank)


class PendingSum(NamedTuple):
    """Residual and output of a layer, [B, S(/mp), H] each, whose sum the next layer's first norm makes.

    A compiler makes one kernel of a sum and a norm, in each direction.
    """

    residual: Tensor
    output: Tensor
