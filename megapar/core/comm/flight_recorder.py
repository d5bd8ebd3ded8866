"""The flight recorder: the last collectives that this rank launched, for the report of a hang."""

from __future__ import annotations

import time
from collections import Counter, deque
from typing import NamedTuple


class LaunchRecord(NamedTuple):
    """The launch of a collective.

    Attributes:
        axis: Name of the axis, or of its queue.
        number: Number of the launch on this axis, starting at 1.
        at: ``time.monotonic()`` of the launch, in seconds.
    """

    axis: str
    number: int
    kind: str
    at: float

    def __str__(self) -> str:
        return f"{self.kind} {self.number} on {self.axis}"


class FlightRecorder:
    """A ring buffer of launches, and the number of launches per axis since the start.

    Attributes:
        recent: The last ``size`` launches, oldest first.
        counts: Axis -> number of launches, finished or not.
    """

    def __init__(self, size: int = 64) -> None:
        self.recent: deque[LaunchRecord] = deque(maxlen=size)
        self.counts: Counter[str] = Counter()

    def note(self, axis: str, kind: str) -> None:
        """Record that a collective is about to be launched."""
        self.counts[axis] += 1
        self.recent.append(LaunchRecord(axis, self.counts[axis], kind, time.monotonic()))
