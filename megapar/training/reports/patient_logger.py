"""Loggers whose failures do not end a run: unwritten records are kept and written later."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable

from megapar.training.reports.logger import Logger
from megapar.training.reports.record import Record

MOST_KEPT = 10_000  # maximum number of records; the oldest ones are dropped
LONGEST_PAUSE_SECONDS = 60.0


class PatientLogger(Logger):
    """A logger that is recreated after a failure, with the records that were not flushed yet.

    Args:
        name: Name for messages.
        make: Returns a logger that starts at an iteration. It drops records that an earlier one wrote from there on, as
            on a restart.
        first_iteration: The first iteration to log.
        log_line: Writes a line to the log, for the first of several failures in a row and for the recovery.
        clock: Returns seconds.

    Attributes:
        errors: Number of failed calls.
        lost: Number of dropped records.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[int], Logger],
        first_iteration: int,
        log_line: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._make = make
        self._log_line = log_line
        self._clock = clock
        self._first = first_iteration
        self._waiting: deque[Record] = deque()
        self._logger: Logger | None = None
        self._pause = 0.0
        self._again = 0.0
        self.errors = 0
        self.lost = 0
        self._try()

    def log(self, record: Record) -> None:
        """Keep a record until it is written."""
        self._waiting.append(record)
        if len(self._waiting) > MOST_KEPT:
            self._waiting.popleft()
            self.lost += 1

    def flush(self) -> None:
        """Write the kept records. After a failure it pauses first, for a time that doubles up to a minute."""
        if not self._pause or self._clock() >= self._again:
            self._try()

    def close(self) -> None:
        """Try to write the kept records a last time, and close the logger."""
        if self._waiting or self._logger is None:
            self._try()
        if self._logger is not None:
            try:
                self._logger.close()
            except Exception as error:
                self._failed(error)
        if self._waiting or self.lost:
            self._log_line(f"WARNING: {self._name}: {len(self._waiting) + self.lost} records were never written")

    def _try(self) -> None:
        first = self._waiting[0].iteration if self._waiting else self._first
        try:
            if self._logger is None:
                self._logger = self._make(first)
            for record in self._waiting:
                self._logger.log(record)
            self._logger.flush()
        except Exception as error:  # training must not depend on a log
            self._failed(error)
            return
        if self._waiting:
            self._first = self._waiting[-1].iteration + 1
            self._waiting.clear()
        if self._pause:
            self._pause = 0.0
            self._log_line(f"{self._name}: written again" + (f", without {self.lost} records" if self.lost else ""))

    def _failed(self, error: Exception) -> None:
        self.errors += 1
        if not self._pause:
            self._log_line(
                f"WARNING: {self._name} cannot be written: {type(error).__name__}: {error}. Training continues; "
                f"up to {MOST_KEPT:,} records are kept and written later"
            )
        self._pause = min(LONGEST_PAUSE_SECONDS, 2 * self._pause or 1.0)
        self._again = self._clock() + self._pause
        broken, self._logger = self._logger, None
        if broken is not None:
            with contextlib.suppress(Exception):  # flush its buffers now, not after the next logger has started
                broken.close()
