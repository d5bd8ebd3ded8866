"""Evaluation on held-out samples: the same samples in the same order, with the same result, on every layout."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import torch

from megapar.arguments import Config
from megapar.core.comm.agreement import reduce_numbers
from megapar.data.batches import Collate
from megapar.data.sampling.samples import Samples
from megapar.training.step.job import Job
from megapar.training.step.objective import Objective


@torch.no_grad()
def evaluate(config: Config, job: Job, samples: Samples, collate: Collate, objective: Objective) -> dict[str, float]:
    """Return the mean of every term over its items, and ``loss``, their weighted sum without the routing losses.

    Micro-batch j contains samples [j * micro_batch_size, ...) of the first ``eval_iters`` global batches, or of all
    held-out samples if there are fewer (the last one may be smaller). Ranks of pp and cp share the samples and add up
    their terms. ``rounds`` says which rank runs which micro-batch.
    """
    training, world, model = config.training, job.world, job.model
    run = model if job.pipeline is None else job.pipeline.evaluate
    num_samples = num_evaluated(config, samples)
    data = world.axis("data")
    names = list(objective.weights)
    totals = torch.zeros(2, len(names), dtype=torch.float64)
    model.eval()
    try:
        for numbers, counted in rounds(num_samples, training.micro_batch_size, data.rank, data.size):
            batch = collate([samples[i] for i in numbers])
            terms = run(batch.to(world.device.torch_device, non_blocking=True).tensors, batch.valid_tokens)
            if counted:
                totals[0] += torch.stack([terms.sums[name] for name in names]).cpu().double()
                totals[1] += torch.tensor([batch.counts[name] for name in names], dtype=torch.float64)
    finally:
        model.train()
    reduce_numbers(totals, data, "evaluation")
    for axis in (world.axis("pp"), world.axis("cp")):
        if axis.group is not None:
            totals[1] *= axis.rank == 0  # its ranks read the same samples, so only one counts them
            reduce_numbers(totals, axis, "evaluation")
    sums, items = totals.tolist()
    means = {name: total / (count or 1) for name, total, count in zip(names, sums, items, strict=True)}
    means["loss"] = sum(objective.weights[name] * means[name] for name in names)
    return means


def num_evaluated(config: Config, samples: Sized) -> int:
    """Return the number of held-out samples that an evaluation reads."""
    return min(len(samples), config.training.eval_iters * config.training.global_batch_size)


def rounds(num_samples: int, size: int, rank: int, ranks: int) -> Iterator[tuple[range, bool]]:
    """Yield, for each round, (the samples of data rank ``rank`` of ``ranks``, True if it counts them).

    Rank r runs the full micro-batches r, ranks + r, ... Where it has none left it repeats the first one, because the
    other ranks may need it in a collective. A smaller last micro-batch has a separate round, in which every rank runs
    it: with a capacity, the rows that ranks exchange depend on the size of their micro-batches.
    """
    full, rest = divmod(num_samples, size)
    for start in range(0, full, ranks):
        first = (start + rank) * size if start + rank < full else 0
        yield range(first, first + size), start + rank < full
    if rest:
        yield range(full * size, num_samples), rank == 0
