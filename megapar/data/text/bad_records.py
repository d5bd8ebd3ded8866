"""Broken records: what a reader does when it meets one."""

from __future__ import annotations

from megapar.errors import DataError


class BadRecords:
    """Counts the records that a reader skips, and keeps what was wrong with the first few.

    count: records skipped. first: the messages of the first ``KEPT``.
    """

    KEPT = 5

    def __init__(self, *, stops: bool = False) -> None:
        """stops: raise the first broken record instead of skipping it."""
        self.count = 0
        self.first: list[str] = []
        self._stops = stops

    def take(self, error: DataError) -> None:
        """Skip one broken record, or raise ``error``."""
        if self._stops:
            raise error
        self.count += 1
        if len(self.first) < self.KEPT:
            self.first.append(str(error))

    def __str__(self) -> str:
        return skipped_text(self.count, self.first)


def skipped_text(count: int, first: list[str]) -> str:
    """The sentence that reports ``count`` skipped records, of which ``first`` are described."""
    more = f"; and {count - len(first)} more" if count > len(first) else ""
    return f"{count} broken records were passed over: {'; '.join(first)}{more}"
