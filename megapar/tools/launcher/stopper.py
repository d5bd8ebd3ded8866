"""Stopping of ``megapar launch``: forwards one signal to the ranks, waits for them, and kills those that do not exit.

torch's agent takes no part in this: on a signal it would exit immediately and lose the statuses of its ranks.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megapar.health.stop.process import fields_of
from megapar.health.stop.signal_listener import AGAIN_SECONDS, STOPS, TYPED, Insistence, Listener, name_of, write_stderr

EXIT_SECONDS = 3.0  # for a launcher without ranks to exit by itself, before it is forced to
GONE_SECONDS = 30.0  # for killed ranks to disappear
MAX_KILLS = 3
FIRST_SECONDS, NEXT_SECONDS = 10.0, 30.0  # until the first line of a wait, and between lines


class Stopped(BaseException):
    """A signal that stopped a launcher without ranks. Not an Exception, which torch's wait loops might catch."""


class Stopper:
    """Forwards the first of SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGQUIT to the ranks as SIGTERM: they save and exit.

    It kills the ranks when the timeout expires, or at a second SIGINT or SIGQUIT 5 s or more after the first. Other
    repeated signals have no effect.

    Attributes:
        timeout_seconds: Time that ranks have to save and exit.
        on_stop: Called at the first signal, before it is forwarded.
        signal: Number of the first signal; 0 before it.
    """

    def __init__(self, timeout_seconds: float, end: Callable[[int], object] = os._exit) -> None:
        """Create a stopper. ``end`` ends, with a status, a launcher without ranks that does not return from C code."""
        self.timeout_seconds = timeout_seconds
        self.on_stop: Callable[[], None] = lambda: None
        self.signal = 0
        self._end = end
        self._is_stopping = False
        self._idle_phase = self._stopped_phase = ""
        self._status = 1
        self._starting = threading.Lock()
        self._insistence = Insistence()
        self._due: float | None = None
        self._kills = 0
        self._listener = Listener(self._handle, self._handle_on_main_thread, lambda: self._due)

    @property
    def ranks_seconds(self) -> float:
        """Timeout for the ranks. It is a little shorter than the launcher's, so that a hanging rank can report where
        it hangs before it is killed.
        """
        return max(0.9 * self.timeout_seconds, self.timeout_seconds - 5.0)

    def install(self) -> None:
        """Start to handle the signals of this process. Call it on the main thread."""
        self._listener.install(STOPS)

    def close(self) -> None:
        """Stop handling signals, after the ranks have exited."""
        self._listener.close()

    @contextmanager
    def idle(self, phase: str) -> Iterator[None]:
        """Mark a phase without ranks, in which a signal ends the launcher at once. Raises Stopped, naming the phase."""
        self._idle_phase = phase
        try:
            self._raise_if_stopped()
            yield
        finally:
            self._idle_phase = ""

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Delay signals until all ranks have started. Raises Stopped if a signal arrived earlier."""
        with self._starting:
            self._idle_phase = "starting the ranks"
            self._raise_if_stopped()
            self._idle_phase = ""
            yield

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Mark the phase in which only other nodes' ranks still run: at a timeout the launcher then exits with 0."""
        self._status = 0
        yield
        self._status = 1

    def _handle_on_main_thread(self, number: int) -> None:
        self.signal = self.signal or number
        self._raise_if_stopped()

    def _raise_if_stopped(self) -> None:
        if self.signal and self._idle_phase:
            self._stopped_phase, self._idle_phase = self._idle_phase, ""
            raise Stopped(f"{name_of(self.signal)} while {self._stopped_phase}; exiting, no ranks were running")

    def _handle(self, number: int) -> None:
        now = time.monotonic()
        if not number:
            self._kill(now, f"--stop-timeout {self.timeout_seconds:g} has expired")
        elif self._insistence.add(number, now):
            self._kill(now, f"{name_of(number)} again")
        elif not self._is_stopping:
            self._is_stopping = True
            self.signal = self.signal or number
            self._forward(number, now)
        elif number in TYPED:
            write_stderr(
                f"megapar launch: already stopping; repeat the signal after {AGAIN_SECONDS:g} s to end at once without "
                "saving"
            )

    def _forward(self, number: int, now: float) -> None:
        if self._idle_phase or self._stopped_phase:
            self._due = now + EXIT_SECONDS
            return
        self.on_stop()
        self._due = now + self.timeout_seconds
        write_stderr(
            f"megapar launch: {name_of(number)}: ranks have {self.timeout_seconds:g} s to save and exit "
            "(--stop-timeout)"
        )
        with self._starting:
            signal_children(signal.SIGTERM)

    def _kill(self, now: float, why: str) -> None:
        """Kill the ranks. End the launcher itself if no ranks are left and it is still running."""
        ranks = list(_ranks())
        phase = self._idle_phase or self._stopped_phase
        if phase or self._kills >= MAX_KILLS or (not ranks and (self._kills or not self._status)):
            write_stderr(f"megapar launch: {name_of(self.signal)}" + f" while {phase}" * bool(phase) + "; exiting")
            self._end(self._status)
            self._due = None
            return
        if not self._kills:
            write_stderr(f"megapar launch: {why}: killing {len(ranks)} ranks")
        self._kills += 1
        self._due = now + GONE_SECONDS
        signal_children(signal.SIGKILL)


def signal_children(number: signal.Signals) -> None:
    """Send a signal to the ranks."""
    for pid in _ranks():
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _ranks() -> Iterator[int]:
    """Yield the ranks' process numbers. Unlike other children of this process, each rank leads a session."""
    for pid in children(os.getpid()):
        try:
            if os.getsid(pid) == pid:
                yield pid
        except ProcessLookupError:
            continue


def children(parent: int) -> list[int]:
    """Return the direct children of a process, read from /proc: the agent does not expose its ranks' numbers."""
    pids = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state_and_parent = fields_of(int(entry.name))
        except OSError:
            continue
        if int(state_and_parent[1]) == parent:
            pids.append(int(entry.name))
    return pids


class Waiting:
    """Context manager that prints ``waiting for WHAT, 40 s of up to 600 s`` after 10 s and then every 30 s.

    Args:
        what: Returns WHAT; called for every line, on a separate thread.
        limit: Seconds after which the wait is given up; None if unknown.
    """

    def __init__(
        self,
        what: Callable[[], str],
        limit: float | None = None,
        *,
        first_seconds: float = FIRST_SECONDS,
        next_seconds: float = NEXT_SECONDS,
    ) -> None:
        self._what = what
        self._limit = "" if limit is None else f" of up to {limit:.0f} s"
        self._pauses = first_seconds, next_seconds
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="megapar-waiting", daemon=True)

    def __enter__(self) -> None:
        self._start = time.monotonic()
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()

    def _run(self) -> None:
        pause, next_pause = self._pauses
        while not self._done.wait(pause):
            pause = next_pause
            seconds = time.monotonic() - self._start
            write_stderr(f"megapar launch: waiting for {self._what()}, {seconds:.0f} s{self._limit}")
