"""Stragglers: the time each rank works in a step without waiting for others, and the ranks that are too slow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from megapar.core.comm.agreement import gather_numbers
from megapar.core.comm.axis import Axis

NOISE_SECONDS = 0.01
INTERVALS, STEPS = 3, 10  # minimum in a row before a rank is named, so that a short delay does not count


@dataclass(frozen=True)
class Pace:
    """Seconds of work in the median step of an interval, without waits: percentiles over ranks, and the slowest."""

    p50: float
    p90: float
    max: float
    slowest_rank: int

    def to_dict(self) -> dict[str, float]:
        """Return the fields for the metrics."""
        return {"p50": self.p50, "p90": self.p90, "max": self.max, "slowest_rank": self.slowest_rank}

    def stands_out(self, factor: float) -> bool:
        """Return True if the slowest rank takes over ``factor`` times as long as the median rank. 0 means never."""
        return factor > 0 and self.max > max(factor * self.p50, self.p50 + NOISE_SECONDS)


class Stragglers:
    """Names a rank that is slow for INTERVALS log intervals and STEPS steps in a row, once for as long as it lasts."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._rank = -1
        self._intervals = self._steps = 0
        self._named = False

    def update(self, pace: Pace, steps: int) -> str:
        """Add an interval of ``steps`` steps. Returns a warning for the log, or ""."""
        rank = pace.slowest_rank if pace.stands_out(self._factor) else -1
        if rank != self._rank:
            self._rank, self._intervals, self._steps, self._named = rank, 0, 0, False
        self._intervals += 1
        self._steps += steps
        if rank < 0 or self._named or self._intervals < INTERVALS or self._steps < STEPS:
            return ""
        self._named = True
        return (
            f"WARNING: rank {rank} is slow: {pace.max:.3f} s of own work in a step, {pace.p50:.3f} s in the median "
            f"rank, {pace.p90:.3f} s at the 90th percentile, for {self._steps} steps"
        )


def pace(seconds: Sequence[float], world: Axis, device: torch.device, launched: Sequence[int]) -> Pace:
    """Return the pace of all ranks. Every rank must call it with its seconds of work in each step of the interval.

    launched: See ``World``: the number by which a slow rank is named.
    """
    ordered = sorted(seconds)
    median = torch.tensor([ordered[(len(ordered) - 1) // 2]], dtype=torch.float32, device=device)
    medians = gather_numbers(median, world, "pace")
    found = summary([float(value.item()) for value in medians])
    return replace(found, slowest_rank=launched[found.slowest_rank])


def summary(medians: Sequence[float]) -> Pace:
    """Return the pace from the median step of every rank, in seconds."""
    ordered = sorted(medians)
    return Pace(
        p50=ordered[(len(ordered) - 1) // 2],
        p90=ordered[math.ceil(0.9 * (len(ordered) - 1))],
        max=ordered[-1],
        slowest_rank=medians.index(ordered[-1]),
    )
