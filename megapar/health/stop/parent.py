"""Ends a rank with the process that started it: an orphan would hold its device, and train and save next to a restart.

On Linux the kernel sends a child a signal at its parent's death. A thread that checks the parent's process id every
second covers the other cases. Neither saves a checkpoint: the next start resumes from the newest one.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, MutableMapping

from megapar.health.stop.process import fields_of
from megapar.health.stop.signal_listener import write_stderr

LAUNCHER = "MEGAPAR_LAUNCHER"
"""The environment variable in which ``be_launcher`` records the process that starts the ranks of a job."""

_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 1.0


def be_launcher(environ: MutableMapping[str, str], job: str) -> None:
    """Record this process in the environment of the ranks, which then end with it.

    ``job`` is their TORCHELASTIC_RUN_ID: the record does not apply to processes that the ranks start.
    """
    environ[LAUNCHER] = f"{os.getpid()} {started(os.getpid()) or '-'} {_namespace()} {job}"


def _launcher(environ: Mapping[str, str]) -> tuple[int, str] | None:
    """Return process id and start time of the launcher, or None if this is not one of its ranks or cannot see it."""
    recorded = environ.get(LAUNCHER, "").split(" ", 3)
    if len(recorded) != 4 or recorded[3] != environ.get("TORCHELASTIC_RUN_ID") or recorded[2] != _namespace():
        return None
    return int(recorded[0]), recorded[1].strip("-")


def _namespace() -> str:
    """Return the PID namespace of this process: a container may have a separate one."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return "-"


def started(pid: int) -> str:
    """Return the start time of a process in ticks since boot, or "" if it has ended or the time is unknown.

    A process id may be reused later; id and start time together identify one process.
    """
    try:
        fields = fields_of(pid)
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def end_with_launcher(environ: Mapping[str, str] = os.environ) -> None:
    """End this rank, without a save, as soon as the process that started it has ended.

    That process is ``megapar launch``, recorded by ``be_launcher``, or torchrun's agent. Both start ranks from the
    thread that then monitors them, which matters because the kernel sends its signal when that *thread* ends. Does
    nothing in other processes, whose parents may start them and exit.
    """
    launcher = _launcher(environ)
    parent = os.getppid()
    if launcher and launcher[0] != parent and started(launcher[0]) != launcher[1]:
        _end(f"megapar launch, process {launcher[0]}, has ended")
    if launcher is None and "TORCHELASTIC_RUN_ID" not in environ:
        return
    die_with_parent()
    if os.getppid() != parent:  # it ended before the signal was requested
        _end(f"its parent, process {parent}, has ended")
    end_with(parent)
    if launcher and launcher[0] != parent:  # a process between the two may outlive the launcher
        end_with(*launcher)


def end_with(pid: int, start: str | None = None) -> None:
    """Start a thread that ends this process with status 1 within two seconds of another process's end.

    ``start`` is the other's start time from ``started``; None if it is the parent of this process.
    """
    name = f"megapar-end-with-{pid}"
    if all(thread.name != name for thread in threading.enumerate()):
        threading.Thread(target=_wait_for_end, args=(pid, start), name=name, daemon=True).start()


def _wait_for_end(pid: int, start: str | None) -> None:
    while os.getppid() == pid if start is None else started(pid) == start:
        time.sleep(_POLL_SECONDS)
    _end(f"process {pid}, on which it depends, has ended")


def _end(why: str) -> None:
    write_stderr(f"process {os.getpid()} ends: {why}")
    os._exit(1)


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies: a Python handler would not run in a rank that hangs."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
