"""Ownership of local checkpoints: finds jobs that have ended, to free their memory, and refuses a job name in use.

root/job/owner-4f2a...json       the claim of one rank: its launcher and launch; locked by the rank while it lives

Only a folder with a claim that can be read is a job, and only files with the names of a job's are removed from it: the
root may be a folder in which a user keeps other things.

A job is alive while one of its ranks holds its lock, or while its launcher, which restarts ranks, is running. If the
launcher is not visible, for example from another container, the job has ended when for ten minutes no lock was taken
and no file changed.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from megapar.checkpoints.format.faults import RECORD
from megapar.errors import TrainingError
from megapar.files.disk import DiskStore
from megapar.files.regular_file import read_json
from megapar.health.stop.process import Process

PATIENCE_SECONDS = 600.0  # a launcher restarts its ranks within this time
_MOST_BYTES = 1 << 14
_CLAIM = re.compile(r"owner-[0-9a-f]{12}\.json")
_CHECKPOINT = re.compile(r"iter_[0-9]{7,18}")
_FILE = re.compile(
    rf"(?:owner|tmp)-[0-9a-f]{{1,12}}(?:\.json)?|{re.escape(RECORD)}(?:\.tmp-[0-9a-f]{{12}})?|[0-9a-f]{{32}}\.tmp"
)


def private_folder(path: Path, *, mine: bool) -> None:
    """Create a folder that only this user can access. Raises OSError if that fails.

    Args:
        path: The folder; parents are created too.
        mine: Also require it of an existing folder. Raises TrainingError if that is a link or another user's.
    """
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not mine:
        return
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        owner = "a link" if stat.S_ISLNK(status.st_mode) else f"user {status.st_uid}'s"
        raise TrainingError(
            f"local checkpoints: {path} is {owner}, not a folder of user {os.getuid()}. Remove it, or set "
            "--local-checkpoint-dir to another folder."
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        path.chmod(0o700)


class LocalOwner:
    """This rank's claim on the folder of its job, until ``release`` or the end of the process.

    Raises TrainingError if another run has claimed it.

    Args:
        root: The folder of all jobs on this node.
        clock: Returns the time in seconds.
    """

    def __init__(self, root: Path, folder: Path, launch: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._root, self._folder, self._clock = root, folder, clock
        self._watched: dict[Path, tuple[float, list[str]]] = {}
        _refuse_strangers(folder)
        private_folder(folder, mine=True)
        for path in _claims(folder):
            self._refuse_another(path, launch)
        content = {"launch": launch, "launcher": Process.of(os.getppid()).to_json()}
        mine = folder / f"owner-{uuid.uuid4().hex[:12]}.json"
        self._lock = DiskStore().lock(mine, lambda _: json.dumps(content).encode())
        for path in _claims(folder):
            if path != mine and not _is_locked(path):
                path.unlink(missing_ok=True)  # claims of the previous start's ranks
        self.remove_orphans()

    def _refuse_another(self, path: Path, launch: str) -> None:
        claim = _read(path)
        if _is_locked(path) and claim is not None and claim[0] != launch:
            raise TrainingError(
                f"local checkpoints: another run with the same name of its job uses {self._folder}. Give each run a "
                "separate --rdzv-id or --local-checkpoint-dir."
            )

    def remove_orphans(self) -> None:
        """Remove jobs that have ended, and jobs of unknown state after nothing has changed for ten minutes."""
        for job in self._root.iterdir():
            if job == self._folder or not job.is_dir() or job.is_symlink():
                continue
            lives = _lives(job)
            if lives:
                self._watched.pop(job, None)
            elif lives is False or (lives is None and self._is_idle(job)):
                remove_job(job)

    def _is_idle(self, job: Path) -> bool:
        try:
            names = sorted(str(path.relative_to(job)) for path in job.rglob("*"))
        except FileNotFoundError:  # another rank removes it
            return False
        since, before = self._watched.get(job, (self._clock(), names))
        if names != before:
            since = self._clock()
        self._watched[job] = since, names
        return self._clock() - since >= PATIENCE_SECONDS

    def release(self) -> None:
        """Release the claim. Safe to call twice."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()


def remove_job(job: Path) -> None:
    """Remove the checkpoints and the files of a job, and its folder unless something else is in it."""
    for path in sorted(_names(job), key=lambda path: path.name.startswith("owner-")):  # claims last: they mark the job
        with suppress(OSError):
            if _CHECKPOINT.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
            elif _FILE.fullmatch(path.name):
                path.unlink()
    with suppress(OSError):  # other files are left, or another rank was first
        job.rmdir()


def _refuse_strangers(job: Path) -> None:
    """Raise TrainingError if the folder has no claim and contains something that a job does not write."""
    names = [path.name for path in _names(job)]
    other = sorted(name for name in names if not _CHECKPOINT.fullmatch(name) and not _FILE.fullmatch(name))
    if other and not any(map(_read, _claims(job))):
        raise TrainingError(
            f"local checkpoints: {job} contains {other[0]} and is not the folder of a job. Set --rdzv-id to another "
            "name, or --local-checkpoint-dir to another folder."
        )


def _names(job: Path) -> list[Path]:
    try:
        return list(job.iterdir())
    except OSError:  # missing, or another user's
        return []


def _claims(job: Path) -> list[Path]:
    return sorted(path for path in _names(job) if _CLAIM.fullmatch(path.name))


def _lives(job: Path) -> bool | None:
    """Return True if a job is alive or the folder is not a job at all, and None if that cannot be seen from here."""
    claims = _claims(job)
    launchers = [claim[1].lives() for path in claims if (claim := _read(path))]
    if not launchers or any(_is_locked(path) for path in claims):
        return True
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
    """Return (launch, launcher) of a claim, or None if it is not one."""
    try:
        claim = read_json(path, _MOST_BYTES)
        return str(claim["launch"]), Process.from_json(claim["launcher"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
