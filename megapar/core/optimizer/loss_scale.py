"""Dynamic loss scaling for fp16 training.

Sources: Micikevicius et al. 2018, "Mixed Precision Training" (grow after a window of good steps, shrink on overflow).
The hysteresis is Megatron-LM's: the scale shrinks only at the Nth overflow, and the count restarts after each growth.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class LossScale:
    """The factor that keeps small fp16 gradients from underflowing.

    Attributes:
        factor: By which the scale grows and shrinks.
        window: Consecutive steps without overflow before the scale grows.
        hysteresis: Overflows before the scale shrinks.
        good_steps: Consecutive steps without overflow so far.
        chances: Overflows left before the scale shrinks.
    """

    value: float
    minimum: float
    factor: float
    window: int
    hysteresis: int
    good_steps: int = 0
    chances: int = field(default=-1)

    def __post_init__(self) -> None:
        if self.chances < 0:
            self.chances = self.hysteresis

    def update(self, *, overflow: bool) -> None:
        """Adjust the scale after a step."""
        if not overflow:
            self.good_steps += 1
            if self.good_steps >= self.window:  # a resumed run may have a shorter window
                self.value *= self.factor
                self.good_steps, self.chances = 0, self.hysteresis
            return
        self.good_steps = 0
        self.chances -= 1
        if self.chances <= 0:
            self.value = max(self.minimum, self.value / self.factor)

    @property
    def exhausted(self) -> bool:
        """True if the scale is at its minimum and cannot shrink after another overflow."""
        return self.value == self.minimum and self.chances <= 0

    def state(self) -> dict[str, float]:
        """Return the state that a checkpoint stores."""
        return {"value": self.value, "good_steps": self.good_steps, "chances": self.chances}

    def restore(self, state: dict[str, float]) -> None:
        """Restore the state from a checkpoint."""
        self.value = float(state["value"])
        self.good_steps, self.chances = int(state["good_steps"]), int(state["chances"])
