"""Processes that no signal ends, because they wait in the kernel for a disk or a device that does not answer."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

KILL_SECONDS = 5.0  # for a process to disappear after SIGKILL
SHOWN_FILES = 4


def end(handlers: Mapping[int, Any], number: signal.Signals, seconds: float) -> list[int]:
    """End ranks with a signal, then with SIGKILL. Return the ranks that are still alive after both.

    Args:
        handlers: Rank -> torch's SubprocessHandler.
        number: The first signal.
        seconds: Time that ranks have to exit after it.
    """
    alive = {rank: handler for rank, handler in handlers.items() if handler.proc.poll() is None}
    for each, patience in ((number, seconds), (signal.SIGKILL, KILL_SECONDS)):
        for handler in alive.values():
            with suppress(ProcessLookupError):
                handler.close(death_sig=each)
        deadline = time.monotonic() + patience
        for handler in alive.values():
            with suppress(subprocess.TimeoutExpired):
                handler.proc.wait(max(0.0, deadline - time.monotonic()))
        alive = {rank: handler for rank, handler in alive.items() if handler.proc.poll() is None}
    return sorted(alive)


class Dying:
    """Tracks processes that have a pending SIGKILL, their own or another process's, and still exist."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}

    def stuck(self, pids: Mapping[int, int]) -> list[int]:
        """Return the ranks whose process should have ended ``KILL_SECONDS`` ago.

        Args:
            pids: Rank -> process number.
        """
        now = time.monotonic()
        dying = {pid for pid in pids.values() if any(_is_killed(task) for task in _tasks(pid))}
        self._since = {pid: self._since.get(pid, now) for pid in dying}
        return sorted(rank for rank, pid in pids.items() if now - self._since.get(pid, now) > KILL_SECONDS)


def describe(rank: int, pid: int) -> str:
    """Return a sentence that names the process, the kernel function it waits in and its open files, if known."""
    waiting = [task for task in _tasks(pid) if _field(task / "status", "State").startswith("D")]
    where = f", in {_content(waiting[0] / 'wchan') or 'the kernel'}" if waiting else ""
    files = [file for task in waiting[:1] for file in _files(task)]
    opened = f", with {', '.join(files[:SHOWN_FILES])} open" if files else ""
    return (
        f"process {pid} of rank {rank} cannot be ended: no signal reaches it{where}{opened}. It ends when the disk or "
        "device that it waits for answers, or at a reboot. Until then it holds its memory and its device, and no rank "
        "is started on this node"
    )


def _tasks(pid: int) -> list[Path]:
    try:
        return sorted(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []


def _is_killed(task: Path) -> bool:
    """Return True if SIGKILL is pending for a thread."""
    try:
        return bool(int(_field(task / "status", "SigPnd") or "0", 16) >> (signal.SIGKILL - 1) & 1)
    except ValueError:
        return False


def _field(status: Path, name: str) -> str:
    lines = [line for line in _content(status).splitlines() if line.startswith(f"{name}:")]
    return lines[0].partition(":")[2].strip() if lines else ""


def _content(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _files(task: Path) -> list[str]:
    """Return the files on disks that a thread has open."""
    targets: list[str] = []
    with suppress(OSError):
        for link in (task / "fd").iterdir():
            target = os.readlink(link)
            if target.startswith("/") and not target.startswith(("/dev/", "/proc/")):
                targets.append(target)
    return sorted(set(targets))
