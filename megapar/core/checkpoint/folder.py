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
    if not root.exists():
        return "There is no such folder."
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


def candidates(root: Path) -> tuple[list[Path], str]:
    """(the checkpoints to try when a run resumes, best first; what is wrong with ``latest``, or "").

    The one that ``latest`` names and then older ones; where it names none, all of them, newest first.
    """
    rising = checkpoints(root)
    problem = ""
    try:
        named = latest(root)
        if named is None and rising:
            problem = f"{root} has checkpoints, but no file {LATEST} that names one"
    except CheckpointError as error:
        named, problem = None, str(error)
    paths = list(rising.values())
    return (paths if named is None else paths[: paths.index(named) + 1])[::-1], problem


def keep_newest(root: Path, iteration: int, count: int) -> list[Path]:
    """Remove all but the newest ``count`` checkpoints up to an iteration; those that were removed.

    One is renamed before it is removed, so that a killed removal leaves nothing that looks like a checkpoint.
    """
    upto = [path for number, path in checkpoints(root).items() if number <= iteration]
    removed = upto[: max(0, len(upto) - count)]
    for path in removed:
        aside = path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex[:12]}")
        path.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
    return removed


def is_ours(folder: Path) -> bool:
    """Whether a folder that stands in the way of a checkpoint is one, be it without its layout, or empty."""
    known = re.compile(r"scalars\.json|shard-[0-9]+\.safetensors")
    return (folder / FILE_NAME).is_file() or (
        folder.is_dir() and all(known.fullmatch(path.name) for path in folder.iterdir())
    )


def remove_aside(folder: Path) -> None:
    """Remove what saves of this folder left aside."""
    for path in folder.parent.glob(f"{glob.escape(folder.name)}.tmp-*"):
        shutil.rmtree(path, ignore_errors=True)


def remove_left_over(folder: Path) -> None:
    """Remove what killed saves of this and, where it is named by its iteration, of other iterations left aside."""
    remove_aside(folder)
    if not re.fullmatch(r"iter_[0-9]{7,18}", folder.name) or not folder.parent.is_dir():
        return
    for path in folder.parent.iterdir():
        if re.fullmatch(r"iter_[0-9]{7,18}\.tmp-[0-9a-f]{12}", path.name):
            shutil.rmtree(path, ignore_errors=True)
        elif re.fullmatch(rf"{LATEST}\.tmp-[0-9a-f]{{12}}", path.name):
            path.unlink(missing_ok=True)


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
