"""Slow ranks: how long each rank works of its own in a step, without waiting for others, and who stands out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megapar.core.axis import Axis

NOISE_SECONDS = 0.01


@dataclass(frozen=True)
class Pace:
    """Seconds of own work in the median step of an interval: percentiles over ranks, and the slowest rank."""

    p50: float
    p90: float
    max: float
    slowest_rank: int

    def to_dict(self) -> dict[str, float]:
        """As metrics have it."""
        return {"p50": self.p50, "p90": self.p90, "max": self.max, "slowest_rank": self.slowest_rank}

    def warning(self, factor: float) -> str:
        """What there is to say where the slowest rank takes ``factor`` times the median rank; else ""."""
        if not factor or self.max <= max(factor * self.p50, self.p50 + NOISE_SECONDS):
            return ""
        return (
            f"WARNING: rank {self.slowest_rank} is slow: {self.max:.3f} s of own work in a step, {self.p50:.3f} s in "
            f"the median rank, {self.p90:.3f} s at the 90th percentile"
        )


def pace(seconds: Sequence[float], world: Axis, device: torch.device) -> Pace:
    """The pace of all ranks; every rank calls it. seconds: this rank's own work in each step of the interval."""
    ordered = sorted(seconds)
    own = torch.tensor([ordered[(len(ordered) - 1) // 2]], dtype=torch.float32, device=device)
    medians = [own.clone() for _ in world.ranks]
    if world.group is not None:
        dist.all_gather(medians, own, group=world.group)
    return summary([float(value.item()) for value in medians])


def summary(medians: Sequence[float]) -> Pace:
    """Of every rank's median step."""
    ordered = sorted(medians)
    return Pace(
        p50=ordered[(len(ordered) - 1) // 2],
        p90=ordered[math.ceil(0.9 * (len(ordered) - 1))],
        max=ordered[-1],
        slowest_rank=medians.index(ordered[-1]),
    )
