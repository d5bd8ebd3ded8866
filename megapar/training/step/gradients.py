"""The gradients of a step: forward and backward of this rank's micro-batches, summed over every axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from megapar.core.comm.autograd import all_reduce_
from megapar.core.comm.meter import WaitMeter
from megapar.core.health.first_nonfinite import FirstNonfinite, watch
from megapar.core.optimizer.adamw import global_norm, scale_gradients
from megapar.core.optimizer.loss_scale import LossScale
from megapar.core.random import seed_micro_batch
from megapar.core.sharding.partial_gradients import sum_partial, sum_tied
from megapar.model.layers.terms import Terms
from megapar.training.building.job import Job
from megapar.training.step.batches import StepBatches
from megapar.training.step.denominators import Denominators
from megapar.training.step.objective import Objective
from megapar.training.step.totals import Totals


class Summed(NamedTuple):
    """What gradients came with. totals: terms of this rank's micro-batches. norm: the global one, a scalar on the
    device. votes: sums over all ranks of what they ask of the run.
    """

    totals: Totals
    norm: Tensor
    votes: Tensor

    def told(self) -> Tensor:
        """The norm and the votes in one vector, for which the host waits once."""
        return torch.cat([self.norm.view(1).to(self.votes.dtype), self.votes])


class Gradients:
    """Computes the gradients of a step by gradient accumulation over its micro-batches, alike on every rank.

    votes: this rank's, which travel with the norm. last_reduction: times the wait for the other ranks there, which
    is nobody's communication: what made them late is.
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
        self.work: StepBatches | None = None  # the step's, for whoever runs a part of it again
        self.last_reduction = WaitMeter(job.world.device.timed_event())

    def make(self, work: StepBatches) -> Summed:
        """Forward and backward of a step, and the reduction."""
        self.work = work
        with record_function("megapar: forward and backward"):
            totals = self._forward_backward(work)
        with record_function("megapar: reduce"):
            norm, votes = self._reduce(self._loss_factor(work.denominators))
        return Summed(totals, norm, votes)

    def again(self, work: StepBatches) -> Totals:
        """Forward, backward and the sums over the data ranks, of which nobody hears; sharding then holds gradients."""
        totals = self._forward_backward(work)
        self._job.sharding.finish()
        self._job.comm.check_settled()
        return totals

    def watched(self, work: StepBatches) -> tuple[Summed, FirstNonfinite]:
        """The same, and where the first number that is not finite came from."""
        with watch(self._job.model, self._job.world.axis("pp").rank) as found:
            self._watched = found
            again = self.make(work)
        self._watched = None
        return again, found

    def first_bad_parameter(self) -> str:
        """The last one in forward order, over all ranks, whose gradient is not finite."""
        job = self._job
        order = {spec.name: number for number, spec in enumerate(job.table)}
        grads = [part.grad for part in job.sharding.parts if part.grad is not None]
        bad = [order[view.spec.name] for view in job.sharding.views(grads) if not view.tensor.isfinite().all().item()]
        last = torch.tensor(max(bad, default=-1), device=job.world.device.torch_device)
        all_reduce_(last, job.world.axis("world"), dist.ReduceOp.MAX)
        return job.table[int(last.item())].name

    def _forward_backward(self, work: StepBatches) -> Totals:
        """Every micro-batch of this rank forward and backward; the sums of their terms."""
        job, totals = self._job, Totals()
        batches, denominators = work.batches, work.denominators
        first = work.first_micro_batch + self._data.rank

        def seed(number: int) -> None:
            if self._watched is not None:
                self._watched.micro_batch = number
            micro_batch = first + number * self._data.size
            seed_micro_batch(work.dropout_seed, micro_batch)
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
        """What the loss is multiplied by, and its gradients divided by in fp32 after the reduction.

        fp16: a loss per token of the global batch has gradients too small to represent; times the tokens of a
        micro-batch they are not.
        """
        if self._loss_scale is None:
            return 1.0
        return self._loss_scale.value * max(1, denominators.tokens) / denominators.num_micro_batches

    def _reduce(self, factor: float) -> tuple[Tensor, Tensor]:
        """Complete the gradients over all axes and divide ``factor`` out; their global norm, and all ranks' votes."""
        job, world = self._job, self._job.world
        job.sharding.finish()
        job.comm.check_settled()
        sum_partial(job.sharding, job.partial, world.axis("mp"), job.meter)
        if job.tied is not None:
            sum_tied(job.sharding, job.tied, world.axis("pp"), job.meter)
        if factor != 1.0:
            scale_gradients(job.sharding.parts, 1 / factor)
        job.observer.gradients_reduced(job.sharding)
        with self.last_reduction.around("world/all_reduce"):
            norm, votes = global_norm(job.sharding.parts, world.axis("world"), self._votes())
        return norm, votes
