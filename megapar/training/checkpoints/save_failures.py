"""Saves that failed in a row. Messages get more severe with each one, because more training steps are at risk."""

from __future__ import annotations

import time
from collections.abc import Callable

from megapar.core.units import clock_text


class SaveFailures:
    """Counts the failed saves of a run and words their messages. ``clock`` returns seconds.

    Attributes:
        in_a_row: Failed saves since the newest checkpoint that was written.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._newest = ""
        self.in_a_row = 0

    def saved(self, name: str) -> str:
        """Reset the count after a save. Returns a message about the failed saves before it, or ""."""
        missed, self.in_a_row = self.in_a_row, 0
        self._since, self._newest = self._clock(), name
        return f"checkpoints are written again: {missed} before {name} were not" if missed > 1 else ""

    def failed(self, name: str, error: BaseException) -> str:
        """Count a failed save and return the message for the log."""
        self.in_a_row += 1
        if self.in_a_row == 1:
            return f"WARNING: {name} was not saved: {error}"
        newest = f"the newest one is {self._newest}" if self._newest else "this start has not saved any"
        level = "WARNING" if self.in_a_row == 2 else "ERROR"
        return (
            f"{level}: {name} was not saved, the {_nth(self.in_a_row)} checkpoint in a row: {error}. For "
            f"{clock_text(self._clock() - self._since)} no checkpoint has been written; {newest}, and all training "
            "since then is lost if the run ends now"
        )


def _nth(number: int) -> str:
    suffix = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"
