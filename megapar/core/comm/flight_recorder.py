"""The flight recorder: the last collectives that this rank launched, which a report of a hang shows."""

from __future__ import annotations

import time
from collections import Counter, deque
from typing import NamedTuple


class LaunchRecord(NamedTuple):
    """A collective. number: of its axis, from 1. at: ``time.monotonic()`` of the launch."""

    axis: str
    number: int
    kind: str
    at: float

    def __str__(self) -> str:
        return f"{self.kind} {self.number} on {self.axis}"


class FlightRecorder:
    """A ring buffer of launches, and a count per axis of all launches since the start.

    recent: the last ``size`` launches, oldest first. counts: axis -> launches, whatever became of them.
    """

    def __init__(self, size: int = 64) -> None:
        self.recent: deque[LaunchRecord] = deque(maxlen=size)
        self.counts: Counter[str] = Counter()

    def note(self, axis: str, kind: str) -> None:
        """Record that a collective is about to be launched."""
        self.counts[axis] += 1
        self.recent.append(LaunchRecord(axis, self.counts[axis], kind, time.monotonic()))
