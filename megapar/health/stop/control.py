"""Requests to save or to stop a run, by signals and by the clock. All ranks act on them in the same step."""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from collections.abc import Sequence

from megapar.config.run import CheckpointOptions
from megapar.health.stop.signal_listener import Insistence, Listener, name_of, takes_text, write_stderr
from megapar.launch_environment import stop_timeout

FIRST_STEP_SECONDS = 15.0  # from a signal in the first step to the end of the process


class StopSignal:
    """Treats the first SIGTERM, SIGINT, SIGHUP, SIGUSR1 or SIGQUIT as a request to stop.

    A second SIGINT or SIGQUIT, 5 s or more after the first, ends the process at once. Other signals are ignored. If the
    main thread does not return from C code within the launcher's ``--stop-timeout``, the process ends; within seconds
    it does in its first step, when there is nothing to save.
    """

    def __init__(self) -> None:
        self._received, self._asked_for = 0, False
        self._timeout_seconds = stop_timeout(os.environ)
        self._rank = os.environ.get("RANK") or "0"
        self._insistence = Insistence()
        self._deadline: float | None = None
        self._back = False
        self._listener = Listener(self._on_signal, self._on_main_thread, lambda: self._deadline)

    def poll(self) -> int:
        """Return the number of the first signal, 0 before one. The main thread asks after each step.

        From then on, a signal waits for the end of a step, however long that takes, up to the launcher's limit.
        """
        self._asked_for = True
        return self._received

    def install(self) -> None:
        """Install the signal handlers. Call it from the main thread."""
        self._listener.install()

    def close(self) -> None:
        """Restore the previous signal handlers. Call it from the main thread."""
        self._listener.close()

    def _on_main_thread(self, number: int) -> None:
        self._received = self._received or number
        self._back = True

    def _on_signal(self, number: int) -> None:
        now = time.monotonic()
        if not number:
            self._deadline = None
            if not (self._back and self._asked_for):
                self._give_up()
        elif self._insistence.add(number, now):
            write_stderr(f"rank {self._rank}: {name_of(number)} again: ends at once, unsaved since its last checkpoint")
            os._exit(1)
        elif self._deadline is None and not (self._back and self._asked_for):
            self._received = self._received or number
            if not self._asked_for:
                self._timeout_seconds = min(self._timeout_seconds, FIRST_STEP_SECONDS)
            self._deadline = now + self._timeout_seconds

    def _give_up(self) -> None:
        request = f"asked to stop by {name_of(self._received)} {self._timeout_seconds:g} s ago (--stop-timeout)"
        write_stderr(f"rank {self._rank}: {request}, and stuck since; the process ends here:")
        if takes_text():
            faulthandler.dump_traceback(sys.__stderr__ or 2)
        os._exit(1)


class Control:
    """Decides on all ranks together when to save and stop: their ``votes`` are summed and passed to ``apply_votes``.

    Args:
        options: The times and steps at which to save or stop.
        stop_signal: Source of stop requests. None: this process's signals are not handled.
        leader: True on the rank whose clock counts.

    Attributes:
        stop: The reason to save and end now. "" to continue.
        save: True if a checkpoint is due.
    """

    def __init__(self, options: CheckpointOptions, stop_signal: StopSignal | None, *, leader: bool) -> None:
        self._options = options
        self._signal = stop_signal or StopSignal()
        self._leader = leader
        self._started = self._saved = time.monotonic()
        self.stop = self._asked = ""
        self.save = False

    def ask(self, reason: str) -> None:
        """Vote for a stop at the next step. The first reason on a rank stays."""
        self._asked = self._asked or reason

    def votes(self) -> list[int]:
        """Return this rank's votes: a signal was received; it is time to stop; it is time to save; it was asked."""
        minutes = (time.monotonic() - self._started) / 60
        since_save = (time.monotonic() - self._saved) / 60
        return [
            self._signal.poll(),
            int(self._leader and 0 < self._options.exit_duration_minutes <= minutes),
            int(self._leader and 0 < self._options.save_interval_minutes <= since_save),
            int(bool(self._asked)),
        ]

    def apply_votes(self, sums: Sequence[int]) -> None:
        """Set ``stop`` and ``save`` from the sums of all ranks' votes, the same on every rank."""
        signalled, time_is_over, save, asked = sums
        if signalled:
            self.stop = "asked to stop by a signal"
        elif time_is_over:
            self.stop = f"--exit-duration-minutes {self._options.exit_duration_minutes:g} are over"
        elif asked:
            self.stop = self._asked or "a callback of another rank asked for it"
        self.save = bool(save)

    def stepped(self, iteration: int) -> None:
        """Set ``stop`` after a step if its iteration is a multiple of --exit-interval."""
        if self._options.exit_interval and iteration % self._options.exit_interval == 0:
            self.stop = self.stop or f"--exit-interval {self._options.exit_interval}"

    def saved(self) -> None:
        """Restart the clock of --save-interval-minutes, after a save."""
        self._saved = time.monotonic()
        self.save = False
