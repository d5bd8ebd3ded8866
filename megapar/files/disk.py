"""The disk as a store: files and folders reach it before they get their name, and replace old ones in one step.

    temporary name -> fsync of every file and folder -> rename, or exchange with the old one -> fsync of the parent

After a power failure a name refers either to the old content or to all of the new content.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import io
import os
import shutil
import stat
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath

from megapar.files.regular_file import open_regular

BEAT = ".beat"
LOCK_SECONDS = 5.0
_AT_FDCWD, _EXCHANGE = -100, 2  # constants of renameat2 (Linux)
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)  # from kernels and file systems without it


@dataclass(frozen=True)
class DiskStore:
    """Mounted file systems as a store, with the verbs of ``files.location.Location``."""

    def read(self, path: PurePath) -> io.RawIOBase:
        """Open a regular file. Raises OSError."""
        return open_regular(path).detach()

    def write(self, path: PurePath) -> DiskWriting:
        """Begin a new file, and the folders above it."""
        return DiskWriting(Path(path))

    def list(self, folder: PurePath) -> dict[str, int | None]:
        """Return name -> size of a regular file, or None for anything else; {} if there is no such folder."""
        try:
            with os.scandir(folder) as entries:
                return {entry.name: _size(entry) for entry in entries}
        except (FileNotFoundError, NotADirectoryError):
            return {}

    def publish(self, made: PurePath, path: PurePath, *, replace: bool = False) -> None:
        """Rename what is complete, and flush its name. Its files are on disk already: ``DiskWriting.finish``."""
        old, new = Path(made), Path(path)
        if not old.is_dir():
            (os.replace if replace else _link)(old, new)
            sync(new.parent)
            return
        if os.path.lexists(new) and not (new.is_dir() and (replace or not any(new.iterdir()))):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(new))
        for folder, _, _ in os.walk(old, topdown=False):
            sync(Path(folder))
        try:
            (rename if replace else Path.rename)(old, new)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(new)) from error
        try:
            sync(new.parent)
        except OSError:
            rename(new, old)
            raise
        remove(old)  # what was replaced

    def remove(self, path: PurePath) -> None:
        """Remove a file, or a folder with everything in it, if it exists."""
        remove(Path(path))

    def lock(self, path: PurePath, record: Callable[[bool], bytes]) -> DiskLock | None:
        """Create a record and hold a lock on it; it is locked before it has its name, right after without links."""
        final = Path(path)
        final.parent.mkdir(parents=True, exist_ok=True)
        aside = final.with_name(f"{uuid.uuid4().hex}.tmp")
        descriptor = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        lock = DiskLock(final, descriptor)
        try:
            os.write(descriptor, record(lock.take()))
            os.fsync(descriptor)
            _link(aside, final)
            if not os.path.samestat(os.fstat(descriptor), os.stat(final)):  # a copy: no hard links here
                own = os.open(final, os.O_RDWR)
                lock.release()
                lock = DiskLock(final, own)
                lock.take()
        except (FileExistsError, FileNotFoundError):  # the name is taken, or another start has removed ``aside``
            lock.release()
            return None
        except BaseException:
            lock.release()
            raise
        finally:
            aside.unlink(missing_ok=True)
        return lock

    def is_locked(self, path: PurePath) -> bool:
        """Return True unless a lock on the file could be taken. Only a hint: some file systems fake locks."""
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            return not _flock(descriptor, fcntl.LOCK_SH)
        finally:
            os.close(descriptor)

    def free_bytes(self, path: PurePath) -> int:
        """Return the bytes that are free on the disk of a path, which need not exist."""
        absolute = Path(path).absolute()
        return shutil.disk_usage(next(folder for folder in (absolute, *absolute.parents) if folder.is_dir())).free


class DiskWriting:
    """A new file that is being written. Raises FileExistsError if there is one."""

    def __init__(self, path: Path) -> None:
        self.path = path  # which the watchdog names if a write hangs
        try:
            self._file = path.open("xb", buffering=0)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("xb", buffering=0)

    def write(self, data: memoryview) -> None:
        """Append all of these bytes."""
        while len(data):
            data = data[self._file.write(data) :]

    def finish(self, *, durable: bool = True) -> None:
        """Close the file, flushed to disk unless it need not be ``durable``."""
        if durable:
            os.fsync(self._file.fileno())
        self._file.close()


class DiskLock:
    """A record whose file this process has locked, where the file system supports it."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._beat = path.with_suffix(BEAT)
        self._descriptor = descriptor  # holds the lock

    def renew(self, content: bytes) -> None:
        """Overwrite the heartbeat in place, which needs no space on a full disk."""
        descriptor = os.open(self._beat, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.pwrite(descriptor, content, 0)
        finally:
            os.close(descriptor)

    def take(self) -> bool:
        """Lock the file. Return False if the file system does not support it or another process has locked it."""
        return _flock(self._descriptor, fcntl.LOCK_EX)

    def release(self) -> None:
        """Release the lock."""
        with suppress(OSError):
            os.close(self._descriptor)


def _flock(descriptor: int, kind: int) -> bool:
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


def _link(made: Path, path: Path) -> None:
    """Rename a complete file without replacing an existing one. Raises FileExistsError."""
    try:
        os.link(made, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK):
            raise
        content = made.read_bytes()
        with path.open("xb") as file:  # no hard links here: a reader that sees half of the file retries
            try:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            except BaseException:
                path.unlink(missing_ok=True)
                raise
    made.unlink()


def _size(entry: os.DirEntry[str]) -> int | None:
    try:
        status = entry.stat()
    except OSError:  # a link to nothing, or removed since
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def sync(path: Path) -> None:
    """Flush the content of a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(path: Path) -> None:
    """Flush a file, or a folder with everything in it, to disk. Symbolic links are not followed."""
    if not path.is_dir():
        sync(path)
        return
    for folder, _, files in os.walk(path, topdown=False):
        for name in files:
            if (file := Path(folder, name)).is_file() and not file.is_symlink():
                sync(file)
        sync(Path(folder))


def write_file(path: Path, content: bytes) -> None:
    """Write a file with this content and replace an existing one; a device or a pipe is written to."""
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    aside = path.with_name(f".{path.name}.unfinished-{os.getpid()}")
    try:
        aside.write_bytes(content)
        put(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def put(made: Path, path: Path) -> None:
    """Move a complete file or folder to its final name on the same file system, and remove what had that name.

    If the file system can exchange two names, the name exists at every moment.
    """
    sync_tree(made)
    rename(made, path)
    sync(path.parent)
    if os.path.lexists(made):
        remove(made)


def rename(made: Path, path: Path) -> None:
    """Move as ``put`` does, without a flush. A replaced folder remains under the name ``made``."""
    if not os.path.lexists(path) or not (path.is_dir() or made.is_dir()):
        os.replace(made, path)
        return
    if exchange(made, path):
        return
    away = made.with_name(f"{made.name}.replaced")
    remove(away)
    path.rename(away)
    try:
        made.rename(path)
    except OSError:
        away.rename(path)
        raise
    away.rename(made)


def exchange(first: Path, second: Path) -> bool:
    """Exchange the names of two files or folders in one step. Return False, and do nothing, if that is unsupported."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), ctypes.c_uint(_EXCHANGE)) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(first), None, str(second))


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with everything in it, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
