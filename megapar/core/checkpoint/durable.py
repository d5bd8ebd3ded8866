"""Durable writes: files and folders reach the disk before they get their name and replace old ones in one step.

    temporary name -> fsync of every file and folder -> rename, or exchange with the old one -> fsync of the parent

After a power failure a name refers either to the old content or to all of the new content.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from pathlib import Path

_AT_FDCWD, _EXCHANGE = -100, 2  # constants of renameat2 (Linux)
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)  # from kernels and file systems without it


def sync_file(path: Path) -> None:
    """Flush the content of a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to disk."""
    sync_file(folder)


def sync_tree(path: Path) -> None:
    """Flush a file, or a folder with everything in it, to disk. Symbolic links are not followed."""
    if not path.is_dir():
        sync_file(path)
        return
    for place, _, files in os.walk(path, topdown=False):
        for name in files:
            if (file := Path(place, name)).is_file() and not file.is_symlink():
                sync_file(file)
        sync_folder(Path(place))


def write_file(path: Path, content: bytes) -> None:
    """Write a file with this content and replace an existing one."""
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
    sync_folder(path.parent)
    if os.path.lexists(made):
        remove(made)


def put_new(made: Path, path: Path) -> None:
    """Do the same for a new name. Raises OSError if the name is that of a folder with content."""
    sync_tree(made)
    made.rename(path)
    sync_folder(path.parent)


def rename(made: Path, path: Path) -> None:
    """Move as ``put`` does, without a flush. A replaced folder remains under the name ``made``."""
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
    """Exchange the names of two files or folders in one step. Return False, and do nothing, if that is unsupported."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), ctypes.c_uint(_EXCHANGE)) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with everything in it, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def unused(path: Path) -> Path:
    """Return this name, or if it exists the same with the first unused number."""
    number = 2
    free = path
    while os.path.lexists(free):
        stem, suffix = (path.stem, path.suffix) if path.suffix == ".json" else (path.name, "")
        free = path.with_name(f"{stem}-{number}{suffix}")
        number += 1
    return free
