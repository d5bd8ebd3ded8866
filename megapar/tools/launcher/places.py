"""Folders of one's own on a disk of this machine, where processes meet by files and nobody else can."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from megapar.errors import DistributedError

PREFIX = "megapar-launch-"
# Shared memory comes last: some systems empty a user's when he logs out, with his jobs still running.
PLACES = ("/tmp", "/var/tmp", "/dev/shm")
# File systems that other machines see, whose locks are slow, or local to each machine, or missing.
SHARED = (
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "pvfs2"),
    *("orangefs", "ocfs2", "gfs2", "wekafs", "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.s3fs", "fuse.gcsfuse"),
    "fuse.juicefs",
)
MOUNTS = Path("/proc/self/mounts")
USERS = Path("/proc/self/uid_map")
OVERFLOW = Path("/proc/sys/kernel/overflowuid")


class RankFiles:
    """A folder of mode 0700 with a file for every time that the ranks of this node meet.

    Goes with this object, or with the process; what a killed process left goes when another one makes its own.
    """

    def __init__(self, parents: Iterable[str] | None = None) -> None:
        """parents: where it may lie, the first that is fit. Raises DistributedError where none is."""
        self.folder, self._lock = _make(tuple(_parents() if parents is None else parents))
        self._number = 0
        self._close = weakref.finalize(self, _remove, self.folder, self._lock, os.getpid())

    def next(self) -> Path:
        """A file that nobody has met by; the one before it goes."""
        self._path().unlink(missing_ok=True)
        self._number += 1
        return self._path()

    def close(self) -> None:
        """Remove the folder."""
        self._close()

    def _path(self) -> Path:
        return self.folder / f"ranks-{self._number}"


def _parents() -> Iterator[str]:
    yield tempfile.gettempdir()
    yield from PLACES


def _make(parents: tuple[str, ...]) -> tuple[Path, int]:
    """A new folder and a descriptor that keeps it locked for as long as its owner lives."""
    problems = []
    for parent in dict.fromkeys(parents):
        if problem := _unfit(Path(parent)):
            problems.append(problem)
            continue
        _remove_left_over(Path(parent))
        try:
            while True:
                folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
                lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                fcntl.flock(lock, fcntl.LOCK_EX)
                if folder.exists():  # else somebody took it for left over before it was locked
                    return folder, lock
                os.close(lock)
        except OSError as error:
            problems.append(f"{parent}: {error.strerror}")
    raise DistributedError(
        f"the ranks of a node meet by files on a disk of its own, and there is none: {'; '.join(problems)}. "
        "Let TMPDIR name a folder on a local disk."
    )


def _unfit(parent: Path) -> str:
    """Why no folder may be made there; "" where one may."""
    try:
        found = parent.stat()
    except OSError as error:
        return f"{parent}: {error.strerror}"
    if found.st_uid not in (0, os.geteuid()) and not (str(parent) in PLACES and _is_unknown(found.st_uid)):
        return f"{parent} belongs to user {found.st_uid}"
    if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
        return f"{parent} lets others rename what lies in it (mode {stat.S_IMODE(found.st_mode):04o})"
    kind = file_system(parent)
    return f"{parent} is on {kind}, which other machines see" if kind in SHARED else ""


def _is_unknown(user: int) -> bool:
    """Whether that number stands for users outside of this container, root among them, of which it says nothing."""
    try:
        known = [[int(number) for number in line.split()] for line in USERS.read_text().splitlines()]
        overflow = int(OVERFLOW.read_text())
    except (OSError, ValueError):
        return False
    return user == overflow and not any(first <= user < first + count for first, _, count in known)


def file_system(path: Path) -> str:
    """The kind of file system that holds a path; "" where the system does not say."""
    try:
        lines = [line.split() for line in MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        return ""
    real = path.resolve()
    kind, longest = "", -1
    for fields in lines:
        if len(fields) < 3:
            continue
        mounted = Path(fields[1].encode().decode("unicode_escape"))
        # Of mounts at one place the last one is seen.
        if real.is_relative_to(mounted) and len(mounted.parts) >= longest:
            kind, longest = fields[2], len(mounted.parts)
    return kind


def _remove_left_over(parent: Path) -> None:
    """Remove folders of this user whose owners are gone, which their locks tell."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # it is gone, or somebody else's
            if folder.lstat().st_uid != os.geteuid():
                continue
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _remove(folder: Path, lock: int, owner: int) -> None:
    if os.getpid() == owner:  # a process that was forked from it leaves it alone
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
