"""One optimizer step: forward and backward of every micro-batch, reduce, check, clip, update, gather."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor
from torch.profiler import record_function

from megapar.arguments import Config
from megapar.core.comm.agreement import reduce_numbers
from megapar.core.device.base import Device, Event
from megapar.core.optimizer.gradient_norm import clip_divisor, clip_gradients, found_nonfinite
from megapar.core.optimizer.update_rule import StepRates
from megapar.data.batches import Loader
from megapar.health.corruption.guards import Guards
from megapar.health.stop.control import Control
from megapar.model.decoder.model import Decoder
from megapar.training.step.bad_steps import BadStepPolicy
from megapar.training.step.batches import BatchFeed, StepBatches
from megapar.training.step.gradients import Gradients, Summed
from megapar.training.step.job import Job
from megapar.training.step.progress import Progress
from megapar.training.step.result import StepResult, UpdateFacts
from megapar.training.step.schedules import LearningRate, WeightDecay
from megapar.training.step.step_guard import StepGuard, StepVerdict
from megapar.training.step.update_norms import UpdateNorms

READ_VOTES = "Stepper._apply_votes"  # the function in which the host waits for a step's norm


@dataclass(frozen=True)
class _Pending:
    """A step whose norm is still in flight to the host."""

    work: StepBatches
    summed: Summed
    step: StepResult
    norm_and_votes: Tensor
    copied: Event


@dataclass(eq=False)
class Stepper:
    """Runs optimizer steps, one per call.

    A step with non-finite gradients changes nothing (in fp16, only the loss scale). If the host runs ahead of its
    device, the device makes that decision (found_inf), and the host reads it one step later in ``resolve_pending``.

    Attributes:
        weight_decay: Weight decay that changes from step to step, or None.
        update_norms: Measures the updates of logged steps; None: nothing does.
        before_update: Called before the model changes, for code that still reads it.
        before_gather: Called with the number of the step when the masters have their new values.
    """

    config: Config
    job: Job
    feed: BatchFeed
    progress: Progress
    learning_rate: LearningRate
    weight_decay: WeightDecay | None
    gradients: Gradients
    step_guard: StepGuard
    bad_steps: BadStepPolicy
    guards: Guards
    control: Control
    update_norms: UpdateNorms | None
    before_update: Callable[[], None]
    before_gather: Callable[[int], None]
    _pending: _Pending | None = field(default=None, init=False)

    @property
    def device(self) -> Device:
        """The device of this rank."""
        return self.job.world.device

    def step(self, loader: Loader) -> StepResult:
        """Run the next step on micro-batches from ``loader``."""
        start = time.perf_counter()
        self._time_waits()
        progress, work = self.progress, self.feed.next(loader, self.progress)
        summed = self.gradients.make(work)
        if self.resolve_pending():
            summed = self.gradients.make(work)
        found_inf: Tensor | None = None
        if self.step_guard.decided_on_device:
            found_inf = found_nonfinite(summed.norm)
            verdict = StepVerdict(summed, loss_scale=1.0, skipped=False)
        else:
            verdict = self.step_guard.decide(work, summed, self._apply_votes(summed.norm_and_votes))
        number = progress.iteration - progress.skipped_steps
        lr, rates = self.learning_rate.at(number, progress.iteration), self._rates(number)
        update = UpdateFacts()
        if not verdict.skipped:
            update = self._update(work.iteration, verdict.summed, lr, rates, found_inf)
        work.count_into(progress, skipped=verdict.skipped)
        step = self._report(work, verdict, lr, rates, update, time.perf_counter() - start)
        if found_inf is not None:
            self._pending = _Pending(work, summed, step, *self.device.host_copy(summed.norm_and_votes))
        return step

    def resolve_pending(self) -> bool:
        """Resolve the deferred verdict of the previous step. Returns True if its gradients had to be computed again.

        The device skipped the update if the norm was not finite, so the repeated step starts from the same model.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return False
        pending.copied.synchronize()
        norm = self._apply_votes(pending.norm_and_votes)
        if math.isfinite(norm):
            self.bad_steps.end_streak()
            return False
        step, verdict = pending.step, self.step_guard.decide(pending.work, pending.summed, norm)
        step.skipped = verdict.skipped
        self.progress.skipped_steps += step.skipped
        if not step.skipped:
            step.update = self._update(step.iteration, verdict.summed, step.lr, step.rates, None)
            step.totals, step.norm = verdict.summed.totals, verdict.summed.norm
        return True

    def _rates(self, number: int) -> StepRates:
        """Return the rates of update ``number``, counted from 0, besides its learning rate."""
        decoupled, decay = self.learning_rate.decoupled(), self.weight_decay
        return StepRates(
            None if decoupled is None else decoupled.at(number), None if decay is None else decay.at(number)
        )

    def _time_waits(self) -> None:
        """Turn the wait meters on or off for this step.

        Timing is free on the host. On a device its events cost launches, so only the logged steps are timed.
        """
        due = self._logged(self.progress.iteration + 1)
        for meter in (self.job.world.meter, self.gradients.last_reduction):
            meter.on = due or not self.device.is_async

    def _logged(self, iteration: int) -> bool:
        """Return True if the log has a line of a step."""
        interval = self.config.logging.log_interval
        return interval > 0 and iteration % interval == 0

    def _apply_votes(self, norm_and_votes: Tensor) -> float:
        """Act on the votes of all ranks and return the global norm. Waits for the device."""
        norm, *votes = self.device.values(norm_and_votes)
        self.job.observer.host_waited(READ_VOTES)
        self.control.apply_votes(self.guards.apply_votes([round(vote) for vote in votes], self.progress.iteration))
        return norm

    def _update(
        self, iteration: int, summed: Summed, lr: float, rates: StepRates, found_inf: Tensor | None
    ) -> UpdateFacts:
        """Update the model; return what was measured. A device's ``found_inf`` of 1 skips it; None: a good step."""
        job = self.job
        self.before_update()
        self.guards.before_update()
        limit, grad_scale = self.config.optimizer.clip_grad, None
        if limit > 0 and self.device.scales_gradients and summed.norm.dtype == torch.float32:
            grad_scale = clip_divisor(summed.norm, limit)
        elif limit > 0:
            clip_gradients(job.sharding.master_shards, summed.norm, limit)
        with record_function("megapar: optimizer"):
            measured = self.update_norms if self._logged(iteration) else None
            if measured is not None:
                measured.begin()
            job.optimizer.step(lr, found_inf, grad_scale, rates)
            norms = None if measured is None else measured.take()
            scores: Tensor | None = None
            if job.qk_clip is not None and summed.scores is not None:
                scores = job.qk_clip.clip(summed.scores, found_inf)
            self.before_gather(iteration)
            job.sharding.start_param_gather()
        self.guards.after_update(iteration)
        self._move_router_bias(summed.totals.load, found_inf)
        if found_inf is None:
            self.bad_steps.end_streak()
        return UpdateFacts(norms, scores)

    def _move_router_bias(self, load: Tensor, found_inf: Tensor | None) -> None:
        """Raise the correction bias of experts that received less than their share of the global batch."""
        rate, data = self.config.moe.moe_router_bias_update_rate, self.job.world.axis("data")
        if rate:
            total = load.clone()
            reduce_numbers(total, data, "load")
            model = cast(Decoder, self.job.model)  # the rules refuse a rate for other models
            # Rows are indexed one at a time: an index by a list would wait for the device.
            rows = total if self.job.pipeline is None else [total[row] for row in model.load_rows]
            model.update_router_bias(rows, rate, None if found_inf is None else 1 - found_inf)

    def _report(
        self, work: StepBatches, verdict: StepVerdict, lr: float, rates: StepRates, update: UpdateFacts, seconds: float
    ) -> StepResult:
        progress, job = self.progress, self.job
        return StepResult(
            iteration=progress.iteration,
            consumed_samples=progress.consumed_samples,
            consumed_tokens=progress.consumed_tokens,
            lr=lr,
            rates=rates,
            denominators=work.denominators,
            totals=verdict.summed.totals,
            norm=verdict.summed.norm,
            loss_scale=verdict.loss_scale,
            update=update,
            skipped=verdict.skipped,
            sent_bytes=job.world.sent_bytes.take(),
            seconds=seconds,
            exposed=job.world.meter.take() if job.world.meter.on else None,
            waited=self.gradients.last_reduction.take(),
            ended=time.time(),
        )
