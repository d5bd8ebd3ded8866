"""Progress lines while a launcher waits, so that a job with a missing node is not silent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from megapar.health.stop.signal_listener import write_stderr

FIRST_SECONDS = 10.0
NEXT_SECONDS = 30.0


def nodes_of(handler: Any) -> str:
    """Return how many nodes have joined torch's c10d rendezvous, and how many it needs."""
    holder, settings = getattr(handler, "_state_holder", None), getattr(handler, "_settings", None)
    if holder is None or settings is None:
        return "the other nodes"
    minimum, maximum = settings.min_nodes, settings.max_nodes
    needed = f"{maximum}" if minimum == maximum else f"{minimum} to {maximum}"
    return f"nodes: {len(holder.state.participants)} of {needed} are present"


def limit_of(handler: Any) -> float | None:
    """Return the time limit of a rendezvous in seconds; None if its backend does not expose one."""
    settings = getattr(handler, "_settings", None)
    return None if settings is None else float(settings.timeout.join.total_seconds())


class Waiting:
    """Context manager that prints ``waiting for WHAT, 40 s of up to 600 s`` after 10 s and then every 30 s.

    Args:
        what: Returns WHAT; called for every line, on a separate thread.
        limit: Seconds after which the wait is given up; None if unknown.
        first_seconds: Time until the first line.
        next_seconds: Time between lines.
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()

    def _run(self) -> None:
        pause, next_pause = self._pauses
        while not self._done.wait(pause):
            pause = next_pause
            seconds = time.monotonic() - self._start
            write_stderr(f"megapar launch: waiting for {self._what()}, {seconds:.0f} s{self._limit}")
