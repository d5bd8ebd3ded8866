"""What ``--moe-capacity-scope rank`` and ``--ampipe-capacity slice`` mean, on one process and token by token.

There every rank counts the capacity of its own positions, or every slice of its own, so that one process, whose part is
the whole, gives other numbers. Here one process walks the queues of each part's positions apart, in plain loops.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from megapar.moe.layer import MoeParts
from megapar.moe.micro_batch import MicroBatchRouting
from megapar.moe.router import Routing
from megapar.moe.sizes import MoeSizes
from megapar.moe.stats import MoeStats
from megapar.training.building.parts import Parts as TrainerParts
from megapar.training.loop.callbacks import TrainerCallback
from tests.equivalence.run import Routing as Choices
from tests.equivalence.run import Trace, trace
from tests.moe.oracle import keep

# The positions of each rank, each slice, or each rank's part of a slice, in rising order.
Parts = tuple[tuple[int, ...], ...]


def trace_by_parts(
    rank: int,
    world_size: int,
    rendezvous: str,
    kind: str,
    flags: Sequence[str],
    steps: int,
    parts: Parts,
    replay: Choices | None = None,
    callback: TrainerCallback | None = None,
) -> Trace | None:
    """``tests.equivalence.run.trace`` of one process that drops as ranks or slices with these positions each do."""
    own = TrainerParts(moe=MoeParts(routing=_routing_by(parts)))
    return trace(rank, world_size, rendezvous, kind, flags, steps, replay, parts=own, callback=callback)


def _routing_by(parts: Parts) -> type[MicroBatchRouting]:
    class RoutingByParts(MicroBatchRouting):
        """Decides apart for each run of positions who is kept, makes room for every pair, counts drops one by one."""

        def keep(self, routing: Routing, valid: Tensor | None, batch: int, length: int) -> Tensor:
            super().keep(routing, valid, batch, length)
            probs, experts = (x.detach().unflatten(0, (batch, -1)).tolist() for x in (routing.probs, routing.experts))
            text = torch.ones(len(routing.probs), dtype=torch.bool) if valid is None else valid.flatten()
            is_text = text.unflatten(0, (batch, -1)).tolist()
            kept = torch.zeros(batch, len(experts[0]), self.sizes.topk, dtype=torch.bool)
            for positions in parts:
                places = [(b, s) for s in positions for b in range(batch)]
                pairs = keep(
                    [experts[b][s] for b, s in places],
                    [probs[b][s] for b, s in places],
                    [is_text[b][s] for b, s in places],
                    _capacity(self.sizes, sum(is_text[b][s] for b, s in places)),
                    self.sizes.drop_policy,
                )
                for number, choice in pairs:
                    sample, position = places[number]
                    kept[sample, position, choice] = True
            self.num_kept = int(kept.sum())
            return kept.flatten(0, 1)

        def room(self, positions: int, **options: Any) -> tuple[int, bool]:
            return positions * self.sizes.topk, False

        def stats(self) -> MoeStats:
            return super().stats()._replace(over=torch.tensor(self.tokens * self.sizes.topk - self.num_kept))

    return RoutingByParts


def _capacity(sizes: MoeSizes, tokens: int) -> int:
    share = Fraction(tokens, sizes.num_experts) * Fraction(str(sizes.capacity_factor)) * sizes.topk
    return max(math.ceil(share), sizes.min_capacity)
