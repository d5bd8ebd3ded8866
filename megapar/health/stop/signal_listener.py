"""Signal handling in a thread, which also works while the main thread is blocked in C code.

Python runs its handlers in the main thread, after that has returned from C. The C handler writes the signal's number to
a pipe immediately, and a thread reads it:

    signal -> C handler -> pipe -> thread: ``on_signal``             always
                        -> main thread: ``on_main_thread``           after it has returned to Python
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT)
"""Signals that stop a run: from the keyboard (INT, QUIT), a closed terminal (HUP) or a scheduler (TERM, USR1)."""

TYPED = (signal.SIGINT, signal.SIGQUIT)  # signals from the keyboard, which no program sends repeatedly

AGAIN_SECONDS = 5.0  # several senders may signal a process group at the same time; a deliberate second signal is later

WRITE_SECONDS = 2.0

_END = 0  # not the number of a signal
_LONGEST_WAIT_SECONDS = 3600.0  # in one call: the kernel limits the timeout


class Listener:
    """Receives signals from ``install`` to ``close``. A signal that the parent process set to ignored stays ignored.

    Args:
        on_signal: Called with each signal's number on the thread of this object.
        on_main_thread: Called with the number on the main thread, after that has returned to Python. It may raise.
        due: Returns the time.monotonic() at which ``on_signal`` is called with 0 if no signal arrives first; None
            disables this.
    """

    def __init__(
        self,
        on_signal: Callable[[int], None],
        on_main_thread: Callable[[int], None] = lambda number: None,
        due: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._on_signal = on_signal
        self._on_main_thread = on_main_thread
        self._due = due
        self._before: dict[int, Any] = {}
        self._ends: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None

    def install(self, numbers: Sequence[int] = STOPS) -> None:
        """Install the handlers. Call this on the main thread of the process."""
        reader, writer = self._ends = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        _OPEN.add(self)
        self._thread = threading.Thread(target=self._run, args=(reader,), name="megapar-signals", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Restore the previous handlers. Call this on the main thread."""
        if self._ends is None:
            return
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        _OPEN.discard(self)
        reader, writer = self._ends
        self._ends = None
        with contextlib.suppress(BlockingIOError):
            os.write(writer, bytes([_END]))
        if self._thread is not None:
            self._thread.join()
        os.close(writer)
        os.close(reader)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._on_main_thread(number)

    def _run(self, reader: int) -> None:
        while True:
            due = self._due()
            wait = None if due is None else min(max(0.0, due - time.monotonic()), _LONGEST_WAIT_SECONDS)
            if not select.select([reader], [], [], wait)[0]:
                if due is not None and time.monotonic() >= due:
                    self._on_signal(0)
                continue
            for number in os.read(reader, 64):
                if number == _END:
                    return
                if number in self._before:
                    self._on_signal(number)

    def _leave_in_child(self) -> None:
        """Remove the handlers in a forked child: its signals must not reach the parent through the shared pipe."""
        signal.set_wakeup_fd(-1)
        for number in self._before:
            signal.signal(number, signal.SIG_DFL)
        for end in self._ends or ():
            os.close(end)
        self._ends = None


_OPEN: weakref.WeakSet[Listener] = weakref.WeakSet()


# Signals are blocked during a fork. Otherwise a child could write one to its parent's pipe before it has closed that.
_masks = threading.local()


def _before_fork() -> None:
    if _OPEN:
        _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)


def _after_fork() -> None:
    before = _masks.__dict__.pop("before", None)
    if before is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _after_fork_in_child() -> None:
    for listener in list(_OPEN):
        listener._leave_in_child()
    _OPEN.clear()
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)


class Insistence:
    """Detects that the user insists: a SIGINT or SIGQUIT 5 s or more after the first one.

    TERM, HUP and USR1 never count, because schedulers send them repeatedly and enforce the grace period themselves.
    """

    def __init__(self) -> None:
        self._first: float | None = None

    def add(self, number: int, now: float) -> bool:
        """Add a signal received at ``now``, in seconds of time.monotonic(). Return True if the user insists."""
        if number not in TYPED:
            return False
        if self._first is None:
            self._first = now
        return now - self._first >= AGAIN_SECONDS


def name_of(number: int) -> str:
    """Return the name of a signal, such as "SIGTERM" for 15."""
    return signal.Signals(number).name


def write_stderr(text: str) -> None:
    """Write a line to standard error if possible, and wait at most 2 s for it.

    A closed terminal may have sent the signal. A stopped terminal or a pager may block a write for any time, and must
    not block the threads that end the process.
    """
    writing = threading.Thread(target=_write, args=(text + "\n",), name="megapar-stderr", daemon=True)
    try:
        writing.start()
    except RuntimeError:  # the thread limit is reached, or the interpreter is shutting down
        return
    writing.join(WRITE_SECONDS)


def _write(text: str) -> None:
    stream = sys.stderr
    if stream is not None:  # None if the process was started without one
        with contextlib.suppress(OSError, ValueError):
            stream.write(text)
            stream.flush()


def takes_text() -> bool:
    """Return True if standard error accepts text at once: faulthandler blocks all threads while it writes."""
    try:
        return bool(select.select([], [2], [], 0)[1])
    except OSError:
        return False
