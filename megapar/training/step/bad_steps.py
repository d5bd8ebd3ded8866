"""Bad steps: steps with a non-finite gradient norm or a spike, and how many of them in a row a run tolerates."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megapar.arguments import Config
from megapar.errors import TrainingError
from megapar.files.location import Location, at, replace

WINDOW = 128
LEAST = 16


@dataclass
class SpikeDetector:
    """Detects outliers among the losses and gradient norms of the last ``WINDOW`` steps.

    Source: OLMo 2's step skipping.

    Attributes:
        sigmas: Standard deviations above the mean that make a spike. 0 turns detection off.
    """

    sigmas: float
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    norms: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def judge(self, loss: float, norm: float) -> str:
        """Describe the spike in a step's loss or gradient norm. Returns "" if there is none."""
        if not self.sigmas or len(self.losses) < LEAST:
            return ""
        spikes = []
        for name, value, past in (("loss", loss, self.losses), ("gradient norm", norm, self.norms)):
            mean = sum(past) / len(past)
            deviation = math.sqrt(sum((x - mean) ** 2 for x in past) / len(past))
            # After a flat history any change would be a spike, so the deviation is at least a thousandth of the mean.
            if value > mean + self.sigmas * max(deviation, 1e-3 * abs(mean)):
                spikes.append(f"{name} {value:.4g} where the last {len(past)} had {mean:.4g} +- {deviation:.2g}")
        return ", ".join(spikes)

    def add(self, loss: float, norm: float) -> None:
        """Add an ordinary step to the history."""
        self.losses.append(loss)
        self.norms.append(norm)

    def state(self) -> dict[str, list[float]]:
        """Return the state to save in a checkpoint."""
        return {"losses": list(self.losses), "norms": list(self.norms)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        self.losses.extend(state["losses"])
        self.norms.extend(state["norms"])


class BadStepPolicy:
    """Decides whether a bad step is skipped or ends the run. Equal inputs give all ranks the same decision.

    Args:
        limit: Maximum number of bad steps in a row that are skipped.
        folder: Folder for a file with the samples of the step that ended the run. None writes no file.

    Attributes:
        in_a_row: Bad steps since the last update of the model.
        messages: Lines for the log that ``pop_messages`` has not returned yet.
    """

    def __init__(self, limit: int, spikes: SpikeDetector, folder: Location | None) -> None:
        self._limit = limit
        self._folder = folder
        self.spikes = spikes
        self.in_a_row = 0
        self._any_good = False
        self.messages: list[str] = []

    def state(self) -> dict[str, Any]:
        """Return the state to save in a checkpoint."""
        return {**self.spikes.state(), "in_a_row": self.in_a_row}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint. Older checkpoints do not contain the count of bad steps."""
        self.spikes.restore(state)
        self.in_a_row = state.get("in_a_row", 0)

    def end_streak(self) -> None:
        """Reset the count of bad steps in a row, because a step updated the model."""
        self.in_a_row, self._any_good = 0, True

    def not_finite(self, iteration: int, norm: float, samples: str, why: str) -> None:
        """Count a step to skip. Raises TrainingError if the limit is exceeded."""
        self.in_a_row += 1
        step = f"iteration {iteration}: gradient norm {norm}; {why}; samples {samples}"
        if self.in_a_row > self._limit:
            note = self._note({"iteration": iteration, "samples": samples, "found": why})
            advice = f"Lower --lr, or resume and skip the data with --skip-samples {samples}, beside its other ranges."
            if not (self._any_good or self.spikes.losses):
                advice = "No step was good before: look at the model and its initial weights."
            raise TrainingError(
                f"{step}. {self.in_a_row} steps in a row were bad, --bad-step-limit is {self._limit}. {advice}{note}",
                samples,
            )
        self.messages.append(f"WARNING: {step}: step skipped ({self.in_a_row} of at most {self._limit} in a row)")

    def is_spike(self, iteration: int, loss: float, norm: float, samples: str) -> bool:
        """Return True if a finite step is to be skipped as a spike.

        After ``limit`` spikes in a row, the next one is accepted as the new ordinary level.
        """
        spike = self.spikes.judge(loss, norm)
        if spike and self.in_a_row < self._limit:
            self.in_a_row += 1
            self.messages.append(f"WARNING: iteration {iteration}: {spike}; samples {samples}: step skipped")
            return True
        if spike:
            after = f"after {self.in_a_row} skipped steps in a row (--bad-step-limit {self._limit})"
            self.messages.append(f"WARNING: iteration {iteration}: {spike} {after}: taken as ordinary from now on")
        self.spikes.add(loss, norm)
        return False

    def watch(self, iteration: int, loss: float, norm: float) -> None:
        """Report a spike without skipping the step. Called after the step, without --spike-skip."""
        spike = self.spikes.judge(loss, norm)
        if spike:
            self.messages.append(f"WARNING: iteration {iteration}: {spike}")
        self.spikes.add(loss, norm)

    def pop_messages(self) -> list[str]:
        """Return the lines for the log since the last call."""
        messages, self.messages = self.messages, []
        return messages

    def _note(self, content: Mapping[str, Any]) -> str:
        if self._folder is None:
            return ""
        path = self._folder / f"bad-batch-{content['iteration']:07d}.json"
        try:
            replace(path, (json.dumps(content, indent=1) + "\n").encode())
        except OSError as error:
            return f" {path} could not be written: {error}."
        return f" They are noted in {path}."


def make_bad_step_policy(config: Config) -> BadStepPolicy:
    """Return the policy for steps with non-finite gradients or spikes."""
    folder = at(config.checkpoint.save) if config.checkpoint.save else None
    reliability = config.reliability
    return BadStepPolicy(reliability.bad_step_limit, SpikeDetector(reliability.spike_sigmas), folder)
