"""Loggers that run in a thread, so that training does not wait for a network."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from megapar.training.reports.isolated_logger import IsolatedLogger
from megapar.training.reports.logger import Logger
from megapar.training.reports.record import Record

MOST_WAITING = 10_000  # maximum number of calls in the queue; further records are dropped
CLOSE_SECONDS = 60.0  # how long the end of a run waits for the network


class BackgroundLogger(Logger):
    """Calls another logger from a thread, in order, isolated as by ``IsolatedLogger``.

    Args:
        name: Name for messages.
        logger: The logger.
        log_line: Writes a line to the log. Called from the thread, too.
        close_seconds: How long ``close`` waits for calls that are left.

    Attributes:
        lost: Number of dropped records.
    """

    def __init__(
        self, name: str, logger: Logger, log_line: Callable[[str], None], close_seconds: float = CLOSE_SECONDS
    ) -> None:
        self._name = name
        self._inner = IsolatedLogger(name, logger, log_line)
        self._log_line = log_line
        self._close_seconds = close_seconds
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"megapar-{name}", daemon=True)
        self.lost = 0

    @property
    def errors(self) -> int:
        """Number of failed calls and dropped records."""
        return self._inner.errors + self.lost

    def start(self, first_iteration: int, config: Mapping[str, Any]) -> None:
        """Start the thread, and the logger in it."""
        self._calls.put(partial(self._inner.start, first_iteration, config))
        self._thread.start()

    def log(self, record: Record) -> None:
        """Queue a record, or drop it if the queue is full."""
        if self._calls.qsize() < MOST_WAITING:
            self._calls.put(partial(self._inner.log, record))
        else:
            self.lost += 1

    def flush(self) -> None:
        """Queue a flush."""
        if self._calls.qsize() < MOST_WAITING:
            self._calls.put(self._inner.flush)

    def close(self) -> None:
        """Close the logger and end the thread, unless that takes longer than ``close_seconds``."""
        self._calls.put(self._inner.close)
        self._calls.put(None)
        self._thread.join(self._close_seconds)
        if self._thread.is_alive():
            self._log_line(f"WARNING: {self._name} did not finish within {self._close_seconds:g} s")
        if self.lost:
            self._log_line(f"WARNING: {self._name}: {self.lost} records were dropped")

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
