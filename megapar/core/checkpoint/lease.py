"""Who owns a folder of checkpoints, as files in it: one for every owner there has been, by its epoch.

root/owner/
  3.json        the third owner: who and where; made once, and whoever makes it first is the owner
  3.beat        a number that it changes every few seconds, or "ended"
  3.latest      see megapar/config/latest_name.py

The highest epoch is the owner. Nothing here asks a clock: those of two machines need not agree.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megapar.config.latest_name import OWNERS, epochs_of, of_name, owners_latest, read_latest
from megapar.config.regular_file import open_regular
from megapar.core.health.process import MAX_TEXT, Process

ENDED = "ended"
LOCK_SECONDS = 5.0
_MOST_BYTES = 1 << 14
_BEAT_DIGITS = 20  # always as long as this: writing over it takes no room on a full disk
_KEPT = 8  # notes of earlier owners


@dataclass(frozen=True)
class Lease:
    """An owner. name: of its job. launch, round: of the launcher, which starts ranks again in rounds; slurm: (job, how
    often Slurm has started it); both "" where there is none. since: when, for people. locks: it holds a lock on its
    file.
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
        """Of what a file holds. Raises KeyError, TypeError or ValueError where it is no lease."""
        texts = [found[name] for name in ("name", "launch", "user", "since")]
        job, times = found["slurm"]
        numbers = [found["round"], times]
        if any(type(text) is not str or len(text) > MAX_TEXT for text in (*texts, job)):
            raise ValueError("a text is none")
        if any(type(number) is not int for number in numbers) or type(found["locks"]) is not bool:
            raise ValueError("a number is none")
        name, launch, user, since = texts
        process = Process.from_json(found["process"])
        return cls(epoch, process, name, launch, found["round"], (job, times), user, since, found["locks"])

    def to_json(self) -> dict[str, Any]:
        """For its file."""
        kept = {"process": self.process.to_json(), "slurm": list(self.slurm)}
        plain = {name: getattr(self, name) for name in ("name", "launch", "round", "user", "since", "locks")}
        return kept | plain

    def follows(self, other: Lease) -> bool:
        """Whether this is the other one started again, by whom that one is known to have ended."""
        restarted = bool(self.launch) and self.launch == other.launch and self.round > other.round
        queued = bool(self.slurm[0]) and self.slurm[0] == other.slurm[0] and self.slurm[1] > other.slurm[1]
        return restarted or queued or self.process == other.process


def newest(root: Path) -> int:
    """The owner's epoch; 0 where there has been none."""
    return max(epochs_of(root), default=0)


def highest(root: Path) -> int:
    """The highest epoch that anything in the folder speaks of: the notes of owners may have been removed."""
    said = read_latest(root)
    named = [found[1] for path in root.glob("iter_*") if (found := of_name(path.name))]
    return max(newest(root), said[1] if said else 0, *owners_latest(root), *named, 0)


def read(root: Path, epoch: int) -> Lease | None:
    """Who that owner is; None where its note is not to be understood."""
    try:
        with open_regular(root / OWNERS / f"{epoch}.json") as file:
            return Lease.from_json(epoch, json.loads(file.read(_MOST_BYTES)))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def create(root: Path, lease: Lease) -> int | None:
    """Become the owner with this epoch; None where somebody else has.

    The descriptor of its note, with a lock where one is to be had. Raises OSError where the folder takes no file.
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
    except FileExistsError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    finally:
        aside.unlink(missing_ok=True)
    return descriptor


def _link(aside: Path, path: Path) -> None:
    """Give a whole file its name, unless there is one of it. Raises FileExistsError."""
    try:
        os.link(aside, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK):
            raise
        with path.open("xb") as file:  # a file system without links: a reader may see half of it, and waits then
            file.write(aside.read_bytes())


def write_beat(root: Path, epoch: int, text: str, *, new: bool = False) -> None:
    """Change what others see of this owner. Raises OSError."""
    flags = os.O_WRONLY | (os.O_CREAT if new else 0)
    descriptor = os.open(root / OWNERS / f"{epoch}.beat", flags, 0o644)
    try:
        os.pwrite(descriptor, text.rjust(_BEAT_DIGITS).encode() + b"\n", 0)
    finally:
        os.close(descriptor)


def read_beat(root: Path, epoch: int) -> str:
    """What the owner has written last; "" where nothing can be read."""
    try:
        with open_regular(root / OWNERS / f"{epoch}.beat") as file:
            return file.read(_BEAT_DIGITS + 1).decode(errors="replace").strip()
    except OSError:
        return ""


def is_unlocked(root: Path, lease: Lease) -> bool:
    """Whether an owner that held a lock on this machine holds it no more. A hint: some file systems pretend."""
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
    """Take a lock if nobody has it; in a thread, for a lock server that is gone does not answer."""
    taken: list[bool] = []
    copy = os.dup(descriptor)  # a thread that is stuck keeps its own

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
    """Remove the notes of owners long before this one.

    What one of them has published stays until another one publishes: nothing else may know of it.
    """
    for old in epochs_of(root):
        if old < epoch - _KEPT:
            for suffix in ("json", "beat"):
                with suppress(OSError):
                    (root / OWNERS / f"{old}.{suffix}").unlink()
