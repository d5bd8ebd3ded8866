"""Loggers that cannot end a run: what one cannot take is kept and given to it again."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable

from megapar.training.reports.record import Logger, Record

MOST_KEPT = 10_000  # records; the oldest of more are lost
LONGEST_PAUSE_SECONDS = 60.0


class PatientLogger:
    """A logger that is made anew after a failure, with the records it has not made safe.

    name: for people. make: a logger that begins at an iteration, and drops what an older one wrote from there on, as
    on a restart. say: where the first failure in a row, and its end, are told. clock: in seconds. errors: calls that
    failed; lost: records that nobody will get.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[int], Logger],
        first_iteration: int,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._make = make
        self._say = say
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
        """Write what is kept; after a failure not before a pause, which doubles up to a minute."""
        if not self._pause or self._clock() >= self._again:
            self._try()

    def close(self) -> None:
        """A last try."""
        if self._waiting or self._logger is None:
            self._try()
        if self._logger is not None:
            try:
                self._logger.close()
            except Exception as error:
                self._failed(error)
        if self._waiting or self.lost:
            self._say(f"WARNING: {self._name}: {len(self._waiting) + self.lost} records were never written")

    def _try(self) -> None:
        first = self._waiting[0].iteration if self._waiting else self._first
        try:
            if self._logger is None:
                self._logger = self._make(first)
            for record in self._waiting:
                self._logger.log(record)
            self._logger.flush()
        except Exception as error:  # whatever it is, training does not hang on a log
            self._failed(error)
            return
        if self._waiting:
            self._first = self._waiting[-1].iteration + 1
            self._waiting.clear()
        if self._pause:
            self._pause = 0.0
            self._say(f"{self._name}: written again" + (f", without {self.lost} records" if self.lost else ""))

    def _failed(self, error: Exception) -> None:
        self.errors += 1
        if not self._pause:
            self._say(
                f"WARNING: {self._name} cannot be written: {type(error).__name__}: {error}. Training goes on; "
                f"up to {MOST_KEPT:,} records are kept and tried again"
            )
        self._pause = min(LONGEST_PAUSE_SECONDS, 2 * self._pause or 1.0)
        self._again = self._clock() + self._pause
        broken, self._logger = self._logger, None
        if broken is not None:
            with contextlib.suppress(Exception):  # its buffers must not be written behind the next one's back
                broken.close()
