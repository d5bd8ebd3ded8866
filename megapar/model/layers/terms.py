"""What a model's forward returns: sums to be divided by denominators of the global batch, and routing statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megapar.moe.stats import MoeStats

ROUTING = ("aux", "z", "sequence", "orthogonal")


class Terms(NamedTuple):
    """The loss terms of one micro-batch on this rank; nothing here is averaged or weighted yet.

    sums: scalar sums over own items in max(fp32, dtype): "lm" (predicted tokens), for ERNIE also "sop" (sequences);
    with multi-token prediction "mtp" (its own predicted tokens).
    aux, z, sequence, orthogonal: scalars, summed over the mixture-of-experts layers, without coefficients; zero where
    there are none. sequence: also summed over the samples.
    load: [mixture-of-experts layers, experts] int64, routed (token, choice) pairs before drops; [0, 0] where none.
    dropped: int64 scalar, (token, choice) pairs dropped.
    """

    sums: dict[str, Tensor]
    aux: Tensor
    z: Tensor
    sequence: Tensor
    orthogonal: Tensor
    load: Tensor
    dropped: Tensor

    def routing(self) -> Tensor:
        """[4], without gradients: the routing losses in the order of ROUTING."""
        return torch.stack([getattr(self, name).detach() for name in ROUTING])


def collect(sums: dict[str, Tensor], stats: Sequence[MoeStats], like: Tensor | None = None) -> Terms:
    """Sums the layers' statistics beside the loss sums; ``like``: for zeros where there are no sums (in a pipeline)."""
    like = sums["lm"] if like is None else like
    if not stats:
        zero = like.new_zeros(())
        count = torch.zeros((), dtype=torch.int64, device=like.device)
        return Terms(sums, zero, zero.clone(), zero.clone(), zero.clone(), count.new_zeros((0, 0)), count)
    return Terms(
        sums,
        aux=torch.stack([s.aux for s in stats]).sum(),
        z=torch.stack([s.z for s in stats]).sum(),
        sequence=torch.stack([s.sequence for s in stats]).sum(),
        orthogonal=torch.stack([s.orthogonal for s in stats]).sum(),
        load=torch.stack([s.load for s in stats]),
        dropped=torch.stack([s.dropped for s in stats]).sum(),
    )
