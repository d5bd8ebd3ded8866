"""Estimate of the time that a run still needs, from the measured steps."""

from __future__ import annotations

from collections import deque

REPORTS = 20  # the newest ones count, so that a growing batch or a slower node shows within as many lines


class TimeLeft:
    """Estimates the time for the remaining steps from the reports so far.

    The first step does not count, because it compiles, allocates and connects. With two or more reports, the estimate
    uses the time between them, including evaluations and checkpoints. Before that it uses the steps of the first one.
    """

    def __init__(self) -> None:
        self._reports: deque[tuple[float, int]] = deque(maxlen=REPORTS + 1)
        self._first: list[float] = []

    def measured(self, seconds: float) -> None:
        """Add the seconds of a step that belongs to the next report."""
        if not self._reports:
            self._first.append(seconds)

    def reported(self, now: float, iteration: int) -> None:
        """Add a report of the steps up to ``iteration``, at the time ``now`` in seconds."""
        self._reports.append((now, iteration))

    def seconds(self, iteration: int, train_iters: int, now: float) -> float | None:
        """Return the seconds left at time ``now``, after ``iteration``. None before a measurement and at the end."""
        if iteration >= train_iters:
            return None
        if self._reports and iteration > self._reports[0][1]:
            then, done = self._reports[0]
            return (now - then) / (iteration - done) * (train_iters - iteration)
        steps = self._first[1:]
        return sum(steps) / len(steps) * (train_iters - iteration) if steps else None
