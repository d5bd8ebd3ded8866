"""Learning rate and batch size schedules: pure functions of the progress."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType

from megapar.arguments import Config

# Share of the decay that has passed -> share of (peak - floor) that is left. Source: Megatron-LM's
# optimizer_param_scheduler.
DECAYS: Mapping[str, Callable[[float], float]] = MappingProxyType(
    {
        "linear": lambda share: 1.0 - share,
        "cosine": lambda share: 0.5 * (1.0 + math.cos(math.pi * share)),
        "exponential": lambda share: 2.0 * 0.5**share - 1.0,
        "minus_sqrt": lambda share: 1.0 - math.sqrt(share),
    }
)
INVERSE = "inverse-square-root"


@dataclass(frozen=True)
class LearningRate:
    """Linear warmup to ``peak``, then a decay to ``floor`` that ends after ``decay_iters`` optimizer steps.

    Attributes:
        peak: Highest learning rate.
        floor: Lowest learning rate.
        style: Constant, linear, cosine, inverse-square-root (of the steps since the start, equal to the peak at the end
            of the warmup) or wsd (warmup, stable, decay: constant until the last ``wsd_decay_iters``).
        warmup_iters: Optimizer steps of the warmup.
        decay_iters: Optimizer steps until the end of the decay, including the warmup.
        wsd_decay_iters: Optimizer steps of the decay of wsd.
        wsd_decay_style: Shape of the decay of wsd, a key of ``DECAYS``.
    """

    peak: float
    floor: float
    style: str
    warmup_iters: int
    decay_iters: int
    wsd_decay_iters: int = 0
    wsd_decay_style: str = "linear"

    def at(self, iteration: int) -> float:
        """Return the learning rate of optimizer step ``iteration``, counted from 0."""
        if iteration < self.warmup_iters:
            return self.peak * (iteration + 1) / self.warmup_iters
        if self.style == "constant":
            return self.peak
        if self.style == INVERSE and iteration <= self.decay_iters:
            return max(self.floor, self.peak * math.sqrt(max(1, self.warmup_iters) / max(1, iteration)))
        if iteration >= self.decay_iters:
            return self.floor
        start = self.decay_iters - self.wsd_decay_iters if self.style == "wsd" else self.warmup_iters
        if iteration < start:
            return self.peak
        share = (iteration - start) / max(1, self.decay_iters - start)
        left = DECAYS[self.wsd_decay_style if self.style == "wsd" else self.style](share)
        return self.floor + (self.peak - self.floor) * left

    def to_dict(self) -> dict[str, float | int | str]:
        """Return the fields for a checkpoint."""
        return asdict(self)


@dataclass(frozen=True)
class BatchSize:
    """Samples per optimizer step: ``final``, after a ramp from ``start`` in steps of ``increment``.

    Attributes:
        final: Samples per step after the ramp.
        start: Samples per step at the start of the ramp.
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
        return min(self.final, self.start + self.increment * (consumed_samples * steps // self.ramp_samples))


@dataclass(frozen=True)
class Progressive:
    """Progressive training: length, batch, learning rate and dropout grow together, as functions of the iteration.

    Source: ERNIE 3.0 (arXiv 2107.02137), section 3.3.

    Attributes:
        iters: Optimizer steps until the final values.
        length: Final number of tokens of a sample.
        length_step: The length is a multiple of this.
        batch: Final number of samples of a step.
        batch_step: The number of samples is a multiple of this.
    """

    iters: int
    length: int
    length_step: int
    batch: int
    batch_step: int

    def share(self, iteration: int) -> float:
        """Return the share of the final learning rate and dropout, in (0, 1]. ``iteration`` is counted from 0."""
        return min(1.0, (iteration + 1) / self.iters)

    def length_at(self, iteration: int) -> int:
        """Return the number of tokens of a sample, at least ``length_step``."""
        return self._grown(self.length, self.length_step, iteration)

    def batch_at(self, iteration: int) -> int:
        """Return the number of samples of the global batch, at least ``batch_step``."""
        return self._grown(self.batch, self.batch_step, iteration)

    def _grown(self, final: int, step: int, iteration: int) -> int:
        if iteration + 1 >= self.iters:
            return final
        return max(step, final * (iteration + 1) // self.iters // step * step)


def make_progressive(config: Config) -> Progressive | None:
    """Return the progressive training of the first steps, or None without it."""
    training = config.training
    if not training.progressive_iters:
        return None
    return Progressive(
        iters=training.progressive_iters,
        length=config.model.seq_length,
        length_step=training.progressive_length_multiple,
        batch=training.global_batch_size,
        batch_step=training.micro_batch_size * training.progressive_batch_multiple,
    )


def make_batch_size(config: Config) -> BatchSize:
    """Return the global batch size as a function of the consumed samples."""
    training = config.training
    if not training.rampup_batch_size:
        return BatchSize(training.global_batch_size)
    start, increment, samples = training.rampup_batch_size
    return BatchSize(training.global_batch_size, start, increment, samples)
