"""Files of the ranks of a node: a private folder through which they meet and note failures, and their logs.

``--log-dir DIR`` makes DIR/JOB/attempt-K/rank-N.log, with the job's name and global ranks. Nodes may share the folder.
A file from an earlier launch with the same name is kept as rank-N.log.1, .2 and so on, the newest last. If a file
cannot be opened, its rank runs without one: log files never end a run.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from megapar.errors import DistributedError
from megapar.files.paths import path_part
from megapar.health.stop.signal_listener import write_stderr
from megapar.launch_environment import starts_before

PREFIX = "megapar-launch-"
# Shared memory is last: some systems delete a user's files there at logout, while jobs are still running.
PLACES = ("/tmp", "/var/tmp", "/dev/shm")
# File systems that several machines share. Their locks are slow, local to each machine, or missing.
SHARED = (
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "pvfs2"),
    *("orangefs", "ocfs2", "gfs2", "wekafs", "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.s3fs", "fuse.gcsfuse"),
    "fuse.juicefs",
)
MOUNTS = Path("/proc/self/mounts")
USERS = Path("/proc/self/uid_map")
OVERFLOW = Path("/proc/sys/kernel/overflowuid")


class RankFiles:
    """A folder of mode 0700 with a new file for each start of the ranks of this node.

    The folder is removed with this object or at process exit. Folders of killed processes are removed when the next
    one is created.
    """

    def __init__(self, parents: Iterable[str] | None = None) -> None:
        """Create the folder in the first suitable parent. Raises DistributedError if there is none."""
        self.folder, self._lock = _make((tempfile.gettempdir(), *PLACES) if parents is None else tuple(parents))
        self._number = 0
        self._close = weakref.finalize(self, _remove, self.folder, self._lock, os.getpid())

    def next(self) -> Path:
        """Remove the previous file and return the path of a new one."""
        self._path().unlink(missing_ok=True)
        self._number += 1
        return self._path()

    def close(self) -> None:
        """Remove the folder."""
        self._close()

    def _path(self) -> Path:
        return self.folder / f"ranks-{self._number}"


def _make(parents: tuple[str, ...]) -> tuple[Path, int]:
    """Create a folder. Return it and a descriptor that holds its lock for as long as the owner lives."""
    problems = []
    for parent in dict.fromkeys(parents):
        if problem := _unsuitable(Path(parent)):
            problems.append(problem)
            continue
        _remove_left_over(Path(parent))
        try:
            while True:
                folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
                lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                fcntl.flock(lock, fcntl.LOCK_EX)
                if folder.exists():  # otherwise another process removed it as left over before it was locked
                    return folder, lock
                os.close(lock)
        except OSError as error:
            problems.append(f"{parent}: {error.strerror}")
    raise DistributedError(
        "the ranks of a node meet through files on a local disk, and no folder is suitable: "
        f"{'; '.join(problems)}. Set TMPDIR to a folder on a local disk."
    )


def _unsuitable(parent: Path) -> str:
    """Return why the folder must not be created there; "" if it may be."""
    try:
        status = parent.stat()
    except OSError as error:
        return f"{parent}: {error.strerror}"
    if status.st_uid not in (0, os.geteuid()) and not (str(parent) in PLACES and _is_unmapped(status.st_uid)):
        return f"{parent} belongs to user {status.st_uid}"
    if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
        return f"{parent} lets other users rename its contents (mode {stat.S_IMODE(status.st_mode):04o})"
    kind = file_system(parent)
    return f"{parent} is on {kind}, which is shared with other machines" if kind in SHARED else ""


def _is_unmapped(user: int) -> bool:
    """Return True if the number represents users outside this container's user namespace, which may include root."""
    try:
        known = [[int(number) for number in line.split()] for line in USERS.read_text().splitlines()]
        overflow = int(OVERFLOW.read_text())
    except (OSError, ValueError):
        return False
    return user == overflow and not any(first <= user < first + count for first, _, count in known)


def file_system(path: Path) -> str:
    """Return the type of the file system that holds a path; "" if unknown."""
    try:
        lines = [line.split() for line in MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        return ""
    real = path.resolve()
    kind, longest = "", -1
    for fields in lines:
        if len(fields) < 3:
            continue
        mounted = Path(fields[1].encode().decode("unicode_escape").encode("latin-1").decode(errors="replace"))
        # Later mounts hide earlier ones at the same place.
        if real.is_relative_to(mounted) and len(mounted.parts) >= longest:
            kind, longest = fields[2], len(mounted.parts)
    return kind


def _remove_left_over(parent: Path) -> None:
    """Remove folders of this user that are not locked, because their owners are gone."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # it is gone or belongs to another user
            if folder.lstat().st_uid != os.geteuid():
                continue
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _remove(folder: Path, lock: int, owner: int) -> None:
    if os.getpid() == owner:  # forked children must not remove it
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


class RankLogs(LogsSpecs):
    """torch's specification of log files in ``log_dir``, "" if ranks share the launcher's output."""

    def __init__(self, log_dir: str = "") -> None:
        super().__init__(log_dir or None)
        try:
            self._kept: object = (files := RankFiles())  # a later launcher removes its folder if this one is killed
            self._errors = files.folder
        except DistributedError:  # TMPDIR and the other places are shared with other machines
            self._kept = tempfile.TemporaryDirectory(prefix="megapar-errors-", ignore_cleanup_errors=True)
            self._errors = Path(self._kept.name)
        self._starts = 0

    @property
    def root_log_dir(self) -> str:
        """The folder, as torch's interface requires it."""
        return str(self._root_log_dir or "")

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Create the files of the next start, and put those for ranks' failures into ``envs`` (by local rank)."""
        errors = self._errors / str(self._starts)
        with suppress(OSError):  # ranks that cannot write their error file still print the error
            errors.mkdir()
        self._starts += 1
        logs = dict.fromkeys(envs, "")
        files, without = {}, {}
        for rank, environ in envs.items():
            files[rank] = environ["TORCHELASTIC_ERROR_FILE"] = str(errors / f"{rank}.json")
            if self._root_log_dir:
                try:
                    logs[rank] = str(_created(log_file(self._root_log_dir, {**os.environ, **environ})))
                except OSError as error:
                    without[environ["RANK"]] = error
        if without:
            report_missing_logs(", ".join(without), next(iter(without.values())))
        tailed = {rank: log for rank, log in logs.items() if log}
        return LogsDest(logs, dict(logs), tailed, {}, files, "", "")


def log_file(folder: str, environ: dict[str, str]) -> Path:
    """Return the log file of the rank with this environment."""
    job = path_part(environ.get("TORCHELASTIC_RUN_ID") or "job")
    return Path(folder) / job / f"attempt-{starts_before(environ)}" / f"rank-{environ['RANK']}.log"


def report_missing_logs(ranks: str, error: OSError) -> None:
    """Report that ranks have no log file, and that they share the launcher's output instead."""
    write_stderr(f"megapar launch: no log file for ranks {ranks}: {error}; they write to the launcher's output instead")


def _created(path: Path) -> Path:
    """Create an empty file at the path and return the path. Renames an existing file. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        numbers = [
            int(other.suffix[1:]) for other in path.parent.glob(f"{path.name}.*") if other.suffix[1:].isdecimal()
        ]
        path.rename(path.with_name(f"{path.name}.{max(numbers, default=0) + 1}"))
    path.touch()
    return path
