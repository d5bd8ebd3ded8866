"""How ``megapar launch`` stops: it tells its ranks once, waits for them, and kills those that do not end.

Torch's agent has no part in that: it would end at once on a signal and forget how its ranks ended.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megapar.core.health.process import fields_of
from megapar.core.health.signal_listener import AGAIN_SECONDS, STOPS, TYPED, Insistence, Listener, name_of, write_stderr

LEAVE_SECONDS = 3.0  # for a launcher without ranks to end by itself, before it is made to
KILL_SECONDS = 30.0  # for ranks that were killed to be gone
MOST_KILLS = 3


class Stopped(BaseException):
    """A launcher without ranks was asked to stop. No Exception, which torch's loops of waiting might keep."""


class Stopper:
    """Passes the first of SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGQUIT on to the ranks as SIGTERM: they save and end.

    The time-out kills them, and so does a second SIGINT or SIGQUIT, 5 s or more after the first; other signals change
    nothing more. when_asked: called at the first signal, before it is passed on. end: ends a launcher without ranks
    that does not come back from C code.
    """

    def __init__(self, timeout_seconds: float, end: Callable[[int], object] = os._exit) -> None:
        self.timeout_seconds = timeout_seconds
        self.when_asked: Callable[[], None] = lambda: None
        self.asked = 0
        self._end = end
        self._told = False
        self._idle = self._left = ""
        self._status = 1
        self._starting = threading.Lock()
        self._insistence = Insistence()
        self._due: float | None = None
        self._kills = 0
        self._listener = Listener(self._on_signal, self._on_main_thread, lambda: self._due)

    @property
    def ranks_seconds(self) -> float:
        """What is left to ranks: those that hang say where, a little before they are killed."""
        return max(0.9 * self.timeout_seconds, self.timeout_seconds - 5.0)

    def install(self) -> None:
        """Hear the signals of this process from now on, from its main thread."""
        self._listener.install(STOPS)

    def close(self) -> None:
        """Hear no more: the ranks have ended."""
        self._listener.close()

    @contextmanager
    def idle(self, doing: str) -> Iterator[None]:
        """While there are no ranks: a signal ends the launcher at once. Raises Stopped, which tells of ``doing``."""
        self._idle = doing
        try:
            self._leave_if_asked()
            yield
        finally:
            self._idle = ""

    @contextmanager
    def starting(self) -> Iterator[None]:
        """While ranks are started: a signal waits for all of them to be there. Raises Stopped where one came before."""
        with self._starting:
            self._idle = "ranks were started"
            self._leave_if_asked()
            self._idle = ""
            yield

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """While the ranks of this node have ended well and others have not: the time-out ends the launcher by 0."""
        self._status = 0
        yield
        self._status = 1

    def _on_main_thread(self, number: int) -> None:
        self.asked = self.asked or number
        self._leave_if_asked()

    def _leave_if_asked(self) -> None:
        if self.asked and self._idle:
            self._left, self._idle = self._idle, ""
            raise Stopped(f"{name_of(self.asked)} while {self._left}: ends; no ranks were there")

    def _on_signal(self, number: int) -> None:
        now = time.monotonic()
        if not number:
            self._kill(now, f"--stop-timeout {self.timeout_seconds:g} is over")
        elif self._insistence.add(number, now):
            self._kill(now, f"{name_of(number)} again")
        elif not self._told:
            self._told = True
            self.asked = self.asked or number
            self._pass_on(number, now)
        elif number in TYPED:
            write_stderr(f"megapar launch: stopping already; again in {AGAIN_SECONDS:g} s ends it at once, unsaved")

    def _pass_on(self, number: int, now: float) -> None:
        if self._idle or self._left:
            self._due = now + LEAVE_SECONDS
            return
        self.when_asked()
        self._due = now + self.timeout_seconds
        write_stderr(
            f"megapar launch: {name_of(number)}: ranks save and end within {self.timeout_seconds:g} s (--stop-timeout)"
        )
        with self._starting:
            signal_children(signal.SIGTERM)

    def _kill(self, now: float, why: str) -> None:
        """Kill the ranks; end the launcher itself where it has none left and is still here."""
        ranks = list(_ranks())
        idle = self._idle or self._left
        if idle or self._kills >= MOST_KILLS or (not ranks and (self._kills or not self._status)):
            write_stderr(f"megapar launch: {name_of(self.asked)}" + f" while {idle}" * bool(idle) + ": ends")
            self._end(self._status)
            self._due = None
            return
        if not self._kills:
            write_stderr(f"megapar launch: {why}: {len(ranks)} ranks are killed")
        self._kills += 1
        self._due = now + KILL_SECONDS
        signal_children(signal.SIGKILL)


def signal_children(number: signal.Signals) -> None:
    """Send a signal to the ranks."""
    for pid in _ranks():
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _ranks() -> Iterator[int]:
    """Each leads a session of its own, unlike other children of this process."""
    for pid in children(os.getpid()):
        try:
            if os.getsid(pid) == pid:
                yield pid
        except ProcessLookupError:
            continue


def children(parent: int) -> list[int]:
    """Direct children by /proc; ranks are started by the agent, which does not show their numbers."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state_and_parent = fields_of(int(entry.name))
        except OSError:
            continue
        if int(state_and_parent[1]) == parent:
            found.append(int(entry.name))
    return found
