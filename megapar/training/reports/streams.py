"""Standard output and error whose failures do not end a run: unwritten text is kept in memory, or dropped and counted.

A reader that has exited (``| head``, a killed tee) does not return, so its text is dropped. A full disk may recover.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import threading
from contextlib import suppress

MOST_BYTES = 1 << 20  # maximum bytes to keep while a disk is full
_GONE = (errno.EPIPE, errno.EBADF, errno.EIO, errno.ENXIO)  # broken pipes, closed descriptors and lost terminals


class GuardedStream(io.TextIOBase):
    """A text stream to a file descriptor that never raises.

    Attributes:
        failures: Writes that failed.
        dropped: Lines that were dropped.
    """

    def __init__(self, descriptor: int, like: io.TextIOBase | None = None) -> None:
        self._descriptor = descriptor
        self._encoding = getattr(like, "encoding", None) or "utf-8"
        self._unwritten = bytearray()
        self._lock = threading.RLock()  # reentrant, because a signal handler may write during a write
        self._reader_gone = False
        self._line_buffering = False
        self.failures = 0
        self.dropped = 0

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Encoding of the text."""
        return self._encoding

    def fileno(self) -> int:
        """Return the file descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Return True if the stream is an interactive terminal."""
        try:
            return os.isatty(self._descriptor)
        except OSError:
            return False

    def writable(self) -> bool:
        """Return True: writes are always accepted."""
        return True

    def write(self, text: str) -> int:
        """Append text to the buffer and write the buffer."""
        with self._lock:
            self._unwritten += text.encode(self._encoding, errors="backslashreplace")
            if not self._line_buffering or "\n" in text:
                self._send()
        return len(text)

    def reconfigure(
        self, *, encoding: str | None = None, line_buffering: bool | None = None, **unused: str | bool | None
    ) -> None:
        """Change the stream as ``io.TextIOWrapper.reconfigure``, which scripts call on sys.stdout.

        Args:
            encoding: Encoding of the text from now on; None: unchanged.
            line_buffering: Write whole lines only, so that those of several processes do not mix; None: unchanged.
            unused: Its other arguments, which have no meaning here: characters that cannot be encoded are escaped.
        """
        self.flush()
        self._encoding = encoding or self._encoding
        self._line_buffering = self._line_buffering if line_buffering is None else line_buffering

    def flush(self) -> None:
        """Write the buffer."""
        with self._lock:
            self._send()

    def close(self) -> None:
        """Write the buffer. The descriptor stays open, because the stream does not own it."""
        self.flush()

    def _send(self) -> None:
        try:
            while self._unwritten and not self._reader_gone:
                # Write a copy, so that a signal handler can append to the buffer during the write.
                del self._unwritten[: os.write(self._descriptor, bytes(self._unwritten))]
        except OSError as error:
            self.failures += 1
            self._reader_gone = error.errno in _GONE
        excess = len(self._unwritten) if self._reader_gone else len(self._unwritten) - MOST_BYTES
        if excess > 0:
            end = len(self._unwritten) if self._reader_gone else self._unwritten.find(b"\n", excess - 1) + 1 or excess
            self.dropped += self._unwritten.count(b"\n", 0, end)
            del self._unwritten[:end]


def guard_streams() -> None:
    """Replace standard output and error of this process with guarded streams, if they are files or pipes.

    A closed descriptor (``2>&-``) is opened to the null device, so that output does not go to the next opened file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets this number, the lowest free one
            if number:
                setattr(sys, ("", "stdout", "stderr")[number], GuardedStream(number))
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or isinstance(stream, GuardedStream):
            continue
        with suppress(OSError, ValueError):  # text that a full disk refused before this is lost
            stream.flush()
        try:
            descriptor = stream.fileno()
        except (OSError, ValueError):  # closed, or without a file (as in a notebook)
            continue
        setattr(sys, name, GuardedStream(descriptor, stream))


def stream_failures() -> int:
    """Return the number of failed writes to standard output and error so far."""
    return sum(stream.failures for stream in (sys.stdout, sys.stderr) if isinstance(stream, GuardedStream))
