"""The global batch size as a function of the consumed samples, with a ramp."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BatchSize:
    """Samples per optimizer step: ``final``, after a ramp from ``start`` in steps of ``increment``.

    Attributes:
        increment: Samples per step that each stage of the ramp adds.
        ramp_samples: Consumed samples at the end of the ramp. 0 turns it off.
    """

    final: int
    start: int = 0
    increment: int = 0
    ramp_samples: int = 0

    def at(self, consumed_samples: int) -> int:
        """Return the global batch size of the step that starts after ``consumed_samples``."""
        if not self.ramp_samples or consumed_samples >= self.ramp_samples:
            return self.final
        steps = (self.final - self.start) // self.increment
        grown = self.start + self.increment * (consumed_samples * steps // self.ramp_samples)
        return min(self.final, max(grown, min(self.start, self.final)))  # above 0 if a rule refuses the ramp, too

    def after(self, consumed_samples: int, steps: int) -> int:
        """Return the samples that are consumed ``steps`` steps after ``consumed_samples``."""
        while steps and consumed_samples < self.ramp_samples:
            consumed_samples, steps = consumed_samples + self.at(consumed_samples), steps - 1
        return consumed_samples + steps * self.final

    def steps_until(self, consumed_samples: int, target: int) -> int:
        """Return the fewest steps after which at least ``target`` samples are consumed."""
        steps = 0
        while consumed_samples < min(target, self.ramp_samples):
            consumed_samples, steps = consumed_samples + self.at(consumed_samples), steps + 1
        return steps + max(0, -(-(target - consumed_samples) // self.final))
