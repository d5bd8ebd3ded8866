"""Who may ask a run to save or to stop: signals and the clock. All ranks hear of it in the same step."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopSignal:
    """The first SIGTERM, SIGINT or SIGUSR1 asks to stop; from then on each of them ends the process at once."""

    def __init__(self) -> None:
        self.received = 0

    def install(self) -> None:
        """Handle the signals of this process, from its main thread."""
        for number in SIGNALS:
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)  # by the system: a rank that hangs runs no handler


@dataclass(frozen=True)
class Limits:
    """When to save and to stop by the clock and by count; 0: never. save_minutes: between two saves."""

    save_minutes: float = 0.0
    exit_minutes: float = 0.0
    exit_interval: int = 0


class Control:
    """Asks and hears: ``votes`` of all ranks are summed, ``hear`` gets the sums, the same on every rank.

    leader: whether this rank's clock is the one that counts.
    """

    def __init__(self, limits: Limits, stop_signal: StopSignal | None, *, leader: bool) -> None:
        self._limits = limits
        self._signal = stop_signal or StopSignal()
        self._leader = leader
        self._started = self._saved = time.monotonic()
        self.stop = ""
        self.save = False

    def votes(self) -> list[int]:
        """This rank's: a signal came; time to stop; time to save."""
        minutes = (time.monotonic() - self._started) / 60
        since_save = (time.monotonic() - self._saved) / 60
        return [
            self._signal.received,
            int(self._leader and 0 < self._limits.exit_minutes <= minutes),
            int(self._leader and 0 < self._limits.save_minutes <= since_save),
        ]

    def hear(self, sums: Sequence[int]) -> None:
        """What all ranks asked for together. stop: why, where the run is to save and end now."""
        signalled, late, save = sums
        if signalled:
            self.stop = "asked to stop by a signal"
        elif late:
            self.stop = f"--exit-duration-minutes {self._limits.exit_minutes:g} are over"
        self.save = bool(save)

    def stepped(self, iteration: int) -> None:
        """A step was done."""
        if self._limits.exit_interval and iteration % self._limits.exit_interval == 0:
            self.stop = self.stop or f"--exit-interval {self._limits.exit_interval}"

    def saved(self) -> None:
        """A checkpoint was taken: the next one by the clock counts from here."""
        self._saved = time.monotonic()
        self.save = False
