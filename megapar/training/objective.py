"""What is differentiated: every term over its own denominator in the global batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from megapar.model.terms import Terms


@dataclass(frozen=True)
class Objective:
    """Weights of the terms: ``loss`` = sum of weight * sum / items, plus the routing losses.

    weights: term -> weight (lm, sop). aux_coefficient and z_coefficient weigh the router's losses, which are means over
    the micro-batches of the global batch.
    """

    weights: Mapping[str, float]
    aux_coefficient: float = 0.0
    z_coefficient: float = 0.0

    def of(self, terms: Terms, items: Mapping[str, int], num_micro_batches: int) -> Tensor:
        """This micro-batch's share of the loss of the whole global batch.

        items: denominators over the global batch. num_micro_batches: of the global batch, on all data ranks together.
        """
        loss = sum(self.weights[name] * total / max(1, items[name]) for name, total in terms.sums.items())
        loss = loss + (self.aux_coefficient * terms.aux + self.z_coefficient * terms.z) / num_micro_batches
        assert isinstance(loss, Tensor)
        return loss
