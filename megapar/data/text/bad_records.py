"""Broken records: a reader raises the first one, or skips and counts them."""

from __future__ import annotations

from megapar.errors import DataError


class BadRecords:
    """Counts the records that a reader skips, and keeps the messages of the first few.

    Attributes:
        count: Number of records skipped.
        first: The messages of the first ``KEPT``.
    """

    KEPT = 5

    def __init__(self, *, stops: bool = False) -> None:
        """Raise the first broken record if ``stops``, instead of skipping it."""
        self.count = 0
        self.first: list[str] = []
        self._stops = stops

    def take(self, error: DataError) -> None:
        """Count one skipped record, or raise ``error``."""
        if self._stops:
            raise error
        self.count += 1
        if len(self.first) < self.KEPT:
            self.first.append(str(error))

    def __str__(self) -> str:
        return skipped_text(self.count, self.first)


def skipped_text(count: int, first: list[str]) -> str:
    """Return the sentence that reports ``count`` skipped records and describes the ``first`` of them."""
    more = f"; and {count - len(first)} more" if count > len(first) else ""
    return f"{count} broken records were skipped: {'; '.join(first)}{more}"
