"""The decision to apply or skip a step's update: an fp16 overflow, a non-finite norm, or a loss spike."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megapar.arguments import Config
from megapar.core.optimizer.loss_scale import LossScale
from megapar.data.sampling.skipping import Range, sample_at
from megapar.errors import TrainingError
from megapar.training.step.bad_steps import BadStepPolicy
from megapar.training.step.batches import Denominators, StepBatches
from megapar.training.step.function_runner import share_given_up
from megapar.training.step.gradients import Gradients, Summed
from megapar.training.step.job import Job
from megapar.training.step.progress import Progress
from megapar.training.step.result import Totals


class StepVerdict(NamedTuple):
    """The decision about a step.

    Attributes:
        summed: The gradients' statistics to continue with.
        skipped: True if the step must not change the model.
    """

    summed: Summed
    loss_scale: float
    skipped: bool


@dataclass(eq=False)
class StepGuard:
    """Decides whether a step may update the model. All ranks decide the same, because they have the same norm.

    Attributes:
        skipped_ranges: Samples that the run leaves out.
        mean_loss: Returns the loss of the global batch from this rank's totals.
        decided_on_device: True if the device itself skips an update with found_inf set, and the host learns of it one
            step later.
    """

    config: Config
    job: Job
    progress: Progress
    gradients: Gradients
    loss_scale: LossScale | None
    bad_steps: BadStepPolicy
    skipped_ranges: Sequence[Range]
    mean_loss: Callable[[Totals, Denominators], float]

    def __post_init__(self) -> None:
        """Set what follows from the configuration."""
        self._world = self.job.world
        self._skips_spikes = self.config.reliability.spike_skip
        self.decided_on_device = self._may_decide_on_device(self.config)

    def _may_decide_on_device(self, config: Config) -> bool:
        """Return True if the device can skip an update itself and the next step does not need the verdict.

        The next step needs it for its loss scale, its length, or to skip a spike.
        """
        next_step_needs_it = self.loss_scale is not None or config.training.progressive_iters > 0 or self._skips_spikes
        device = self._world.device
        return device.is_async and device.skips_updates and not next_step_needs_it

    def decide(self, work: StepBatches, summed: Summed, norm: float) -> StepVerdict:
        """Decide about a step with the global gradient norm ``norm``. Raises TrainingError after too many bad steps."""
        cause = ""
        while not math.isfinite(norm) and (change := share_given_up(self.job.runner, self._world)):
            self.bad_steps.messages.append(f"WARNING: iteration {work.iteration} was run again: {change}")
            summed = self.gradients.make(work)
            norm = self._world.device.values(summed.norm.view(1))[0]
        if self.loss_scale is None and not math.isfinite(norm):
            summed, norm, cause = self._repeat(work, summed, norm)
        scale, overflow = self._check_overflow(work, norm)
        skipped = overflow or self._is_bad(work, summed, norm, cause)
        return StepVerdict(summed, scale, skipped)

    def _repeat(self, work: StepBatches, summed: Summed, norm: float) -> tuple[Summed, float, str]:
        """Run a non-finite step again and locate the first non-finite value.

        If the value does not reproduce, it was a hardware fault, not the data or the model. The step then continues
        with the second run.

        Returns:
            The second run if it is finite, else the first; its norm; the cause, "" if the second run is finite.
        """
        again, watched = self.gradients.watched(work)
        repeated = self._world.device.values(again.norm.view(1))[0]
        if math.isfinite(repeated):
            self.bad_steps.messages.append(
                f"WARNING: iteration {work.iteration}: gradient norm {norm}, but {repeated} "
                "when the step was run again: a rank computed wrongly; the step continues with the second result"
            )
            return again, repeated, ""
        cause = watched.over_ranks(self._world.axis("world"), self._world.launched)
        if not cause:
            cause = f"the forward is finite, the gradient of {self.gradients.first_bad_parameter()} is not"
        return summed, norm, cause

    def _check_overflow(self, work: StepBatches, norm: float) -> tuple[float, bool]:
        """Return the loss scale of this step, and whether its gradients overflowed.

        Raises TrainingError if the scale is already the minimum, with the name of the first non-finite parameter.
        """
        if self.loss_scale is None:
            return 1.0, False
        scale, overflow = self.loss_scale.value, not math.isfinite(norm)
        if overflow and self.loss_scale.exhausted:
            raise TrainingError(
                f"iteration {work.iteration}: the gradients overflow at the minimum loss scale, {scale:g}; "
                f"{self.progress.skipped_steps} steps were skipped so far. The first gradient that is not finite, in "
                f"the order of the backward pass, is that of {self.gradients.first_bad_parameter()}. Lower --lr, use "
                "bf16, or resume from an earlier checkpoint."
            )
        self.loss_scale.update(overflow=overflow)
        return scale, overflow

    def _is_bad(self, work: StepBatches, summed: Summed, norm: float, cause: str) -> bool:
        """Return True if a non-finite norm or a spike forbids the update. ``cause`` is the source of the former."""
        first, last = work.first_sample, work.first_sample + work.global_batch - 1
        samples = f"{sample_at(first, self.skipped_ranges)}-{sample_at(last, self.skipped_ranges)}"
        if not math.isfinite(norm):
            self.bad_steps.not_finite(work.iteration, norm, samples, f"first bad: {cause}")
            return True
        if not self._skips_spikes:
            return False
        loss = self.mean_loss(summed.totals, work.denominators)
        return self.bad_steps.is_spike(work.iteration, loss, norm, samples)
