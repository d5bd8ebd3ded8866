"""Signals heard by a thread, so that a process whose main thread is stuck in C code hears them too.

Python runs its handlers in the main thread, once that is back from C. The system's own handler writes the signal's
number to a pipe at once, and a thread reads it:

    signal -> C handler -> pipe -> thread: ``on_signal``             always
                        -> main thread: ``on_main_thread``           when it is back in Python
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
"""Signals that stop a run: from people (INT, QUIT), terminals that go away (HUP), schedulers (TERM, USR1)."""

TYPED = (signal.SIGINT, signal.SIGQUIT)
"""Signals that people type, and that no program repeats."""

AGAIN_SECONDS = 5.0  # several senders may signal a group of processes at once; a person who means it waits longer

WRITE_SECONDS = 2.0

_END = 0  # no signal's number
_LONGEST_WAIT_SECONDS = 3600.0  # at a time: the kernel takes no number of any size


class Listener:
    """Hears signals from ``install`` to ``close``. A signal that the process was started to ignore stays ignored.

    on_signal: called on the thread of this object with each signal's number. on_main_thread: called with it on the main
    thread, when that is back in Python; may raise there. due: returns the time.monotonic() at which ``on_signal`` is to
    be called with 0 if no signal comes until then; None: never.
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
        """Begin to take signals, from the main thread of the process."""
        reader, writer = self._ends = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._come)
        _OPEN.add(self)
        self._thread = threading.Thread(target=self._run, args=(reader,), name="megapar-signals", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Put the handlers from before back. From the main thread."""
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

    def _come(self, number: int, frame: FrameType | None) -> None:
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
        """A forked child is not this process: its signals are its own, and must not go down the parent's pipe."""
        signal.set_wakeup_fd(-1)
        for number in self._before:
            signal.signal(number, signal.SIG_DFL)
        for end in self._ends or ():
            os.close(end)
        self._ends = None


_OPEN: weakref.WeakSet[Listener] = weakref.WeakSet()


# A child that gets a signal before it is known to be one would send it down its parent's pipe: none comes until then.
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
    """Finds that a person insists: a second SIGINT or SIGQUIT, 5 s or more after the first.

    TERM, HUP and USR1 never count, however often they come: grace periods are the schedulers' to keep.
    """

    def __init__(self) -> None:
        self._first: float | None = None

    def add(self, number: int, now: float) -> bool:
        """Take in a signal that came at ``now``, in seconds of time.monotonic(). True where it insists."""
        if number not in TYPED:
            return False
        if self._first is None:
            self._first = now
        return now - self._first >= AGAIN_SECONDS


def name_of(number: int) -> str:
    """SIGTERM for 15."""
    return signal.Signals(number).name


def write_stderr(text: str) -> None:
    """Write a line to standard error, where there is one that takes it, and wait for 2 s at most.

    A terminal that went away may have sent the signal; one that is stopped, or a pager, may block the main thread in a
    write for any time, and must not block the threads that are to end the process.
    """
    writing = threading.Thread(target=_write, args=(text + "\n",), name="megapar-stderr", daemon=True)
    try:
        writing.start()
    except RuntimeError:  # no more threads here, or the interpreter is about to end
        return
    writing.join(WRITE_SECONDS)


def _write(text: str) -> None:
    stream = sys.stderr
    if stream is not None:  # as it is where a process is started without one
        with contextlib.suppress(OSError, ValueError):
            stream.write(text)
            stream.flush()


def takes_text() -> bool:
    """True where a write to standard error would return at once: faulthandler lets no thread run while it writes."""
    try:
        return bool(select.select([], [2], [], 0)[1])
    except OSError:
        return False
