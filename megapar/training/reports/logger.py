"""The interface of loggers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megapar.training.reports.record import Record


class Logger:
    """A sink for the records of a run. Its methods are called on one rank only, between steps.

    Subclass it, and pass instances to ``train(config, loggers=[...])``. Exceptions do not end the run: the first one is
    reported in the log, and training continues.
    """

    def start(self, first_iteration: int, config: Mapping[str, Any]) -> None:
        """Begin a run.

        Args:
            first_iteration: 1, or the iteration after the loaded checkpoint. Records from there on may have been logged
                before, by a start that was interrupted.
            config: Value of every flag by name, as JSON can hold it.
        """

    def log(self, record: Record) -> None:
        """Log one iteration. Called in order, up to --log-interval iterations at a time."""
        raise NotImplementedError(f"{type(self).__name__}.log")

    def flush(self) -> None:
        """Make all records so far durable and visible. Called every --log-interval, and before each checkpoint."""

    def close(self) -> None:
        """End the run. Called once, also after a failure."""
