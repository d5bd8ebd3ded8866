"""Ranks end with what started them: orphans would hold devices, and train and save beside the job's next start.

The kernel tells a child of its parent's death where it is asked to (Linux); a thread that looks at the parent's number
every second is there for the rest. Neither saves anything: the next start goes on from the newest checkpoint.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, MutableMapping

from megapar.core.health.process import fields_of
from megapar.core.health.signal_listener import write_stderr

LAUNCHER = "MEGAPAR_LAUNCHER"
"""What starts the ranks of a job, as ``be_launcher`` has it."""

_PR_SET_PDEATHSIG = 1
_LOOK_SECONDS = 1.0
_watched: set[int] = set()


def be_launcher(environ: MutableMapping[str, str], job: str) -> None:
    """Tell ranks of the job, which get this environment, that they are to end with this process.

    job: as the ranks have it in TORCHELASTIC_RUN_ID, so that what they start themselves is not meant.
    """
    environ[LAUNCHER] = f"{os.getpid()} {started(os.getpid()) or '-'} {_namespace()} {job}"


def _launcher(environ: Mapping[str, str]) -> tuple[int, str] | None:
    """Number and start of the process that has said so, where this one is a rank of its job and can see it."""
    said = environ.get(LAUNCHER, "").split(" ", 3)
    if len(said) != 4 or said[3] != environ.get("TORCHELASTIC_RUN_ID") or said[2] != _namespace():
        return None
    return int(said[0]), said[1].strip("-")


def _namespace() -> str:
    """What gives processes their numbers: a container may have numbers of its own."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return "-"


def started(pid: int) -> str:
    """When a process was started, in ticks since boot; "" where it is gone, or that cannot be known.

    A number may be given to another process later; number and start are one process'.
    """
    try:
        fields = fields_of(pid)
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def end_with_launcher(environ: Mapping[str, str] = os.environ) -> None:
    """End this rank, unsaved, as soon as what started it is gone; at once where it is gone already.

    That is ``megapar launch``, told by ``be_launcher``, or torchrun's agent. Both start ranks from the thread that then
    watches over them: the kernel's signal comes when that *thread* ends. Nothing is done for other processes, whose
    parents may start them and go.
    """
    launcher = _launcher(environ)
    parent = os.getppid()
    if launcher and launcher[0] != parent and started(launcher[0]) != launcher[1]:
        _end(f"megapar launch, process {launcher[0]}, is gone")
    if launcher is None and "TORCHELASTIC_RUN_ID" not in environ:
        return
    die_with_parent()
    if os.getppid() != parent:  # it went before it was asked for
        _end(f"its parent, process {parent}, is gone")
    end_with(parent)
    if launcher and launcher[0] != parent:  # something stands between the two, and may outlive the launcher
        end_with(*launcher)


def end_with(pid: int, start: str | None = None) -> None:
    """End this process by status 1 within two seconds of another one's end, by a thread.

    start: what ``started`` said of it; None: it is the parent of this process.
    """
    if pid in _watched:
        return
    _watched.add(pid)
    threading.Thread(target=_look, args=(pid, start), name="megapar-parent", daemon=True).start()


def _look(pid: int, start: str | None) -> None:
    while os.getppid() == pid if start is None else started(pid) == start:
        time.sleep(_LOOK_SECONDS)
    _end(f"process {pid}, which it belongs to, is gone")


def _end(why: str) -> None:
    write_stderr(f"process {os.getpid()} ends: {why}")
    os._exit(1)


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies: no handler of ours would run in a rank that hangs."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
