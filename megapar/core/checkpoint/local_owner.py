"""Whose local checkpoints these are: which memory may be given back, and whether a folder is nobody else's.

root/job/owner-4f2a...json       of one rank: its launcher and launch; the rank holds a lock on it while it lives

A job lives while one of its ranks holds its lock, or while the launcher, which starts ranks again, is there. Whoever
cannot see the launcher, as from another container, watches for ten minutes that no lock is taken and nothing changes.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from megapar.core.health.process import Process
from megapar.errors import TrainingError

PATIENCE_SECONDS = 600.0  # in which a launcher has started its ranks again
_MOST_BYTES = 1 << 14


def private_folder(path: Path, *, mine: bool) -> None:
    """Make a folder of this user's alone. mine: also what is there already must be that, not only what is made.

    Raises TrainingError where it belongs to somebody else or leads elsewhere, OSError where it cannot be made.
    """
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not mine:
        return
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        owner = "a link" if stat.S_ISLNK(found.st_mode) else f"user {found.st_uid}'s"
        raise TrainingError(
            f"local checkpoints: {path} is {owner}, not a folder of user {os.getuid()}: remove it, or give another "
            "place by --local-checkpoint-dir"
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        path.chmod(0o700)


class LocalOwner:
    """This rank's claim on the folder of its job, until ``release`` or its end."""

    def __init__(self, root: Path, folder: Path, launch: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._root, self._folder, self._clock = root, folder, clock
        self._watched: dict[Path, tuple[float, list[str]]] = {}
        private_folder(folder, mine=True)
        for path in _claims(folder):
            self._refuse_another(path, launch)
        content = {"launch": launch, "launcher": Process.of(os.getppid()).to_json()}
        aside, self._path = (folder / f"{kind}-{uuid.uuid4().hex[:12]}.json" for kind in ("tmp", "owner"))
        self._descriptor = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        with suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(self._descriptor, json.dumps(content).encode())
        aside.rename(self._path)  # whoever sees it finds it locked
        for path in _claims(folder):
            if path != self._path and not _is_locked(path):
                path.unlink(missing_ok=True)  # of ranks that this start is in place of
        self.remove_orphans()

    def _refuse_another(self, path: Path, launch: str) -> None:
        said = _read(path)
        if _is_locked(path) and said is not None and said[0] != launch:
            raise TrainingError(
                f"local checkpoints: another run with the same name of its job keeps its own in {self._folder}: give "
                "each a --rdzv-id or a --local-checkpoint-dir of its own"
            )

    def remove_orphans(self) -> None:
        """Remove the jobs in this memory that have ended; of those that cannot be seen, when they have been watched."""
        for job in self._root.iterdir():
            if job == self._folder or not job.is_dir() or job.is_symlink():
                continue
            lives = _lives(job)
            if lives:
                self._watched.pop(job, None)
            elif lives is False or (lives is None and self._stood_still(job)):
                shutil.rmtree(job, ignore_errors=True)

    def _stood_still(self, job: Path) -> bool:
        names = sorted(str(path.relative_to(job)) for path in job.rglob("*"))
        since, before = self._watched.get(job, (self._clock(), names))
        if names != before:
            since = self._clock()
        self._watched[job] = since, names
        return self._clock() - since >= PATIENCE_SECONDS

    def release(self) -> None:
        """Own it no more. Safe to call twice."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _claims(job: Path) -> list[Path]:
    return sorted(job.glob("owner-*"))


def _lives(job: Path) -> bool | None:
    """Whether a job lives; None where that cannot be seen from here. What is no job at all is left alone."""
    claims = _claims(job)
    if not claims or any(_is_locked(path) for path in claims):
        return True
    launchers = [said[1].lives() if (said := _read(path)) else None for path in claims]
    return True if True in launchers else None if None in launchers else False


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def _read(path: Path) -> tuple[str, Process] | None:
    """(launch, launcher) of a claim; None where it says neither, as those of old do."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            found = json.loads(file.read(_MOST_BYTES))
        return str(found["launch"]), Process.from_json(found["launcher"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
