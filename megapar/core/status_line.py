"""Status of slow work while it runs: one line, with the time left."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import TextIO, TypeAlias

from megapar.core.units import clock_text

Status: TypeAlias = Callable[[str, int, int, str], None]
"""Hears of slow work: its name, how much of it is done, how much there is (0: not known) and of what."""

_QUICK = 3.0  # seconds; shorter work is not mentioned where lines stay
_EVERY = 10.0  # seconds between lines that stay
_TICK = 0.2


def silent(what: str, done: int, total: int, unit: str) -> None:
    """Say nothing: the Status of work that is not watched."""


class StatusLine(AbstractContextManager["StatusLine"]):
    """A Status that writes a line which replaces the one before, or every ten seconds a line that stays.

    A thread writes it, so that work without steps is seen, too. Use it as a context, which ends the thread.
    """

    def __init__(self, write: Callable[[str], object], *, rewrites: bool) -> None:
        """Write by ``write``, which gets "" at the end if its text ``rewrites`` the one before."""
        self._write, self._rewrites = write, rewrites
        self._closed, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._now: tuple[str, int, int, str] = ("", 0, 0, "")
        self._began = self._due = 0.0
        self._first = 0

    @classmethod
    def on(cls, stream: TextIO) -> StatusLine:
        """Return the line of a stream; a terminal's is rewritten."""

        def write(text: str) -> None:
            with suppress(OSError):
                width = shutil.get_terminal_size().columns - 1
                stream.write(f"\r{text[:width]}\x1b[K" if rewrites else f"{text}\n")
                stream.flush()

        rewrites = stream.isatty()
        return cls(write, rewrites=rewrites)

    def __call__(self, what: str, done: int, total: int, unit: str) -> None:
        """See Status. Another name, or less that is done, is other work."""
        with self._lock:
            if what != self._now[0] or done < self._now[1]:
                self._began, self._first = time.monotonic(), done
                self._due = max(self._due, self._began + (0 if self._rewrites else _QUICK))
            self._now = what, done, total, unit
        if not self._thread.ident:
            self._thread.start()

    def text(self, now: float) -> str:
        """Return the line at the time ``now``."""
        what, done, total, unit = self._now
        seconds = now - self._began
        if not total:
            return f"{what}, {clock_text(seconds)}"
        more = done - self._first
        left = f", left {clock_text(seconds / more * (total - done))}" if more else ""
        return f"{what}: {done:,} of {total:,} {unit}{left}"

    def _run(self) -> None:
        while not self._closed.wait(_TICK):
            with self._lock:
                now = time.monotonic()
                _, done, total, _ = self._now
                if now >= self._due and (done < total or not total):
                    self._due = now + (_TICK if self._rewrites else _EVERY)
                    self._write(self.text(now))

    def __exit__(self, *error: object) -> None:
        """End the thread, and remove a line that can be rewritten."""
        self._closed.set()
        if self._thread.ident:
            self._thread.join()
            if self._rewrites:
                self._write("")
