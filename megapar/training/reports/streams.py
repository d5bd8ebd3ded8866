"""Standard output and error that cannot end a run: what cannot be written waits in memory, or is dropped and counted.

A reader that has gone away (``| head``, a tee that dies) never comes back; a full disk may.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import threading
from contextlib import suppress

MOST_BYTES = 1 << 20  # kept of what a full disk refuses
_GONE = (errno.EPIPE, errno.EBADF, errno.EIO, errno.ENXIO)  # of pipes, closed descriptors and lost terminals


class PatientStream(io.TextIOBase):
    """Text to a file descriptor; no call raises. failures: writes that failed. dropped: lines that nobody will see."""

    def __init__(self, descriptor: int, like: io.TextIOBase | None = None) -> None:
        self._descriptor = descriptor
        self._encoding = getattr(like, "encoding", None) or "utf-8"
        self._waiting = bytearray()
        self._lock = threading.RLock()  # a signal's handler may write, too
        self._gone = False
        self.failures = 0
        self.dropped = 0

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Of the text."""
        return self._encoding

    def fileno(self) -> int:
        """The descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Whether people read it at a terminal."""
        try:
            return os.isatty(self._descriptor)
        except OSError:
            return False

    def writable(self) -> bool:
        """It takes text, whatever becomes of it."""
        return True

    def write(self, text: str) -> int:
        """Append and send."""
        with self._lock:
            self._waiting += text.encode(self._encoding, errors="backslashreplace")
            self._send()
        return len(text)

    def flush(self) -> None:
        """Send what waits."""
        with self._lock:
            self._send()

    def close(self) -> None:
        """Send what waits; the descriptor stays open, as it is not ours."""
        self.flush()

    def _send(self) -> None:
        try:
            while self._waiting and not self._gone:
                # A copy: a signal's handler that writes meanwhile must be able to append.
                del self._waiting[: os.write(self._descriptor, bytes(self._waiting))]
        except OSError as error:
            self.failures += 1
            self._gone = error.errno in _GONE
        excess = len(self._waiting) if self._gone else len(self._waiting) - MOST_BYTES
        if excess > 0:
            end = len(self._waiting) if self._gone else self._waiting.find(b"\n", excess - 1) + 1 or excess
            self.dropped += self._waiting.count(b"\n", 0, end)
            del self._waiting[:end]


def make_patient() -> None:
    """Put patient streams in the place of this process' standard output and error, where they are files or pipes.

    Where there are none (``2>&-``), what is said goes nowhere, and not into the next file that is opened.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number is this one
            if number:
                setattr(sys, ("", "stdout", "stderr")[number], PatientStream(number))
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or isinstance(stream, PatientStream):
            continue
        with suppress(OSError, ValueError):  # what a full disk refused before is not kept
            stream.flush()
        try:
            descriptor = stream.fileno()
        except (OSError, ValueError):  # closed, or of no file (as in a notebook)
            continue
        setattr(sys, name, PatientStream(descriptor, stream))


def stream_failures() -> int:
    """Writes to standard output and error that failed so far."""
    return sum(stream.failures for stream in (sys.stdout, sys.stderr) if isinstance(stream, PatientStream))
