"""Loggers whose failures do not end a run and whose network does not delay it."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megapar.files.uri import masked
from megapar.training.reports.logger import Logger
from megapar.training.reports.record import Record

MOST_KEPT = 10_000  # maximum number of records, or of calls in a queue, that wait to be written
LONGEST_PAUSE_SECONDS = 60.0
CLOSE_SECONDS = 60.0  # how long the end of a run waits for the network


@dataclass(eq=False)
class GuardedLogger(Logger):
    """Calls another logger, reports its first exception and continues. One that cannot start gets no records.

    Attributes:
        log_line: Writes a line to the log. With a queue, it is called from the thread, too.
        queued: Make the calls from a thread, in order. Records that do not fit into the queue are dropped.
        close_seconds: How long ``close`` waits for calls that are left in the queue.
    """

    name: str
    logger: Logger
    log_line: Callable[[str], None]
    queued: bool = field(default=False, kw_only=True)
    close_seconds: float = field(default=CLOSE_SECONDS, kw_only=True)

    def __post_init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        run = threading.Thread(target=self._run, name=f"megapar-{self.name}", daemon=True)
        self._thread = run if self.queued else None
        self._started = False
        self._failures = 0
        self.lost = 0

    @property
    def errors(self) -> int:
        """Number of failed calls and dropped records."""
        return self._failures + self.lost

    def start(self, first_iteration: int, config: Mapping[str, Any]) -> None:
        """Start the thread, if there is one, and the logger in it."""
        if self._thread is not None:
            self._thread.start()
        self._make(partial(self._begin, first_iteration, config))

    def log(self, record: Record) -> None:
        """Log one iteration, or drop it if the queue is full."""
        if self._calls.qsize() < MOST_KEPT:
            self._make(partial(self._guard, partial(self.logger.log, record)))
        else:
            self.lost += 1

    def flush(self) -> None:
        """Flush the logger."""
        if self._calls.qsize() < MOST_KEPT:
            self._make(partial(self._guard, self.logger.flush))

    def close(self) -> None:
        """Close the logger and end the thread, unless that takes longer than ``close_seconds``."""
        self._make(self._end)
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join(self.close_seconds)
            if self._thread.is_alive():
                self.log_line(f"WARNING: {self.name} did not finish within {self.close_seconds:g} s")
            if self.lost:
                self.log_line(f"WARNING: {self.name}: {self.lost} records were dropped")

    def _make(self, call: Callable[[], object]) -> None:
        if self._thread is None:
            call()
        else:
            self._calls.put(call)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def _begin(self, first_iteration: int, config: Mapping[str, Any]) -> None:
        self._started = True
        self._guard(lambda: self.logger.start(first_iteration, config))
        self._started = not self._failures

    def _end(self) -> None:
        self._guard(self.logger.close)
        if self._failures > 1:
            self.log_line(f"WARNING: {self.name}: {self._failures} calls failed")

    def _guard(self, call: Callable[[], None]) -> None:
        """Call a method of the logger, if it has started."""
        if not self._started:
            return
        try:
            call()
        except Exception as error:  # training must not depend on a log
            self._failures += 1
            if self._failures == 1:
                text = masked(f"{type(error).__name__}: {error}")
                self.log_line(f"WARNING: {self.name}: {text}. Training continues")


@dataclass(eq=False)
class RetriedLogger(Logger):
    """A logger of a file that is made again after a failure, with the records that were not flushed yet.

    Attributes:
        make: Returns a logger that starts at an iteration. It drops records that an earlier one wrote from there on, as
            on a restart.
        log_line: Writes a line to the log, for the first of several failures in a row and for the recovery.
    """

    name: str
    make: Callable[[int], Logger]
    first_iteration: int
    log_line: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._unwritten: deque[Record] = deque()
        self._logger: Logger | None = None
        self._pause_seconds = 0.0
        self._retry_time = 0.0
        self.errors = 0
        self.lost = 0
        self._write()

    def log(self, record: Record) -> None:
        """Keep a record until it is written."""
        self._unwritten.append(record)
        if len(self._unwritten) > MOST_KEPT:
            self._unwritten.popleft()
            self.lost += 1

    def flush(self) -> None:
        """Write the kept records. After a failure it pauses first, for a time that doubles up to a minute."""
        if not self._pause_seconds or self.clock() >= self._retry_time:
            self._write()

    def close(self) -> None:
        """Try to write the kept records a last time, and close the logger."""
        if self._unwritten or self._logger is None:
            self._write()
        if self._logger is not None:
            try:
                self._logger.close()
            except Exception as error:
                self._fail(error)
        if self._unwritten or self.lost:
            self.log_line(f"WARNING: {self.name}: {len(self._unwritten) + self.lost} records were never written")

    def _write(self) -> None:
        first = self._unwritten[0].iteration if self._unwritten else self.first_iteration
        try:
            if self._logger is None:
                self._logger = self.make(first)
            for record in self._unwritten:
                self._logger.log(record)
            self._logger.flush()
        except Exception as error:  # training must not depend on a log
            self._fail(error)
            return
        if self._unwritten:
            self.first_iteration = self._unwritten[-1].iteration + 1
            self._unwritten.clear()
        if self._pause_seconds:
            self._pause_seconds = 0.0
            self.log_line(f"{self.name}: written again" + (f", without {self.lost} records" if self.lost else ""))

    def _fail(self, error: Exception) -> None:
        self.errors += 1
        if not self._pause_seconds:
            self.log_line(
                f"WARNING: {self.name} cannot be written: {type(error).__name__}: {error}. Training continues; "
                f"up to {MOST_KEPT:,} records are kept and written later"
            )
        self._pause_seconds = min(LONGEST_PAUSE_SECONDS, 2 * self._pause_seconds or 1.0)
        self._retry_time = self.clock() + self._pause_seconds
        broken, self._logger = self._logger, None
        if broken is not None:
            with contextlib.suppress(Exception):  # flush its buffers now, not after the next logger has started
                broken.close()
