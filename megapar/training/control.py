"""Who may ask a run to save or to stop: signals and the clock. All ranks hear of it in the same step."""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megapar.config.launched import stop_timeout
from megapar.core.listener import Insistence, Listener, name_of, takes_text, tell


class StopSignal:
    """The first SIGTERM, SIGINT, SIGHUP, SIGUSR1 or SIGQUIT asks to stop, which ``received`` then says.

    A second SIGINT or SIGQUIT, 5 s or more after the first, ends the process at once; others change nothing. A main
    thread that does not come back from C code ends with the process after ``--stop-timeout``, as its launcher has it.
    end: what then ends the process.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ, end: Callable[[int], object] = os._exit) -> None:
        self.received = 0
        self._timeout_seconds = stop_timeout(environ)
        self._rank = environ.get("RANK", "0")
        self._end = end
        self._insistence = Insistence()
        self._deadline: float | None = None
        self._back = False
        self._listener = Listener(self._hear, self._notice, lambda: self._deadline)

    def install(self) -> None:
        """Hear the signals of this process, from its main thread."""
        self._listener.install()

    def close(self) -> None:
        """Hear no more, from the main thread."""
        self._listener.close()

    def _notice(self, number: int) -> None:
        self.received = self.received or number
        self._back = True

    def _hear(self, number: int) -> None:
        now = time.monotonic()
        if not number:
            self._deadline = None
            if not self._back:
                self._give_up()
        elif self._insistence.hear(number, now):
            tell(f"rank {self._rank}: {name_of(number)} again: ends at once, unsaved since its last checkpoint")
            self._end(1)
        elif self._deadline is None and not self._back:
            self.received = self.received or number
            self._deadline = now + self._timeout_seconds

    def _give_up(self) -> None:
        asked = f"asked to stop by {name_of(self.received)} {self._timeout_seconds:g} s ago (--stop-timeout)"
        tell(f"rank {self._rank}: {asked}, and stuck since; ends, where it stands:")
        if takes_text():
            faulthandler.dump_traceback(sys.__stderr__ or 2)
        self._end(1)


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
