"""The gradients of a step: forward and backward of this rank's micro-batches, summed over every axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from megapar.core.comm.accounts import WaitMeter
from megapar.core.comm.autograd import all_reduce_
from megapar.core.optimizer.gradient_norm import global_norm, scale_gradients
from megapar.core.optimizer.loss_scale import LossScale
from megapar.core.random import seed_micro_batch
from megapar.core.sharding.partial_gradients import sum_partial, sum_tied
from megapar.health.corruption.first_nonfinite import FirstNonfinite, watch
from megapar.model.layers.loss import Terms
from megapar.training.step.batches import Denominators, StepBatches
from megapar.training.step.function_runner import runs_alike
from megapar.training.step.job import Job
from megapar.training.step.objective import Objective
from megapar.training.step.result import Totals


class Summed(NamedTuple):
    """Statistics of a step's gradients.

    Attributes:
        totals: Terms of this rank's micro-batches.
        norm: Global gradient norm, a scalar on the device.
        norm_and_votes: The norm, and the ranks' requests to the run, summed over all ranks: one vector, so that the
            host waits only once.
        scores: Largest statistic of each head's scores, which ``QkClip.clip`` takes; None without it.
    """

    totals: Totals
    norm: Tensor
    norm_and_votes: Tensor
    scores: Tensor | None = None


class Gradients:
    """Computes the gradients of a step by gradient accumulation over its micro-batches.

    Args:
        votes: Returns this rank's votes, which are reduced together with the norm.

    Attributes:
        work: Batches of the current step, for guards that run a part of it again.
        last_reduction: Times the wait for the other ranks in the last reduction. This is not counted as communication:
            it is caused by whatever made those ranks late.
    """

    def __init__(
        self, job: Job, objective: Objective, loss_scale: LossScale | None, votes: Callable[[], Sequence[int | Tensor]]
    ) -> None:
        self._job = job
        self._objective = objective
        self._loss_scale = loss_scale
        self._votes = votes
        self._data = job.world.axis("data")
        self._watched: FirstNonfinite | None = None
        self.work: StepBatches | None = None
        self.last_reduction = WaitMeter(job.world.device.timed_event())

    def make(self, work: StepBatches) -> Summed:
        """Run forward, backward and the reduction of a step."""
        self.work, clip = work, self._job.qk_clip
        if clip is not None:
            clip.begin()
        with record_function("megapar: forward and backward"):
            totals = self._forward_backward(work)
        with record_function("megapar: reduce"):
            norm, norm_and_votes = self._reduce(self._loss_factor(work.denominators))
        return Summed(totals, norm, norm_and_votes, None if clip is None else clip.take())

    def repeat(self, work: StepBatches) -> Totals:
        """Repeat forward, backward and the sums over data ranks, without norm or votes; the sharding has gradients."""
        totals = self._forward_backward(work)
        self._job.sharding.finish()
        self._job.comm.check_settled()
        return totals

    def watched(self, work: StepBatches) -> tuple[Summed, FirstNonfinite]:
        """Run a step like ``make``, and locate the first non-finite value of its forward."""
        with watch(self._job.model, [spec.unit for spec in self._job.table]) as watched:
            self._watched = watched
            summed = self.make(work)
        self._watched = None
        return summed, watched

    def first_bad_parameter(self) -> str:
        """Return the name of the last parameter in forward order, over all ranks, with a non-finite gradient."""
        job = self._job
        order = {spec.name: number for number, spec in enumerate(job.table)}
        grads = [shard.grad for shard in job.sharding.master_shards if shard.grad is not None]
        bad = [order[view.spec.name] for view in job.sharding.views(grads) if not view.tensor.isfinite().all().item()]
        last = torch.tensor(max(bad, default=-1), device=job.world.device.torch_device)
        all_reduce_(last, job.world.axis("world"), dist.ReduceOp.MAX)
        return job.table[int(last.item())].name

    def _forward_backward(self, work: StepBatches) -> Totals:
        """Run every micro-batch of this rank forward and backward. Returns the sums of their terms."""
        job, totals = self._job, Totals()
        batches, denominators = work.batches, work.denominators
        first = work.first_micro_batch + self._data.rank

        def seed(number: int) -> None:
            if self._watched is not None:
                self._watched.micro_batch = number
            micro_batch = first + number * self._data.size
            seed_micro_batch(work.dropout_seed, micro_batch, job.world.device.torch_device)
            job.observer.forward_begins(micro_batch)

        def loss_of(terms: Terms) -> Tensor:
            loss = self._objective.of(terms, denominators.items, denominators.num_micro_batches)
            factor = self._loss_factor(denominators)
            return loss if factor == 1.0 else loss * factor

        job.sharding.begin_step()
        if job.pipeline is not None:
            job.pipeline.step(batches, loss_of, seed, totals.add)
            return totals
        for number, batch in enumerate(batches):
            job.sharding.begin_micro_batch(last=number == len(batches) - 1)
            seed(number)
            tensors = batch.to(job.world.device.torch_device, non_blocking=True).tensors
            terms = job.model(tensors, batch.valid_tokens)
            loss_of(terms).backward()
            totals.add(terms)
        return totals

    def _loss_factor(self, denominators: Denominators) -> float:
        """Return the factor that the loss is multiplied by, and the fp32 gradients divided by after the reduction.

        In fp16, the gradients of a loss per token of the global batch are too small to represent. Multiplied by
        the tokens of a micro-batch, they are large enough.
        """
        if self._loss_scale is None:
            return 1.0
        return self._loss_scale.value * max(1, denominators.tokens) / denominators.num_micro_batches

    def _reduce(self, factor: float) -> tuple[Tensor, Tensor]:
        """Sum the gradients over all axes and divide out ``factor``. Returns what ``global_norm`` does."""
        job, world = self._job, self._job.world
        job.sharding.finish()
        job.comm.check_settled()
        sum_partial(job.sharding, job.partial, world.axis("mp"), job.from_first_rank)
        if job.tied is not None:
            sum_tied(job.sharding, job.tied, world.axis("pp"))
        if factor != 1.0:
            scale_gradients(job.sharding.master_shards, 1 / factor)
        job.observer.gradients_reduced(job.sharding)
        with self.last_reduction.around("world/all_reduce"):
            # Rounding differs between compiled and uncompiled functions, and replicas must not (``StepGuard``).
            alike = runs_alike(job.runner, world)
            shards, ranks = job.sharding.master_shards, world.axis("world")
            return global_norm(shards, ranks, self._votes(), valid=alike, exact=job.moves_experts)
