"""Failures of ranks: which rank failed first, whether a restart cures it, and processes that no signal ends."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megapar.files.regular_file import read_json

MOST_BYTES = 10_000
REFUSED = 2
SHOWN = 4
KILL_SECONDS = 5.0  # for a process to disappear after SIGKILL
SHOWN_FILES = 4


@dataclass(frozen=True)
class Failure:
    """The exception that ended a rank.

    Attributes:
        type: Name of the exception's class.
        where: File and line that raised it.
        step: Training step; 0 before the first one.
        saved: The failed start had written a checkpoint to disk.
        samples: Samples that --skip-samples can skip, as A-B; "" for none.
        at: Time of the failure in seconds since the epoch.
    """

    type: str
    where: str
    step: int
    saved: bool
    samples: str
    at: float


def first_failure(files: Iterable[str]) -> Failure | None:
    """Return the earliest failure that ranks recorded; None if all were ended by signals or by the loss of a rank."""
    failures = [failure for file in files if (failure := _read(file)) is not None]
    return min(failures, key=lambda failure: failure.at, default=None)


def is_refusal(failures: Mapping[int, Any]) -> bool:
    """Return True if the run was refused. ``failures``: rank -> torch's ProcessFailure.

    A rank must have the status of a refusal, and the earliest failure must be a refusal or the agent's SIGTERM.
    """
    first = min(failures.values(), key=lambda failure: failure.timestamp)
    refused = any(failure.exitcode == REFUSED for failure in failures.values())
    return refused and first.exitcode in (REFUSED, -signal.SIGTERM)


def _read(file: str) -> Failure | None:
    try:
        note = read_json(file, MOST_BYTES)
        if not note["own"]:
            return None
        name, where, samples = (str(note[key]) for key in ("type", "where", "samples"))
        return Failure(name, where, int(note["step"]), bool(note["saved"]), samples, float(note["at"]))
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None


def repeated(previous: Failure | None, current: Failure | None) -> str:
    """Return why another restart would fail in the same way; "" if the two failures differ or progress was saved."""
    if previous is None or current is None or current.saved:
        return ""
    if (previous.type, previous.where, previous.step) != (current.type, current.where, current.step):
        return ""
    when = f"at step {current.step}" if current.step else "before the first step"
    hint = ""
    if current.samples:
        hint = (
            f" To skip the samples of that step, add --skip-samples {current.samples} to the same command; if it has "
            "--skip-samples already, add the range there, because only the last such flag counts."
        )
    return (
        f"{current.type} {when} again, at {current.where}, with no checkpoint in between; the job is not restarted."
        f"{hint}"
    )


def failed_ranks(
    statuses: Mapping[int, int], notes: Mapping[int, str | None], then: str, killed: Container[int] = ()
) -> str:
    """Return a sentence about the failed ranks; "" for a refusal that ends the job, because the rank explained it.

    Ranks that failed only because they lost or waited for another rank, or that the agent ended, are left out.

    Args:
        statuses: Global rank -> exit status of the failed ranks of this node; negative for signals.
        notes: Global rank -> file in which the rank recorded the reason, or None.
        then: The next action; "" if the job ends.
        killed: Global ranks that did not react to the agent's SIGTERM: the cause, if no rank failed by itself.
    """
    secondary = {rank for rank, status in statuses.items() if status == -signal.SIGTERM or _lost_peer(notes[rank])}
    primary = sorted(statuses.keys() - secondary)
    primary = [rank for rank in primary if rank not in killed] or primary
    if not then and any(statuses[rank] == REFUSED for rank in primary):
        return ""
    if not primary:
        message = f"ranks {sorted(secondary)} of this node lost ranks of other nodes, or were stopped from outside"
        return message + (then and f"; {then}")
    hung = "did not respond, and was killed by the launcher"
    parts = [f"rank {rank} {hung if rank in killed else ending(statuses[rank])}" for rank in primary[:SHOWN]]
    if len(primary) > SHOWN:
        parts.append(f"{len(primary) - SHOWN} more failed")
    return ", ".join(parts) + (then and f"; {then}")


def next_action(maximum: int, left: int, *, job_ends: bool) -> str:
    """Return the action after a failure; "" if there is nothing to add, as when the job ends for another reason.

    Args:
        maximum: Restarts that the job may have.
        left: Restarts that are left, including the one that starts now.
    """
    if left:
        return f"restarting, {maximum - left + 1} of {maximum}"
    return f"no restarts left of {maximum}" if maximum and not job_ends else ""


def _lost_peer(note: str | None) -> bool:
    """Return True if the rank recorded that it failed because it lost another rank."""
    try:
        return bool(read_json(note or "", MOST_BYTES)["lost"])
    except (OSError, ValueError, KeyError):
        return False


def ending(status: int) -> str:
    """Describe an exit status: "was killed (signal 9)" or "ended with status 1"."""
    if status == -signal.SIGBUS:
        cause = "a file that it had mapped, such as the tokens of PREFIX.bin, was cut off, or /dev/shm is full"
        return f"was killed (signal {-status}, SIGBUS: {cause})"
    return f"was killed (signal {-status})" if status < 0 else f"ended with status {status}"


def end_ranks(handlers: Mapping[int, Any], number: signal.Signals, seconds: float) -> list[int]:
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


class PendingKills:
    """Tracks processes that have a pending SIGKILL, their own or another process's, and still exist."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}

    def stuck(self, pids: Mapping[int, int]) -> list[int]:
        """Return the ranks of ``pids`` whose process should have ended ``KILL_SECONDS`` ago."""
        now = time.monotonic()
        dying = {pid for pid in pids.values() if any(_has_pending_kill(task) for task in _tasks(pid))}
        self._since = {pid: self._since.get(pid, now) for pid in dying}
        return sorted(rank for rank, pid in pids.items() if now - self._since.get(pid, now) > KILL_SECONDS)


def describe_unkillable(rank: int, pid: int) -> str:
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


def _has_pending_kill(task: Path) -> bool:
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
