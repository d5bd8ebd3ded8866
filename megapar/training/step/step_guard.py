"""Whether a step may change the model: an overflow, a number that is not finite, or a spike may forbid it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from megapar.arguments import Config
from megapar.core.optimizer.loss_scale import LossScale
from megapar.data.sampling.skipping import Range, sample_at
from megapar.errors import TrainingError
from megapar.training.building.job import Job
from megapar.training.checkpoints.state import Progress
from megapar.training.step.bad_steps import BadStepPolicy
from megapar.training.step.batches import StepBatches
from megapar.training.step.denominators import Denominators
from megapar.training.step.gradients import Gradients, Summed
from megapar.training.step.totals import Totals


class StepVerdict(NamedTuple):
    """What a step goes on with. loss_scale: its gradients were made with. skipped: nothing may change."""

    summed: Summed
    loss_scale: float
    skipped: bool


class StepGuard:
    """Decides the same on every rank, as the norm is the same.

    late: the device itself leaves the model alone where the norm is not finite, and the host hears of it a step later.
    skipped: ranges of samples that the run steps over. mean_loss: the global batch's, from this rank's totals.
    """

    def __init__(
        self,
        config: Config,
        job: Job,
        progress: Progress,
        gradients: Gradients,
        loss_scale: LossScale | None,
        numbers: BadStepPolicy,
        skipped: Sequence[Range],
        mean_loss: Callable[[Totals, Denominators], float],
    ) -> None:
        self._world = job.world
        self._progress = progress
        self._gradients = gradients
        self._loss_scale = loss_scale
        self._numbers = numbers
        self._skipped_ranges = skipped
        self._mean_loss = mean_loss
        self._skips_spikes = config.reliability.spike_skip
        self.late = self._may_be_late(config)

    def _may_be_late(self, config: Config) -> bool:
        """Not where the next step's loss scale or length hangs on the verdict, or a spike is to be skipped."""
        hangs_on_it = self._loss_scale is not None or config.training.progressive_iters > 0 or self._skips_spikes
        device = self._world.device
        return device.is_async and device.skips_updates and not hangs_on_it

    def of(self, work: StepBatches, summed: Summed, norm: float) -> StepVerdict:
        """norm: the global one, as the host knows it. Raises TrainingError where too many steps were bad."""
        found = ""
        if self._loss_scale is None and not math.isfinite(norm):
            summed, norm, found = self._repeat(work, summed, norm)
        scale, overflow = self._check_overflow(work, norm)
        skipped = overflow or self._is_bad(work, summed, norm, found)
        return StepVerdict(summed, scale, skipped)

    def _repeat(self, work: StepBatches, summed: Summed, norm: float) -> tuple[Summed, float, str]:
        """Run a step that was not finite again and watch where it goes bad: (a good second run or the same, its norm,
        what was found).

        A number that does not come again was none of the data's or the model's: the step goes on with the second run.
        """
        again, watched = self._gradients.watched(work)
        repeated = self._world.device.values(again.norm.view(1))[0]
        if math.isfinite(repeated):
            self._numbers.messages.append(
                f"WARNING: iteration {work.iteration}: gradient norm {norm}, but {repeated} "
                "when the step was run again: a rank computed wrongly; the step goes on with the second result"
            )
            return again, repeated, ""
        found = watched.agree(self._world.axis("world"))
        if not found:
            found = f"the forward is finite, the gradient of {self._gradients.first_bad_parameter()} is not"
        return summed, norm, found

    def _check_overflow(self, work: StepBatches, norm: float) -> tuple[float, bool]:
        """The loss scale of this step, and whether its gradients overflowed.

        Raises TrainingError where no smaller scale is left, naming the first parameter that went bad.
        """
        if self._loss_scale is None:
            return 1.0, False
        scale, overflow = self._loss_scale.value, not math.isfinite(norm)
        if overflow and self._loss_scale.exhausted:
            raise TrainingError(
                f"iteration {work.iteration}: the gradients overflow at the least loss scale, {scale:g}; "
                f"{self._progress.skipped_steps} steps were skipped so far. The first gradient that is not finite, in "
                f"the order of the backward pass, is that of {self._gradients.first_bad_parameter()}. Lower --lr, use "
                "bf16, or resume from an earlier checkpoint."
            )
        self._loss_scale.update(overflow=overflow)
        return scale, overflow

    def _is_bad(self, work: StepBatches, summed: Summed, norm: float, found: str) -> bool:
        """Whether the numbers forbid the update. found: where one that is not finite came from."""
        first, last = work.first_sample, work.first_sample + work.global_batch - 1
        samples = f"{sample_at(first, self._skipped_ranges)}-{sample_at(last, self._skipped_ranges)}"
        if not math.isfinite(norm):
            self._numbers.not_finite(work.iteration, norm, samples, f"first bad: {found}")
            return True
        if not self._skips_spikes:
            return False
        loss = self._mean_loss(summed.totals, work.denominators)
        return self._numbers.is_spike(work.iteration, loss, norm, samples)
