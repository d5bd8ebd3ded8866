"""The dynamic loss scale of fp16 training.

Sources: Micikevicius et al. 2018, "Mixed Precision Training" (grow after a window of good steps, shrink on overflow);
the hysteresis is Megatron-LM's: so many overflows are passed over before the scale shrinks, anew after each growth.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class LossScale:
    """The factor that keeps small fp16 gradients from vanishing.

    value: the scale now. minimum: it never falls below. factor: it grows and shrinks by. window: steps in a row without
    overflow before it grows. hysteresis: overflows before it shrinks. good_steps, chances: counters of the two.
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
        """Note how a step went."""
        if not overflow:
            self.good_steps += 1
            if self.good_steps == self.window:
                self.value *= self.factor
                self.good_steps, self.chances = 0, self.hysteresis
            return
        self.good_steps = 0
        self.chances -= 1
        if self.chances <= 0:
            self.value = max(self.minimum, self.value / self.factor)

    @property
    def exhausted(self) -> bool:
        """Whether an overflow cannot be answered by a smaller scale any more."""
        return self.value == self.minimum and self.chances <= 0

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"value": self.value, "good_steps": self.good_steps, "chances": self.chances}

    def restore(self, state: dict[str, float]) -> None:
        """Go on from a checkpoint's state."""
        self.value = float(state["value"])
        self.good_steps, self.chances = int(state["good_steps"]), int(state["chances"])
