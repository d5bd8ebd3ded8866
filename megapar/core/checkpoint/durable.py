"""Files and folders that are on disk before they have their name, and that take the place of others in one step.

    made aside -> fsync of every file and folder in it -> rename, or exchange with what is there -> fsync of the parent

After a power failure a name is either what it was, or all of what it became. Standard library only.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from pathlib import Path

_AT_FDCWD, _EXCHANGE = -100, 2  # of renameat2 (Linux)
_CANNOT = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)  # said by kernels and file systems without it


def sync_file(path: Path) -> None:
    """Bring a file's content to disk, or a folder's names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Bring a folder's names to disk."""
    sync_file(folder)


def sync_tree(path: Path) -> None:
    """Bring to disk a file, or a folder with all that is in it; links stay what they are."""
    if not path.is_dir():
        sync_file(path)
        return
    for place, _, files in os.walk(path, topdown=False):
        for name in files:
            if (file := Path(place, name)).is_file() and not file.is_symlink():
                sync_file(file)
        sync_folder(Path(place))


def write_file(path: Path, content: bytes) -> None:
    """A file with this content, in place of the one that was there."""
    aside = path.with_name(f".{path.name}.unfinished-{os.getpid()}")
    try:
        aside.write_bytes(content)
        put(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def put(made: Path, path: Path) -> None:
    """Give what is whole its name, on the same file system; what had the name is gone afterwards.

    At no moment is there nothing of that name, where the file system can exchange two names.
    """
    sync_tree(made)
    rename(made, path)
    sync_folder(path.parent)
    if os.path.lexists(made):
        remove(made)


def put_new(made: Path, path: Path) -> None:
    """The same where nothing has the name, or an empty folder; raises OSError for a folder that holds something."""
    sync_tree(made)
    made.rename(path)
    sync_folder(path.parent)


def rename(made: Path, path: Path) -> None:
    """As ``put``, of what is on disk already; ``made`` is then what had the name, where it could not be overwritten."""
    if not os.path.lexists(path) or not (path.is_dir() or made.is_dir()):
        os.replace(made, path)
        return
    if exchange(made, path):
        return
    away = path.with_name(f".{path.name}.replaced-{os.getpid()}")
    remove(away)
    path.rename(away)
    try:
        made.rename(path)
    except OSError:
        away.rename(path)
        raise
    away.rename(made)


def exchange(one: Path, other: Path) -> bool:
    """Let two files or folders change names in one step; False, and nothing done, where that cannot be had."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), ctypes.c_uint(_EXCHANGE)) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT:
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


def remove(path: Path) -> None:
    """A file, a link or a folder with all that is in it, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
