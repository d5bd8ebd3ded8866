"""Folders of checkpoints: names, the one that is the latest, and how a finished one takes its place.

root/
  latest                          one line: the folder to resume from; replaced atomically
  iter_0000100/                   complete by construction: it got this name when everything in it was on disk
  iter_0000200.tmp-4f2a.../       a save that is under way, or was killed; never taken for a checkpoint
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import uuid
from pathlib import Path

from megapar.core.checkpoint.layout import FILE_NAME
from megapar.errors import CheckpointError

LATEST = "latest"


def iteration_folder(root: Path, iteration: int) -> Path:
    """Where the checkpoint of an iteration lies."""
    return root / f"iter_{iteration:07d}"


def checkpoints(root: Path) -> dict[int, Path]:
    """Iteration -> folder of every finished checkpoint under a root, in rising order; empty where there is none."""
    if not root.is_dir():
        return {}
    found = {}
    for path in root.iterdir():
        match = re.fullmatch(r"iter_([0-9]{7,18})", path.name)
        if match and (path / FILE_NAME).is_file():
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def latest(root: Path) -> Path | None:
    """The folder that ``latest`` names; None where nothing was published under this root.

    Raises CheckpointError where the file names no finished checkpoint.
    """
    path = root / LATEST
    try:
        if not path.is_file():
            return None
        with path.open("rb") as file:
            name = file.read(100).decode(errors="replace").strip()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not re.fullmatch(r"iter_[0-9]{7,18}", name) or not (root / name / FILE_NAME).is_file():
        raise CheckpointError(f"{path} names {name!r}, which is no checkpoint there. {_choices(root)}")
    return root / name


def find(root: Path, iteration: int | None = None) -> Path:
    """The checkpoint of an iteration, or the latest. Raises CheckpointError with those that exist."""
    if iteration is None:
        folder = latest(root)
        if folder is None:
            raise CheckpointError(f"{root} has no checkpoint that was published as {LATEST}. {_choices(root)}")
        return folder
    folder = checkpoints(root).get(iteration)
    if folder is None:
        raise CheckpointError(f"{root} has no checkpoint of iteration {iteration}. {_choices(root)}")
    return folder


def _choices(root: Path) -> str:
    found = list(checkpoints(root))
    return f"Iterations saved there: {', '.join(map(str, found[-10:]))}." if found else "No iteration is saved there."


def publish(root: Path, iteration: int) -> None:
    """Make a finished checkpoint the latest, atomically; called on one rank. Raises CheckpointError."""
    folder = iteration_folder(root, iteration)
    if not (folder / FILE_NAME).is_file():
        raise CheckpointError(f"{folder} is no finished checkpoint and cannot become the latest")
    aside = root / f"{LATEST}.tmp-{uuid.uuid4().hex[:12]}"
    try:
        with aside.open("x") as file:
            file.write(folder.name + "\n")
            file.flush()
            os.fsync(file.fileno())
        aside.replace(root / LATEST)
        sync_folder(root)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise CheckpointError(f"{root / LATEST} cannot be written: {error}") from error


def sync_folder(folder: Path) -> None:
    """Bring a folder's names to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_aside(folder: Path) -> None:
    """Remove what saves of this folder left aside."""
    for path in folder.parent.glob(f"{glob.escape(folder.name)}.tmp-*"):
        shutil.rmtree(path, ignore_errors=True)


def move_into_place(aside: Path, folder: Path) -> None:
    """Give a complete folder its name. A checkpoint of that name makes way first, by two renames."""
    sync_folder(aside)
    replaced = None
    if folder.exists():
        replaced = folder.with_name(f"{folder.name}.tmp-{uuid.uuid4().hex[:12]}")
        folder.rename(replaced)
    aside.rename(folder)
    sync_folder(folder.parent)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)
