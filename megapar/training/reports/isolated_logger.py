"""Loggers whose exceptions do not end a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megapar.training.reports.logger import Logger
from megapar.training.reports.record import Record


class IsolatedLogger(Logger):
    """Calls another logger, reports its first exception and goes on. One that cannot start gets no records.

    Args:
        name: Name for messages.
        logger: The logger.
        log_line: Writes a line to the log.

    Attributes:
        errors: Number of failed calls.
    """

    def __init__(self, name: str, logger: Logger, log_line: Callable[[str], None]) -> None:
        self._name = name
        self._logger = logger
        self._log_line = log_line
        self._started = False
        self.errors = 0

    def start(self, first_iteration: int, config: Mapping[str, Any]) -> None:
        """Start the logger."""
        self._started = self._call(lambda: self._logger.start(first_iteration, config))

    def log(self, record: Record) -> None:
        """Log one iteration."""
        if self._started:
            self._call(lambda: self._logger.log(record))

    def flush(self) -> None:
        """Flush the logger."""
        if self._started:
            self._call(self._logger.flush)

    def close(self) -> None:
        """Close the logger."""
        if self._started:
            self._call(self._logger.close)
        if self.errors > 1:
            self._log_line(f"WARNING: {self._name}: {self.errors} calls failed")

    def _call(self, function: Callable[[], None]) -> bool:
        """Call a method of the logger. Return True if it succeeded."""
        try:
            function()
        except Exception as error:  # training must not depend on a log
            self.errors += 1
            if self.errors == 1:
                self._log_line(f"WARNING: {self._name}: {type(error).__name__}: {error}. Training continues")
            return False
        return True
