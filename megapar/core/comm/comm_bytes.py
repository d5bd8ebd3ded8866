"""Bytes that this rank has sent, by axis and kind of collective."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class CommBytes(Counter[tuple[str, str]]):
    """(axis, kind of collective) -> bytes that this rank has sent. All axes of a world share one instance."""

    def __init__(self) -> None:
        super().__init__()
        self._counting = True

    def add(self, axis: str, kind: str, sent_bytes: float) -> None:
        """Add the bytes that one collective sends, except inside ``uncounted``."""
        if self._counting:
            self[axis, kind] += round(sent_bytes)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Ignore what is sent inside, such as by a recomputed forward. May be nested."""
        before, self._counting = self._counting, False
        try:
            yield
        finally:
            self._counting = before

    def take(self) -> dict[str, int]:
        """Return "axis/kind" -> bytes since the last call, and start again from zero."""
        sent = {f"{axis}/{kind}": amount for (axis, kind), amount in sorted(self.items()) if amount}
        self.clear()
        return sent
