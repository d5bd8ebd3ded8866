"""The training objective: every loss term divided by its own denominator in the global batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from megapar.arguments import Config
from megapar.model.layers.loss import ROUTING, Terms
from megapar.model.spec import spec_of

T = TypeVar("T", float, Tensor)


@dataclass(frozen=True)
class Objective:
    """Weights of the terms: ``loss`` = sum of weight * sum / items, plus the routing losses.

    Attributes:
        weights: Term -> weight (lm, sop, mtp).
        aux_coefficient: Weight of the router's load balancing loss, a mean over the micro-batches of the global batch.
        z_coefficient: Weight of the router's z-loss, a mean over the same micro-batches.
        sequence_coefficient: Weight of the load balancing loss per sample, a mean over the global batch's samples.
        orthogonal_coefficient: Weight of the orthogonality loss of the router's weight, which counts once per step.
    """

    weights: Mapping[str, float]
    aux_coefficient: float = 0.0
    z_coefficient: float = 0.0
    sequence_coefficient: float = 0.0
    orthogonal_coefficient: float = 0.0

    def of(self, terms: Terms, items: Mapping[str, float], num_micro_batches: int) -> Tensor:
        """Return a micro-batch's share of the loss of the global batch.

        Args:
            items: Denominators over the global batch, including that of "sequences".
            num_micro_batches: Micro-batches of the global batch, on all data ranks together.
        """
        parts = [_weighted(total, self.weights[name]) / (items[name] or 1) for name, total in terms.sums.items()]
        loss = parts[0] if parts else terms.aux.new_zeros(())
        for part in parts[1:]:
            loss = loss + part
        if not len(terms.load):  # no layers with experts
            return loss
        coefficients = [self._coefficients[name] for name in ROUTING]
        for name, share in self.routing_means(coefficients, items, num_micro_batches).items():
            if share:  # a product with 0 would still be differentiated
                loss = loss.add(getattr(terms, name), alpha=share)
        return loss

    def weighted(self, means: Mapping[str, float], routing: Mapping[str, float]) -> float:
        """Return the loss from the unweighted means of the terms and of the routing losses."""
        loss = sum(self.weights[name] * mean for name, mean in means.items())
        return loss + sum(self._coefficients[name] * mean for name, mean in routing.items())

    def routing_means(self, routing: Sequence[T], items: Mapping[str, float], num_micro_batches: int) -> dict[str, T]:
        """Divide the sums of the routing losses, in the order of ROUTING, by their denominators."""
        per_sample = {"sequence": items.get("sequences", 1)}
        return {
            name: value / per_sample.get(name, num_micro_batches) for name, value in zip(ROUTING, routing, strict=True)
        }

    @property
    def _coefficients(self) -> dict[str, float]:
        return {
            "aux": self.aux_coefficient,
            "z": self.z_coefficient,
            "sequence": self.sequence_coefficient,
            "orthogonal": self.orthogonal_coefficient,
        }


def make_objective(config: Config) -> Objective:
    """Return the training objective: the weights of the loss terms."""
    weights = config.model.loss_weights(config.values())
    if not spec_of(config.model).has_experts:
        return Objective(weights)
    moe = config.moe
    return Objective(
        weights, moe.moe_aux_loss_coeff, moe.moe_z_loss_coeff, moe.moe_seq_aux_loss_coeff, moe.moe_orthogonal_loss_coeff
    )


def _weighted(total: Tensor, weight: float) -> Tensor:
    return total if weight == 1.0 else weight * total
