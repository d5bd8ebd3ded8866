"""QK-clip: after an update, heads of attention with large scores get smaller queries and keys.

    forwards of a step   -> the largest statistic of each head's rows, over micro-batches
    reduction            -> over the ranks that share the heads: all data ranks and cp
    update               -> factor = threshold / statistic of heads above the threshold, on the masters

The statistic is that of the weights before the update. Source: Kimi K2 (arXiv 2507.20534, algorithm 1), which clips by
the maximum of the scores. A head's log-sum-exp is at most the logarithm of the number of keys above it.

Shape letters: L layers with attention on this rank, N query heads of this mp rank.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from megapar.core.comm.agreement import reduce_numbers
from megapar.core.comm.world import World
from megapar.core.device.attention.row_statistic import RowStatistic
from megapar.core.sharding.sharding import Sharding
from megapar.model.attention.self_attention import SelfAttention

_SHARERS = ("shard", "replica")  # together the ranks of one mp and pp coordinate


class QkClip:
    """Collects the statistic of each head in the forwards of a step, and clips the masters after its update.

    Between ``take`` and ``begin`` nothing is collected, so that evaluations and trial steps never count.

    Args:
        threshold: The largest statistic of a head that is not clipped.
        kind: Statistic of a row, ``lse`` or ``max``.
        attentions: Attention of this rank's layers, by its name in the model.
        sharding: Has the masters of their parameters.
    """

    def __init__(
        self, threshold: float, kind: str, attentions: Mapping[str, SelfAttention], sharding: Sharding, world: World
    ) -> None:
        self._threshold, self._kind, self._attentions = threshold, kind, attentions
        self._axes = [world.axis(name) for name in _SHARERS]
        self._mp = world.axis("mp").rank
        shards = sharding.master_shards
        heads = next((a.sizes.num_heads // a.mp.size for a in attentions.values()), 0)
        self._shape, self._device = (len(attentions), heads), world.device.torch_device
        self._dtype = shards[0].master.dtype
        self._views = {view.spec.name: view for view in sharding.views([shard.master for shard in shards])}
        self._largest: Tensor | None = None

    def begin(self) -> None:
        """Collect the statistics of the forwards from here on."""
        self._largest = torch.full(self._shape, -torch.inf, dtype=self._dtype, device=self._device)
        for attention, row in zip(self._attentions.values(), self._largest, strict=True):
            attention.row_statistic = RowStatistic(row[_dealt(attention, len(row))], self._kind)

    def take(self) -> Tensor:
        """Stop collecting. Return the largest statistic of each head over all ranks that share it, [L, N]."""
        largest, self._largest = self._largest, None
        assert largest is not None, "begin() comes first"
        for attention in self._attentions.values():
            attention.row_statistic = None
        for axis in self._axes if self._attentions else ():
            reduce_numbers(largest, axis, "qk-clip", dist.ReduceOp.MAX)
        return largest

    @torch.no_grad()
    def clip(self, largest: Tensor, found_inf: Tensor | None) -> Tensor:
        """Scale the masters of heads whose statistic in ``largest`` [L, N] is above the threshold.

        Returns the largest statistic of this rank's heads and the number of heads that it scaled, [2].

        found_inf: A scalar on the device: 1 if the device skipped the update; None if the host knows that it did not.
        """
        clipped = largest > self._threshold
        if found_inf is not None:
            clipped = clipped & (found_inf == 0)
        factors = torch.where(clipped, self._threshold / largest, 1.0)
        for (name, attention), row in zip(self._attentions.items(), factors, strict=True):
            for parameter, scale in attention.clip_factors(row).items():
                self._scale(f"{name}.{parameter}", scale)
        heads = largest.flatten()
        return torch.stack([torch.cat([heads, heads.new_full((1,), -torch.inf)]).amax(), clipped.sum().to(heads.dtype)])

    def _scale(self, name: str, scale: Tensor) -> None:
        """Multiply this rank's piece of a master by ``scale``, which has the first two dims of this mp rank's part."""
        view = self._views.get(name)
        if view is None or not view.box.numel:  # no bias, or no piece on this rank
            return
        (first, second), (rows, columns) = view.box.offsets[:2], view.box.sizes[:2]
        first -= self._mp * len(scale)
        piece = scale[first : first + rows, second : second + columns]
        view.tensor.mul_(piece.reshape(*piece.shape, *(1,) * (view.tensor.dim() - 2)))


def _dealt(attention: SelfAttention, heads: int) -> slice:
    """Return this cp rank's share of the heads, where ranks have heads (Ulysses), else all."""
    cp = attention.cp
    if not cp.deals_heads:
        return slice(0, heads)
    share = heads // cp.axis.size
    return slice(cp.axis.rank * share, (cp.axis.rank + 1) * share)
