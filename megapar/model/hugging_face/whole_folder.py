"""Replacement of a folder's files in one step: new files are written to a temporary folder first."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megapar.files.disk import put, remove, rename, sync, sync_tree
from megapar.files.location import Location, Place, at, copy

UNFINISHED = ".unfinished"


@contextmanager
def written_aside(folder: Place, replaced: Callable[[str], bool], last: str) -> Iterator[Path]:
    """Yield an empty folder to write into. On exit, sync its files to disk and move them into ``folder``.

    The two folders are exchanged, so that ``folder`` has the old or the new content at every moment. Files are moved
    one by one, ``last`` at the end, into a folder that cannot be exchanged: one that contains folders, the working
    directory or a parent of it, a mount point, or one whose parent is not writable. On failure ``folder`` is unchanged.
    In a store that is not a disk, it is without ``last`` while files are replaced, and after a failure.

    Args:
        replaced: Returns True for names of old files that are removed if no new file has the name; others are kept.
        last: The new file without which a reader does not accept the folder as complete.
    """
    path = at(folder).local_path()
    if path is None:
        with tempfile.TemporaryDirectory() as made:
            yield Path(made)
            _copied(Path(made), at(folder), replaced, last)
        return
    folder = Path(os.path.realpath(path))
    aside = None if _must_stay(folder) else _try_to_make(folder.with_name(f".{folder.name}{UNFINISHED}"))
    inside = aside is None
    if aside is None:
        aside = folder / UNFINISHED
        remove(aside)
        aside.mkdir(parents=True)
    try:
        yield aside
        if inside:
            _one_by_one(aside, folder, replaced, last)
            return
        if folder.is_dir():
            shutil.copystat(folder, aside)
            for old in folder.iterdir():
                if old.name != UNFINISHED and not replaced(old.name) and not (aside / old.name).exists():
                    _link(old, aside / old.name)
        put(aside, folder)
    finally:
        remove(aside)


def _must_stay(folder: Path) -> bool:
    """Return True if the path exists but cannot be exchanged for another folder."""
    if not folder.is_dir():
        return os.path.lexists(folder)
    folders = any(path.is_dir() and not path.is_symlink() and path.name != UNFINISHED for path in folder.iterdir())
    return folders or os.path.ismount(folder) or Path.cwd().is_relative_to(folder)


def _try_to_make(aside: Path) -> Path | None:
    try:
        remove(aside)
        aside.mkdir(parents=True)
    except OSError:
        return None
    return aside


def _link(old: Path, new: Path) -> None:
    """Hard-link a file; copy it if the file system does not support hard links."""
    try:
        os.link(old, new, follow_symlinks=False)
    except OSError:
        shutil.copy2(old, new, follow_symlinks=False)


def _copied(made: Path, folder: Location, replaced: Callable[[str], bool], last: str) -> None:
    """Write the files to a store that is not a disk, each in one step, and remove old ones, ``last`` first."""
    names = {path.relative_to(made).as_posix() for path in made.rglob("*") if path.is_file()}
    (folder / last).remove()
    for name in sorted(names, key=lambda name: (name == last, name)):
        copy(made / name, folder / name)
    for name in folder.list():
        if replaced(name) and name not in names:
            (folder / name).remove()


def _one_by_one(aside: Path, folder: Path, replaced: Callable[[str], bool], last: str) -> None:
    sync_tree(aside)
    names = {path.name for path in aside.iterdir()}
    for name in sorted(names, key=lambda name: (name == last, name)):
        (put if (aside / name).is_dir() else rename)(aside / name, folder / name)
    for old in folder.iterdir():
        if replaced(old.name) and old.name not in names:
            remove(old)
    sync(folder)
