"""One optimizer step: forward and backward of every micro-batch, reduce, judge, clip, update, publish."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from torch import Tensor
from torch.profiler import record_function

from megapar.arguments import Config
from megapar.core.comm.agreement import reduce_numbers
from megapar.core.device.base import Event
from megapar.core.optimizer.adamw import clip
from megapar.data.batches import Loader
from megapar.model.decoder.model import Decoder
from megapar.training.building.job import Job
from megapar.training.checkpoints.state import Progress
from megapar.training.health.control import Control
from megapar.training.health.guards import Guards
from megapar.training.reports.monitor import Step
from megapar.training.step.bad_steps import BadStepPolicy
from megapar.training.step.batches import BatchFeed, StepBatches
from megapar.training.step.gradients import Gradients, Summed
from megapar.training.step.schedules import LearningRate
from megapar.training.step.step_guard import StepGuard, StepVerdict

READ_VOTES = "Stepper._apply_votes"  # where the host waits for a step's norm


@dataclass(frozen=True)
class _Pending:
    """A step of which the host does not know yet what became of it. told: its norm and the votes, when it is there."""

    work: StepBatches
    summed: Summed
    step: Step
    told: Tensor
    there: Event


class Stepper:
    """Takes a run's steps, one after the other.

    A step whose gradients are not all finite changes nothing (in fp16 but the loss scale). Where the host runs ahead of
    its device, the device decides that, and the host hears of it a step later (``settle``).
    """

    def __init__(
        self,
        config: Config,
        job: Job,
        feed: BatchFeed,
        progress: Progress,
        learning_rate: LearningRate,
        gradients: Gradients,
        judge: StepGuard,
        numbers: BadStepPolicy,
        guards: Guards,
        control: Control,
        before_update: Callable[[], None],
    ) -> None:
        """before_update: called when the model is about to change, for what still reads it."""
        self.config = config
        self.job = job
        self.device = job.world.device
        self.feed = feed
        self.progress = progress
        self.learning_rate = learning_rate
        self.gradients = gradients
        self.judge = judge
        self.numbers = numbers
        self.guards = guards
        self.control = control
        self._before_update = before_update
        self._pending: _Pending | None = None

    def step(self, loader: Loader) -> Step:
        """The next step, on as many micro-batches of ``loader`` as it takes."""
        start = time.perf_counter()
        self._time_waits()
        progress, work = self.progress, self.feed.next(loader, self.progress)
        summed = self.gradients.make(work)
        if self.settle():
            summed = self.gradients.make(work)
        bad: Tensor | None = None
        if self.judge.late:
            bad = summed.norm.isfinite().logical_not().float()
            verdict = StepVerdict(summed, loss_scale=1.0, skipped=False)
        else:
            verdict = self.judge.of(work, summed, self._apply_votes(summed.told()))
        lr = self.learning_rate.at(progress.iteration - progress.skipped_steps)
        if not verdict.skipped:
            self._update(work.iteration, verdict.summed, lr, bad)
        work.count_into(progress, skipped=verdict.skipped)
        step = self._report(work, verdict, lr, time.perf_counter() - start)
        if bad is not None:
            self._pending = _Pending(work, summed, step, *self.device.host_copy(summed.told()))
        return step

    def settle(self) -> bool:
        """Judge the step before, where that is done late; True where its gradients were computed again.

        The device has changed nothing where the norm was not finite, so the step is run again as it would have been.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return False
        pending.there.synchronize()
        norm = self._apply_votes(pending.told)
        if math.isfinite(norm):
            self.numbers.end_streak()
            return False
        step, verdict = pending.step, self.judge.of(pending.work, pending.summed, norm)
        step.skipped = verdict.skipped
        self.progress.skipped_steps += step.skipped
        if not step.skipped:
            self._update(step.iteration, verdict.summed, step.lr, None)
            step.totals, step.norm = verdict.summed.totals, verdict.summed.norm
        return True

    def _time_waits(self) -> None:
        """The host's clock is free; a device's events cost launches: there one step in a line of the log is timed."""
        interval = self.config.logging.log_interval
        due = interval > 0 and (self.progress.iteration + 1) % interval == 0
        for meter in (self.job.meter, self.gradients.last_reduction):
            meter.on = due or not self.device.is_async

    def _apply_votes(self, told: Tensor) -> float:
        """Act on the votes of all ranks; returns the global norm. Waits for the device."""
        norm, *votes = self.device.values(told)
        self.job.observer.host_waited(READ_VOTES)
        self.control.apply_votes(self.guards.apply_votes([round(vote) for vote in votes], self.progress.iteration))
        return norm

    def _update(self, iteration: int, summed: Summed, lr: float, bad: Tensor | None) -> None:
        """Change the model, in the step of this number.

        bad: on the device, where it is 1 nothing changes; None: it is good.
        """
        job = self.job
        self._before_update()
        self.guards.before_update()
        if self.config.optimizer.clip_grad > 0:
            clip(job.sharding.parts, summed.norm, self.config.optimizer.clip_grad)
        with record_function("megapar: optimizer"):
            job.optimizer.step(lr, bad)
            job.sharding.publish()
        self.guards.after_update(iteration)
        self._move_router_bias(summed.totals.load, bad)
        if bad is None:
            self.numbers.end_streak()

    def _move_router_bias(self, load: Tensor, bad: Tensor | None) -> None:
        """Raise the correction bias of experts that got less than their share of the global batch."""
        rate, data = self.config.moe.moe_router_bias_update_rate, self.job.world.axis("data")
        if rate:
            total = load.clone()
            reduce_numbers(total, data, "load")
            # An index by a list would wait for the device.
            model = cast(Decoder, self.job.model)  # the rules refuse a rate for another model
            rows = total if self.job.pipeline is None else [total[row] for row in model.load_rows]
            model.update_router_bias(rows, rate, None if bad is None else 1 - bad)

    def _report(self, work: StepBatches, verdict: StepVerdict, lr: float, seconds: float) -> Step:
        progress, job = self.progress, self.job
        return Step(
            iteration=progress.iteration,
            consumed_samples=progress.consumed_samples,
            consumed_tokens=progress.consumed_tokens,
            lr=lr,
            denominators=work.denominators,
            totals=verdict.summed.totals,
            norm=verdict.summed.norm,
            loss_scale=verdict.loss_scale,
            skipped=verdict.skipped,
            sent_bytes=job.world.sent_bytes.take(),
            seconds=seconds,
            exposed=job.meter.take() if job.metered and job.meter.on else None,
            waited=self.gradients.last_reduction.take(),
            ended=time.time(),
        )
