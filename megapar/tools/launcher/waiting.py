"""Says what a launcher waits for, so that a job that lacks a node is not silent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from megapar.core.health.signal_listener import write_stderr

FIRST_SECONDS = 10.0
NEXT_SECONDS = 30.0


def nodes_of(handler: Any) -> str:
    """How many nodes have come to a rendezvous of torch's c10d kind, and how many it wants."""
    holder, settings = getattr(handler, "_state_holder", None), getattr(handler, "_settings", None)
    if holder is None or settings is None:
        return "the other nodes"
    least, most = settings.min_nodes, settings.max_nodes
    wanted = f"{most}" if least == most else f"{least} to {most}"
    return f"nodes: {len(holder.state.participants)} of {wanted} are there"


def limit_of(handler: Any) -> float | None:
    """After how many seconds it gives up; None where it does not say."""
    settings = getattr(handler, "_settings", None)
    return None if settings is None else float(settings.timeout.join.total_seconds())


class Waiting:
    """While it is entered, a line after 10 s and every 30 s: ``waiting for WHAT, 40 s of up to 600 s``.

    what: asked anew for every line, on a thread of its own. limit: seconds after which the wait is given up; None: not
    known.
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
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="megapar-waiting", daemon=True)

    def __enter__(self) -> None:
        self._start = time.monotonic()
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()

    def _run(self) -> None:
        pause, following = self._pauses
        while not self._over.wait(pause):
            pause = following
            seconds = time.monotonic() - self._start
            write_stderr(f"megapar launch: waiting for {self._what()}, {seconds:.0f} s{self._limit}")
