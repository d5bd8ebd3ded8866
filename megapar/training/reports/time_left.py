"""The time left of a run, from the steps, evaluations and saves that were measured."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping

from megapar.core.units import clock_text

STEPS = 100  # the newest ones count, so that a growing batch or a slower node shows


class TimeLeft:
    """Estimates the time for the remaining steps, and for the evaluations and saves between them.

    A step is measured on the host from the end of one to the end of the next, so that logging and other work between
    them counts. The first step does not, because it compiles, allocates and connects. A pause takes as long as the
    newest one of its name.

    Args:
        train_iters: Number of the last step.
        intervals: Steps between the pauses of a name; 0: not known, so that they count with the steps. One more comes
            at the end, unless it is due there anyway.
        iteration: Number of the last step before this start.
        clock: Returns seconds.
    """

    def __init__(
        self,
        train_iters: int,
        intervals: Mapping[str, int],
        iteration: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._train_iters, self._intervals, self._clock = train_iters, intervals, clock
        self._ends: deque[float] = deque(maxlen=STEPS + 1)  # of steps, without the seconds of pauses
        self._iteration, self._paused = iteration, 0.0
        self._newest: dict[str, float] = {}
        self._paused_at = dict.fromkeys(intervals, iteration)

    def stepped(self, iteration: int) -> None:
        """Add the end of a step, the one after the last."""
        self._iteration = iteration
        self._ends.append(self._clock() - self._paused)

    def paused(self, name: str, seconds: float) -> None:
        """Add an evaluation or a save after the newest step."""
        if self._intervals.get(name):
            self._newest[name], self._paused_at[name] = seconds, self._iteration
            self._paused += seconds

    def seconds(self) -> float | None:
        """Return the seconds that are left now. None before a measurement and at the end."""
        if len(self._ends) < 2 or self._iteration >= self._train_iters:
            return None
        first, last = self._ends[0], self._ends[-1]
        left = (last - first) / (len(self._ends) - 1) * (self._train_iters - self._iteration)
        left += sum(seconds * self._pauses_left(name) for name, seconds in list(self._newest.items()))
        return max(0.0, left - (self._clock() - self._paused - last))

    def __str__(self) -> str:
        seconds = self.seconds()
        return "-" if seconds is None else clock_text(seconds)

    def _pauses_left(self, name: str) -> int:
        interval = self._intervals[name]
        return -(-self._train_iters // interval) - self._paused_at[name] // interval
