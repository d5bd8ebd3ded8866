"""How long a run will take yet, from the steps that were measured."""

from __future__ import annotations

from collections import deque

REPORTS = 20  # the newest ones count: a batch that grows and a slower node show within as many lines


class TimeLeft:
    """Hears of every report of steps, and says how long the others will take.

    The first step, which compiles, allocates and connects, never counts. Once there are two reports it is the time
    between them, evaluations and checkpoints included; before, the time of the steps of the first one.
    """

    def __init__(self) -> None:
        self._reports: deque[tuple[float, int]] = deque(maxlen=REPORTS + 1)
        self._first: list[float] = []

    def measured(self, seconds: float) -> None:
        """One step of the report that follows."""
        if not self._reports:
            self._first.append(seconds)

    def reported(self, now: float, iteration: int) -> None:
        """A report up to an iteration, at a time in seconds."""
        self._reports.append((now, iteration))

    def seconds(self, iteration: int, train_iters: int, now: float) -> float | None:
        """From ``now``, at which ``iteration`` is done; None while nothing was measured, and where nothing is left."""
        if iteration >= train_iters:
            return None
        if self._reports and iteration > self._reports[0][1]:
            then, done = self._reports[0]
            return (now - then) / (iteration - done) * (train_iters - iteration)
        steps = self._first[1:]
        return sum(steps) / len(steps) * (train_iters - iteration) if steps else None


def clock_text(seconds: float) -> str:
    """``0:05``, ``1:02:03`` or ``3 d 04:05:06``."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour:02}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"
