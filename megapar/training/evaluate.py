"""Evaluation on held-out samples: the same samples in the same order, and the same number, on every layout."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megapar.core.agreement import reduce_numbers
from megapar.core.axis import Axis
from megapar.data.batches import Collate
from megapar.data.samples import Samples
from megapar.model.layers.terms import Terms
from megapar.training.objective import Objective


@torch.no_grad()
def evaluate(
    model: nn.Module,
    samples: Samples,
    collate: Collate,
    objective: Objective,
    *,
    num_samples: int,
    micro_batch_size: int,
    data: Axis,
    device: torch.device,
    pp: Axis,
    cp: Axis,
    forward: Callable[[dict[str, Tensor], int], Terms] | None = None,
) -> dict[str, float]:
    """Mean of every term over its items, and ``loss``, their weighted sum without the routing losses.

    Micro-batch j is samples [j * micro_batch_size, ...) of the first ``num_samples`` (the last one may be smaller);
    data rank r of R runs j = r, R + r, ... Ranks that have none left repeat the first one uncounted, because the
    others may need them in a collective. forward: how a pipeline over ``pp`` runs the model; its ranks, and those of
    ``cp``, which share the samples, add up their terms.
    """
    run = model if forward is None else forward
    names = list(objective.weights)
    totals = torch.zeros(2, len(names), dtype=torch.float64)
    num_batches = -(-num_samples // micro_batch_size)
    model.eval()
    try:
        for round_start in range(0, num_batches, data.size):
            number = round_start + data.rank
            first = number * micro_batch_size if number < num_batches else 0
            batch = collate([samples[i] for i in range(first, min(first + micro_batch_size, num_samples))])
            terms = run(batch.to(device, non_blocking=True).tensors, batch.valid_tokens)
            if number < num_batches:
                totals[0] += torch.stack([terms.sums[name] for name in names]).cpu().double()
                totals[1] += torch.tensor([batch.counts[name] for name in names], dtype=torch.float64)
    finally:
        model.train()
    reduce_numbers(totals, data, "evaluation")
    for alike in (pp, cp):
        if alike.group is not None:
            totals[1] *= alike.rank == 0  # all of them have read the same
            reduce_numbers(totals, alike, "evaluation")
    sums, items = totals.tolist()
    means = {name: total / max(1.0, count) for name, total, count in zip(names, sums, items, strict=True)}
    means["loss"] = sum(objective.weights[name] * means[name] for name in names)
    return means
