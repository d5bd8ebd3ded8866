"""Processes that no signal ends: one that waits in the kernel (a disk or a device that does not answer) stays there."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

KILL_SECONDS = 5.0  # from SIGKILL to the end of a process that can be ended
SHOWN_FILES = 4


def end(handlers: Mapping[int, Any], number: signal.Signals, seconds: float) -> list[int]:
    """End ranks by a signal, and after so many seconds by SIGKILL; those that have not ended even then.

    handlers: rank -> torch's, of its process.
    """
    alive = {rank: one for rank, one in handlers.items() if one.proc.poll() is None}
    for each, patience in ((number, seconds), (signal.SIGKILL, KILL_SECONDS)):
        for one in alive.values():
            with suppress(ProcessLookupError):
                one.close(death_sig=each)
        deadline = time.monotonic() + patience
        for one in alive.values():
            with suppress(subprocess.TimeoutExpired):
                one.proc.wait(max(0.0, deadline - time.monotonic()))
        alive = {rank: one for rank, one in alive.items() if one.proc.poll() is None}
    return sorted(alive)


class Dying:
    """Processes that have been killed, or have ended themselves, and are still there."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}

    def stuck(self, pids: Mapping[int, int]) -> list[int]:
        """Ranks whose process was to end ``KILL_SECONDS`` ago. pids: by rank."""
        now = time.monotonic()
        dying = {pid for pid in pids.values() if any(_is_killed(task) for task in _tasks(pid))}
        self._since = {pid: self._since.get(pid, now) for pid in dying}
        return sorted(rank for rank, pid in pids.items() if now - self._since.get(pid, now) > KILL_SECONDS)


def describe(rank: int, pid: int) -> str:
    """Which process it is, and in what it is stuck, as far as the kernel says so."""
    found = [task for task in _tasks(pid) if _field(task / "status", "State").startswith("D")]
    where = f", in {_content(found[0] / 'wchan') or 'the kernel'}" if found else ""
    files = [file for task in found[:1] for file in _files(task)]
    opened = f", with {', '.join(files[:SHOWN_FILES])} open" if files else ""
    return (
        f"process {pid} of rank {rank} cannot be ended: no signal reaches it{where}{opened}. It ends when the disk or "
        "device that it waits for answers, or with the machine; until then it holds its memory and its device, and no "
        "rank is started here"
    )


def _tasks(pid: int) -> list[Path]:
    try:
        return sorted(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []


def _is_killed(task: Path) -> bool:
    """Whether SIGKILL is on its way to a thread that does not take it."""
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
    """Files of a disk that a thread has open."""
    found: list[str] = []
    with suppress(OSError):
        for link in (task / "fd").iterdir():
            target = os.readlink(link)
            if target.startswith("/") and not target.startswith(("/dev/", "/proc/")):
                found.append(target)
    return sorted(set(found))
