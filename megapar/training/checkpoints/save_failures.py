"""Checkpoints in a row that could not be written: told more plainly each time, as each one puts more steps at stake."""

from __future__ import annotations

import time
from collections.abc import Callable

from megapar.training.reports.time_left import clock_text


class SaveFailures:
    """Of one run. in_a_row: since the newest checkpoint that was written. clock: in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._newest = ""
        self.in_a_row = 0

    def saved(self, name: str) -> str:
        """One was written; what there is to say of those that were not, or ""."""
        missed, self.in_a_row = self.in_a_row, 0
        self._since, self._newest = self._clock(), name
        return f"checkpoints are written again: {missed} before {name} were not" if missed > 1 else ""

    def failed(self, name: str, error: BaseException) -> str:
        """One was not, and why; what people read of it."""
        self.in_a_row += 1
        if self.in_a_row == 1:
            return f"WARNING: {name} was not saved: {error}"
        newest = f"the newest one is {self._newest}" if self._newest else "there is none of this start"
        grave = "WARNING" if self.in_a_row == 2 else "ERROR"
        return (
            f"{grave}: {name} was not saved, the {_nth(self.in_a_row)} checkpoint in a row: {error}. For "
            f"{clock_text(self._clock() - self._since)} nothing has been written; {newest}, and whatever was trained "
            "since is lost if the run ends now"
        )


def _nth(number: int) -> str:
    suffix = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"
