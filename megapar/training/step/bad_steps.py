"""Bad numbers: steps that are not finite or out of the ordinary, and how many of them a run puts up with."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megapar.errors import TrainingError

WINDOW = 128
LEAST = 16


@dataclass
class SpikeDetector:
    """Losses and gradient norms of the last steps, and whether a new one stands out of them.

    sigmas: standard deviations above the mean that make a spike; 0: nothing is one. Source: OLMo 2's step skipping.
    """

    sigmas: float
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    norms: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def judge(self, loss: float, norm: float) -> str:
        """What stands out, or ""."""
        if not self.sigmas or len(self.losses) < LEAST:
            return ""
        found = []
        for name, value, past in (("loss", loss, self.losses), ("gradient norm", norm, self.norms)):
            mean = sum(past) / len(past)
            deviation = math.sqrt(sum((x - mean) ** 2 for x in past) / len(past))
            # A flat history makes anything a spike: a thousandth of the mean is none.
            if value > mean + self.sigmas * max(deviation, 1e-3 * abs(mean)):
                found.append(f"{name} {value:.4g} where the last {len(past)} had {mean:.4g} +- {deviation:.2g}")
        return ", ".join(found)

    def add(self, loss: float, norm: float) -> None:
        """A step that counts as ordinary from now on."""
        self.losses.append(loss)
        self.norms.append(norm)

    def state(self) -> dict[str, list[float]]:
        """What a checkpoint keeps."""
        return {"losses": list(self.losses), "norms": list(self.norms)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's state."""
        self.losses.extend(state["losses"])
        self.norms.extend(state["norms"])


class BadStepPolicy:
    """Decides whether a step changes the model; the same on every rank, as its numbers are.

    limit: bad steps in a row that are skipped. folder: where the samples of the last one are noted; None: nowhere.
    messages: lines for the log, until they are popped.
    """

    def __init__(self, limit: int, spikes: SpikeDetector, folder: Path | None) -> None:
        self._limit = limit
        self._folder = folder
        self.spikes = spikes
        self.in_a_row = 0
        self.messages: list[str] = []

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {**self.spikes.state(), "in_a_row": self.in_a_row}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's state; older ones have no count of bad steps."""
        self.spikes.restore(state)
        self.in_a_row = state.get("in_a_row", 0)

    def end_streak(self) -> None:
        """Note that a step changed the model, which ends a row of bad ones."""
        self.in_a_row = 0

    def not_finite(self, iteration: int, norm: float, samples: str, why: str) -> None:
        """A step to skip. Raises TrainingError where it is one too many."""
        self.in_a_row += 1
        what = f"iteration {iteration}: gradient norm {norm}; {why}; samples {samples}"
        if self.in_a_row > self._limit:
            note = self._note({"iteration": iteration, "samples": samples, "found": why})
            raise TrainingError(
                f"{what}. {self.in_a_row} steps in a row were bad, --bad-step-limit is {self._limit}. Lower --lr, or "
                f"resume and step over the data by --skip-samples {samples}.{note}",
                samples,
            )
        self.messages.append(f"WARNING: {what}: step skipped ({self.in_a_row} of at most {self._limit} in a row)")

    def is_spike(self, iteration: int, loss: float, norm: float, samples: str) -> bool:
        """Whether a finite step is to be skipped as a spike; after the limit in a row it is the new ordinary."""
        spike = self.spikes.judge(loss, norm)
        if spike and self.in_a_row < self._limit:
            self.in_a_row += 1
            self.messages.append(f"WARNING: iteration {iteration}: {spike}; samples {samples}: step skipped")
            return True
        if spike:
            self.messages.append(f"WARNING: iteration {iteration}: {spike} again: taken as ordinary from now on")
        self.spikes.add(loss, norm)
        return False

    def watch(self, iteration: int, loss: float, norm: float) -> None:
        """Report a spike after the step, without --spike-skip."""
        spike = self.spikes.judge(loss, norm)
        if spike:
            self.messages.append(f"WARNING: iteration {iteration}: {spike}")
        self.spikes.add(loss, norm)

    def pop_messages(self) -> list[str]:
        """Return lines for the log since the last call."""
        messages, self.messages = self.messages, []
        return messages

    def _note(self, content: Mapping[str, Any]) -> str:
        if self._folder is None:
            return ""
        path = self._folder / f"bad-batch-{content['iteration']:07d}.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(content, indent=1) + "\n")
        except OSError as error:
            return f" {path} could not be written: {error}."
        return f" They are noted in {path}."
