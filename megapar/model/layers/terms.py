"""Result of a model's forward: loss sums, to be divided by the global batch's counts, and routing statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megapar.moe.stats import MoeStats

ROUTING = ("aux", "z", "sequence", "orthogonal")


class Terms(NamedTuple):
    """Loss terms of one micro-batch on this rank, neither averaged nor weighted.

    Routing losses are scalars without coefficients, summed over the mixture-of-experts layers; 0 without such layers.

    Attributes:
        sums: Scalar sums over this rank's items in max(fp32, dtype): "lm" (predicted tokens); for ERNIE also "sop"
            (sequences); with multi-token prediction also "mtp" (the tokens that it predicts).
        aux: Load balancing loss of the micro-batch.
        z: Router z-loss.
        sequence: Load balancing loss of each sequence, also summed over the samples.
        orthogonal: Orthogonal loss of the routers.
        load: [mixture-of-experts layers, experts] int64, (token, choice) pairs routed before drops; [0, 0] without
            such layers.
        dropped: int64 scalar, dropped (token, choice) pairs.
    """

    sums: dict[str, Tensor]
    aux: Tensor
    z: Tensor
    sequence: Tensor
    orthogonal: Tensor
    load: Tensor
    dropped: Tensor

    def routing(self) -> Tensor:
        """Return the routing losses in the order of ROUTING, [4], without gradients."""
        return torch.stack([getattr(self, name).detach() for name in ROUTING])


def collect(sums: dict[str, Tensor], stats: Sequence[MoeStats], like: Tensor | None = None) -> Terms:
    """Combine the loss sums with the layers' statistics, summed.

    Args:
        sums: The loss sums; may be empty on a pipeline stage without a head.
        stats: Statistics of the mixture-of-experts layers.
        like: Tensor with the dtype and device of the zeros; None for ``sums["lm"]``.
    """
    like = sums["lm"] if like is None else like
    if not stats:
        aux, z, sequence, orthogonal = like.new_zeros(4).unbind()
        dropped = torch.zeros((), dtype=torch.int64, device=like.device)
        load = dropped.new_empty((0, 0))
        return Terms(sums, aux=aux, z=z, sequence=sequence, orthogonal=orthogonal, load=load, dropped=dropped)
    zero = like.new_zeros(())
    load = torch.stack([s.load for s in stats])
    counted = load if all(s.counted is s.load for s in stats) else torch.stack([s.counted for s in stats])
    scale, tokens = stats[0].aux_scale, stats[0].tokens  # of the micro-batch and of all layers
    over = [s.over for s in stats if s.over is not None]
    return Terms(
        sums,
        aux=(torch.stack([s.probs for s in stats]) * counted).sum() * scale,
        z=torch.stack([s.squares for s in stats]).sum() / tokens,
        sequence=_sum([s.sequence for s in stats], zero),
        orthogonal=_sum([s.orthogonal for s in stats], zero),
        load=load,
        dropped=torch.stack(over).sum() if over else load.new_zeros(()),
    )


def _sum(losses: Sequence[Tensor | None], zero: Tensor) -> Tensor:
    """Return the sum of the layers' losses; ``zero`` if they are not used."""
    used = [loss for loss in losses if loss is not None]
    return torch.stack(used).sum() if used else zero
