"""Evaluation on held-out samples: the same samples in the same order, with the same result, on every layout."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Sized

import torch
from torch import Tensor

from megapar.arguments import Config
from megapar.core.comm.agreement import reduce_numbers
from megapar.core.status_line import Status, silent
from megapar.data.batches import Collate
from megapar.data.eval_tasks import EvalTask
from megapar.data.sampling.samples import Samples
from megapar.data.token_bytes import TokenBytes
from megapar.model.decoder.model import Decoder
from megapar.training.step.job import Job
from megapar.training.step.objective import Objective

OF_SET = "loss/"  # prefix of the loss of one of several sets
BITS = "bits_per_byte"
"""Cross-entropy in bits per UTF-8 byte of the predicted text; with ``/NAME`` that of one of several sets."""


@torch.no_grad()
def evaluate(
    config: Config,
    job: Job,
    sets: Mapping[str, Samples],
    collate: Collate,
    objective: Objective,
    token_bytes: TokenBytes | None = None,
    status: Status = silent,
) -> dict[str, float]:
    """Return the mean of every term over its items, and ``loss``, their weighted sum without the routing losses.

    The means are over the items of all sets together. Of several sets, ``loss/NAME`` is that of each. With
    ``token_bytes`` there are also the bits per byte: the ends of documents add to the loss, and no byte.

    Micro-batch j of a set contains its samples [j * micro_batch_size, ...) of the first ``eval_iters`` global batches,
    or all of them if there are fewer (the last one may be smaller). Ranks of pp and cp share the samples and add up
    their terms. ``rounds`` says which rank runs which micro-batch.
    """
    training, world, model = config.training, job.world, job.model
    run = model if job.pipeline is None else job.pipeline.evaluate
    data = world.axis("data")
    names = list(objective.weights)
    totals = torch.zeros(2, len(sets), len(names) + 1, dtype=torch.float64)  # the last items are bytes
    model.eval()
    try:
        for number, (name, samples) in enumerate(sets.items()):
            num_samples = num_evaluated(config, samples)
            for numbers, counted, end in rounds(num_samples, training.micro_batch_size, data.rank, data.size):
                read = [samples[i] for i in numbers]
                batch = collate(read)
                terms = run(batch.to(world.device.torch_device, non_blocking=True).tensors, batch.valid_tokens)
                if counted:
                    size = 0.0 if token_bytes is None else sum(map(token_bytes.of_sample, read))
                    totals[0, number, :-1] += torch.stack([terms.sums[name] for name in names]).cpu().double()
                    counts = [*(batch.counts[name] for name in names), size]
                    totals[1, number] += torch.tensor(counts, dtype=torch.float64)
                status(f"evaluating {name}".strip(), end, num_samples, "samples")
    finally:
        model.train()
    reduce_numbers(totals, data, "evaluation")
    for axis in (world.axis("pp"), world.axis("cp")):
        if axis.group is not None:
            totals[1] *= axis.rank == 0  # its ranks read the same samples, so only one counts them
            reduce_numbers(totals, axis, "evaluation")

    def means_of(sums: Tensor, items: Tensor) -> dict[str, float]:
        pairs = zip(names, sums.tolist(), items.tolist(), strict=False)
        means = {name: total / (count or 1) for name, total, count in pairs}
        size = items[-1].item()
        bits = {BITS: sums[names.index("lm")].item() / (math.log(2) * size)} if size else {}
        return means | {"loss": sum(objective.weights[name] * means[name] for name in names)} | bits

    each = dict(zip(sets, map(means_of, *totals), strict=True)) if len(sets) > 1 else {}
    named = {f"{OF_SET}{name}": means["loss"] for name, means in each.items()}
    named |= {f"{BITS}/{name}": means[BITS] for name, means in each.items() if BITS in means}
    return means_of(*totals.sum(1)) | named


def num_evaluated(config: Config, samples: Sized) -> int:
    """Return the number of held-out samples that an evaluation reads."""
    return min(len(samples), config.training.eval_iters * config.training.global_batch_size)


def rounds(num_samples: int, size: int, rank: int, ranks: int) -> Iterator[tuple[range, bool, int]]:
    """Yield, for each round, (the samples of rank ``rank`` of ``ranks``, True if it counts them, all ranks' end).

    Rank r runs the full micro-batches r, ranks + r, ... Where it has none left it repeats the first one, because the
    other ranks may need it in a collective. A smaller last micro-batch has a separate round, in which every rank runs
    it: with a capacity, the rows that ranks exchange depend on the size of their micro-batches.
    """
    full, rest = divmod(num_samples, size)
    for start in range(0, full, ranks):
        first = (start + rank) * size if start + rank < full else 0
        yield range(first, first + size), start + rank < full, min(start + ranks, full) * size
    if rest:
        yield range(full * size, num_samples), rank == 0, num_samples


_LENGTHS = 128  # few lengths, because compiled functions and kernels prepare for each


def score_tasks(
    config: Config, job: Job, tasks: Sequence[EvalTask], collate: Collate, status: Status
) -> dict[str, float]:
    """Return the scores of all tasks by task/score. Every rank calls it."""
    return {
        f"{task.name}/{score}": value
        for task in tasks
        for score, value in task.scores(*row_scores(config, job, task, collate, status).tolist()).items()
    }


@torch.no_grad()
def row_scores(config: Config, job: Job, task: EvalTask, collate: Collate, status: Status = silent) -> Tensor:
    """Return [2, rows] fp64 on every rank: the log-likelihood of each row's choice, and its ids that are not likeliest.

    Rows go into micro-batches from the shortest to the longest, so that those of a round are padded to about the
    same length. Ranks of pp and cp share them as in an evaluation.
    """
    model, world, parallel = job.model, job.world, config.parallel
    assert isinstance(model, Decoder)
    run = model if job.pipeline is None else job.pipeline.evaluate
    data, order, head = world.axis("data"), task.order, model.lm_head
    # A multiple that all ways to share a sequence divide, mirrored or in slices.
    multiple = math.lcm(_LENGTHS, 16 * parallel.cp_degree * parallel.mp_degree)
    found = torch.zeros(2, len(order), dtype=torch.float64)
    model.eval()
    try:
        for numbers, counted, end in rounds(len(order), config.training.micro_batch_size, data.rank, data.size):
            length = min(config.model.seq_length, -(-task.length(order[end - 1]) // multiple) * multiple)
            rows = [order[number] for number in numbers]
            batch = collate([task.sample(row, length) for row in rows])
            tensors = batch.to(world.device.torch_device, non_blocking=True).tensors
            if head is not None:
                head.scores = []
            run(tensors, batch.valid_tokens)
            if head is not None and counted:
                for part, values in enumerate(head.scores or ()):
                    found[part, rows] = values.cpu().double().sum(1)
            status(f"scoring {task.name}", end, len(order), "rows")
    finally:
        if head is not None:
            head.scores = None
        model.train()
    for axis in (data, world.axis("pp"), world.axis("cp")):
        reduce_numbers(found, axis, "evaluation")
    return found
