"""A folder whose files are written aside and take the place of those before them in one step."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megapar.core.checkpoint.durable import put, remove, rename, sync_folder, sync_tree


@contextmanager
def written_aside(folder: Path, replaced: Callable[[str], bool], last: str) -> Iterator[Path]:
    """An empty folder to write into, of which ``folder`` gets the files when all are there and on disk.

    replaced: names of files in ``folder`` that end with this, should no new one have them; the others stay. last: of
    the new files, the one without which nobody takes the folder for whole.
    The two folders are exchanged, so that there is the old content or the new one at every moment. File by file, and
    ``last`` last, goes what cannot be exchanged: a folder with folders in it, one that somebody works in, a mount
    point, or one whose parent takes no folder. What fails leaves ``folder`` as it was.
    """
    folder = Path(os.path.realpath(folder))
    aside = None if _stays(folder) else _made(folder.with_name(f".{folder.name}.unfinished"))
    inside = aside is None
    if aside is None:
        aside = folder / ".unfinished"
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
                if not replaced(old.name) and not (aside / old.name).exists():
                    _link(old, aside / old.name)
        put(aside, folder)
    finally:
        remove(aside)


def _stays(folder: Path) -> bool:
    """Whether the folder itself may not become another one, or is not one."""
    if not folder.is_dir():
        return os.path.lexists(folder)
    folders = any(path.is_dir() and not path.is_symlink() and path.name != ".unfinished" for path in folder.iterdir())
    return folders or os.path.ismount(folder) or Path.cwd().is_relative_to(folder)


def _made(aside: Path) -> Path | None:
    try:
        remove(aside)
        aside.mkdir(parents=True)
    except OSError:
        return None
    return aside


def _link(old: Path, new: Path) -> None:
    """The same file under another name, or where a file system has no such thing a copy."""
    try:
        os.link(old, new, follow_symlinks=False)
    except OSError:
        shutil.copy2(old, new, follow_symlinks=False)


def _one_by_one(aside: Path, folder: Path, replaced: Callable[[str], bool], last: str) -> None:
    sync_tree(aside)
    names = {path.name for path in aside.iterdir()}
    for name in sorted(names, key=lambda name: (name == last, name)):
        rename(aside / name, folder / name)
    for old in folder.iterdir():
        if replaced(old.name) and old.name not in names:
            remove(old)
    sync_folder(folder)
