"""Ownership of a checkpoint folder, recorded in files: one set for each owner so far, numbered by its epoch.

root/owner/
  3.json        the third owner: its job and process; created once, and the run that creates it first is the owner
  3.beat        a number that the owner changes every few seconds, or "ended"
  3.latest      see megapar/files/checkpoint_names.py

The owner is the highest epoch. Nothing here reads a clock, because the clocks of two machines may differ.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import threading
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megapar.files.checkpoint_names import OWNERS, epochs_of, owners_latest, parse_checkpoint_name, read_latest
from megapar.files.regular_file import open_regular, read_json
from megapar.health.stop.process import MAX_TEXT, Process

ENDED = "ended"
LOCK_SECONDS = 5.0
_MOST_BYTES = 1 << 14
_BEAT_DIGITS = 20  # a fixed length, so that overwriting it needs no space on a full disk
_KEPT = 8  # records of earlier owners
_UNFINISHED = re.compile(r"[0-9a-f]{32}\.tmp")


@dataclass(frozen=True)
class Lease:
    """The record of an owner.

    Attributes:
        epoch: Its number among the owners of the folder.
        process: The process that owns the folder.
        name: The name of its job.
        launch: The launcher's identity; "" without a launcher.
        round: The launcher's restart count.
        slurm: Slurm's job id and its count of starts; ("", 0) without Slurm.
        user: The user's name.
        since: The time it took the folder, for messages.
        locks: It holds a lock on its file.
    """

    epoch: int
    process: Process
    name: str
    launch: str
    round: int
    slurm: tuple[str, int]
    user: str
    since: str
    locks: bool = False

    @classmethod
    def from_json(cls, epoch: int, found: Any) -> Lease:
        """Make a lease from the content of its file. Raises KeyError, TypeError or ValueError if it is not a lease."""
        texts = [found[name] for name in ("name", "launch", "user", "since")]
        job, times = found["slurm"]
        numbers = [found["round"], times]
        if any(type(text) is not str or len(text) > MAX_TEXT for text in (*texts, job)):
            raise ValueError("a field is not a short text")
        if any(type(number) is not int for number in numbers) or type(found["locks"]) is not bool:
            raise ValueError("a field is not a number")
        name, launch, user, since = texts
        process = Process.from_json(found["process"])
        return cls(
            epoch=epoch,
            process=process,
            name=name,
            launch=launch,
            round=found["round"],
            slurm=(job, times),
            user=user,
            since=since,
            locks=found["locks"],
        )

    def to_json(self) -> dict[str, Any]:
        """Return the content of its file."""
        kept = {"process": self.process.to_json(), "slurm": list(self.slurm)}
        plain = {name: getattr(self, name) for name in ("name", "launch", "round", "user", "since", "locks")}
        return kept | plain

    def follows(self, other: Lease) -> bool:
        """Return True if this is a restart of ``other`` by its launcher or Slurm, so that ``other`` has ended."""
        restarted = bool(self.launch) and self.launch == other.launch and self.round > other.round
        queued = bool(self.slurm[0]) and self.slurm[0] == other.slurm[0] and self.slurm[1] > other.slurm[1]
        return restarted or queued or self.process == other.process


def newest(root: Path) -> int:
    """Return the owner's epoch, or 0 if the folder never had an owner."""
    return max(epochs_of(root), default=0)


def highest(root: Path) -> int:
    """Return the highest epoch that any file in the folder mentions. Records of owners may have been removed."""
    named = read_latest(root)
    epochs = [name[1] for path in root.glob("iter_*") if (name := parse_checkpoint_name(path.name))]
    return max(newest(root), named[1] if named else 0, *owners_latest(root), *epochs, 0)


def read(root: Path, epoch: int) -> Lease | None:
    """Return that owner, or None if its record cannot be read."""
    try:
        return Lease.from_json(epoch, read_json(root / OWNERS / f"{epoch}.json", _MOST_BYTES))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def create(root: Path, lease: Lease) -> int | None:
    """Become the owner with this epoch. Return the file descriptor of the record, or None if another run came first.

    The file is locked where the file system supports it. Raises OSError if the folder is not writable.
    """
    folder = root / OWNERS
    folder.mkdir(parents=True, exist_ok=True)
    path, aside = folder / f"{lease.epoch}.json", folder / f"{uuid.uuid4().hex}.tmp"
    descriptor = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        content = lease.to_json() | {"locks": _lock(descriptor, fcntl.LOCK_EX)}
        os.write(descriptor, (json.dumps(content, indent=1) + "\n").encode())
        os.fsync(descriptor)
        _link(aside, path)
        write_beat(root, lease.epoch, "0", new=True)
    except (FileExistsError, FileNotFoundError):  # the epoch is taken, or ``tidy`` of another start removed the record
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    finally:
        aside.unlink(missing_ok=True)
    return descriptor


def _link(aside: Path, path: Path) -> None:
    """Rename a complete file without replacing an existing one. Raises FileExistsError."""
    try:
        os.link(aside, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK):
            raise
        with path.open("xb") as file:  # no hard links here: a reader that sees half of the file retries
            file.write(aside.read_bytes())


def write_beat(root: Path, epoch: int, text: str, *, new: bool = False) -> None:
    """Write the owner's heartbeat. Raises OSError."""
    flags = os.O_WRONLY | (os.O_CREAT if new else 0)
    descriptor = os.open(root / OWNERS / f"{epoch}.beat", flags, 0o644)
    try:
        os.pwrite(descriptor, text.rjust(_BEAT_DIGITS).encode() + b"\n", 0)
    finally:
        os.close(descriptor)


def read_beat(root: Path, epoch: int) -> str:
    """Return the owner's last heartbeat, or "" if it cannot be read."""
    try:
        with open_regular(root / OWNERS / f"{epoch}.beat") as file:
            return file.read(_BEAT_DIGITS + 1).decode(errors="replace").strip()
    except OSError:
        return ""


def is_unlocked(root: Path, lease: Lease) -> bool:
    """Return True if an owner on this machine has released its lock. Only a hint: some file systems fake locks."""
    if not lease.locks or not lease.process.same_machine(Process.here()):
        return False
    try:
        descriptor = os.open(root / OWNERS / f"{lease.epoch}.json", os.O_RDONLY)
    except OSError:
        return False
    try:
        return _lock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, kind: int) -> bool:
    """Take the lock if it is free. Runs in a thread, because a dead lock server never answers."""
    taken: list[bool] = []
    copy = os.dup(descriptor)  # a blocked thread keeps this descriptor

    def attempt() -> None:
        with suppress(OSError):
            fcntl.flock(copy, kind | fcntl.LOCK_NB)
            taken.append(True)
        os.close(copy)

    thread = threading.Thread(target=attempt, name="megapar-lock", daemon=True)
    thread.start()
    thread.join(LOCK_SECONDS)
    return bool(taken)


def tidy(root: Path, epoch: int) -> None:
    """Remove the records of owners much older than this one, and those that killed starts left unfinished.

    An old owner's ``latest`` stays until another owner publishes: it may be the only record of the newest checkpoint.
    """
    for old in epochs_of(root):
        if old < epoch - _KEPT:
            for suffix in ("json", "beat"):
                with suppress(OSError):
                    (root / OWNERS / f"{old}.{suffix}").unlink()
    for path in (root / OWNERS).glob("*.tmp"):
        with suppress(OSError):
            if _UNFINISHED.fullmatch(path.name) and not _is_held(path):
                path.unlink()


def _is_held(path: Path) -> bool:
    """Return True if a start that is still alive has locked its record."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        return not _lock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)
