"""Scores of evaluation tasks, the same on every layout."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megapar.arguments import Config
from megapar.core.comm.agreement import reduce_numbers
from megapar.data.batches import Collate
from megapar.data.eval_tasks import EvalTask
from megapar.model.decoder.model import Decoder
from megapar.training.step.evaluate import rounds
from megapar.training.step.job import Job

_LENGTHS = 128  # few lengths, because compiled functions and kernels prepare for each


def score_tasks(config: Config, job: Job, tasks: Sequence[EvalTask], collate: Collate) -> dict[str, float]:
    """Return the scores of all tasks by task/score. Every rank calls it."""
    return {
        f"{task.name}/{score}": value
        for task in tasks
        for score, value in task.scores(*row_scores(config, job, task, collate).tolist()).items()
    }


@torch.no_grad()
def row_scores(config: Config, job: Job, task: EvalTask, collate: Collate) -> Tensor:
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
    finally:
        if head is not None:
            head.scores = None
        model.train()
    for axis in (data, world.axis("pp"), world.axis("cp")):
        reduce_numbers(found, axis, "evaluation")
    return found
