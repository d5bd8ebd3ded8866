"""Checkpoint folders: their names, the latest one, and the rename that makes a finished one visible.

root/
  latest                          one line: the folder to resume from, and the epoch of the owner that wrote it
  iter_0000100/                   always complete: it was renamed to this after all its content was on disk
  iter_0000100.e3/                the same iteration saved again, by the third owner of the root
  iter_0000200.tmp-4f2a...-e3/    a running or killed save of that owner; never read as a checkpoint
  owner/                          see lease.py

An owner (owner.py) never takes an existing name or replaces a folder. If a successor has taken over without its
knowledge, its writes only add folders, and readers use the successor's. Without an owner, as in a conversion, a
checkpoint replaces an existing one of the same name.
"""

from __future__ import annotations

import errno
import glob
import os
import re
import shutil
import stat
import uuid
from collections.abc import Collection
from pathlib import Path

from megapar.core.checkpoint.owner import Owner
from megapar.errors import CheckpointError
from megapar.files.checkpoint_names import (
    LATEST,
    LAYOUT_FILE,
    OWNERS,
    folders_below,
    is_part,
    iteration_name,
    owners_latest,
    parse_checkpoint_name,
    read_latest,
)
from megapar.files.disk import sync_folder
from megapar.files.suspects import suspects

_ASIDE = re.compile(r"(?:iter_[0-9]{7,18}(?:\.e[0-9]+)?|latest)\.tmp-[0-9a-f]{12}(?:-e([0-9]+))?")


def iteration_folder(root: Path, iteration: int) -> Path:
    """Return the folder for a checkpoint of this iteration. An owner uses another name if this one exists."""
    return root / iteration_name(iteration)


def iteration_of(folder: Path) -> int:
    """Return the iteration of a checkpoint folder, or -1 if the name is not one of a checkpoint."""
    name = parse_checkpoint_name(folder.name)
    return -1 if name is None else name[0]


def every_checkpoint(root: Path) -> dict[int, list[Path]]:
    """Map each iteration, in ascending order, to the folders of its finished checkpoints, the newest owner's last."""
    try:
        if not root.is_dir():
            return {}
        found = sorted((name, path) for path in root.iterdir() if (name := parse_checkpoint_name(path.name)))
    except OSError as error:
        raise CheckpointError(f"{root} cannot be listed: {error}") from error
    every: dict[int, list[Path]] = {}
    for (iteration, _), path in found:
        if _is_finished(path):
            every.setdefault(iteration, []).append(path)
    return every


def _is_finished(folder: Path) -> bool:
    """Return True for a finished checkpoint, and for a folder without read permission: reading it reports that."""
    try:
        return stat.S_ISREG((folder / LAYOUT_FILE).stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def checkpoints(root: Path) -> dict[int, Path]:
    """Map each iteration, in ascending order, to the folder of its newest finished checkpoint."""
    return {iteration: paths[-1] for iteration, paths in every_checkpoint(root).items()}


def latest(root: Path) -> Path | None:
    """Return the folder that ``latest`` names, or None if nothing was published under this root.

    Raises CheckpointError if ``latest`` does not name a finished checkpoint.
    """
    try:
        found = read_latest(root)
    except OSError as error:
        raise CheckpointError(f"{root / LATEST} cannot be read: {error}") from error
    if found is None:
        return None
    name, _ = found
    if not parse_checkpoint_name(name) or not _is_finished(root / name):
        raise CheckpointError(f"{root / LATEST} names {name!r}, which is not a checkpoint there. {_choices(root)}")
    return root / name


def find(root: Path, iteration: int | None = None) -> Path:
    """Return the checkpoint of an iteration, even one that was set aside as suspect, or the latest.

    Raises CheckpointError with the existing iterations if there is none.
    """
    if iteration is None:
        folder = latest(root)
        if folder is None:
            raise CheckpointError(f"{root} has no checkpoint that was published as {LATEST}. {_choices(root)}")
        return folder
    folder = checkpoints(root).get(iteration) or suspects(root).get(iteration)
    if folder is None:
        raise CheckpointError(f"{root} has no checkpoint of iteration {iteration}. {_choices(root)}")
    return folder


def _choices(root: Path) -> str:
    if not root.exists():
        return "The folder does not exist."
    saved, suspect = list(checkpoints(root)), list(suspects(root))
    text = f"Iterations saved there: {', '.join(map(str, saved[-10:]))}." if saved else "No iteration is saved there."
    if not saved and not suspect and (below := folders_below(root)):
        return f"{text} Did you mean {' or '.join(below[:3])}?"
    return f"{text} Set aside as suspect: {', '.join(map(str, suspect[-10:]))}." if suspect else text


def publish(root: Path, iteration: int, owner: Owner | None = None) -> None:
    """Make a finished checkpoint the latest, atomically. Call it on one rank.

    Raises CheckpointError, and FolderLostError if the owner has a successor.
    """
    folder = iteration_folder(root, iteration)
    if owner is not None:
        own = root / iteration_name(iteration, owner.epoch)
        folder = own if own.exists() else folder
    publish_folder(root, folder, owner)


def publish_folder(root: Path, folder: Path, owner: Owner | None) -> None:
    """Make a checkpoint folder of this root the latest, as ``publish`` does."""
    if not (folder / LAYOUT_FILE).is_file():
        raise CheckpointError(f"{folder} is not a finished checkpoint and cannot become the latest")
    if owner is None:
        _replace(root / LATEST, folder.name, "")
        return
    owner.check()
    line = f"{folder.name} {owner.epoch}"
    try:
        _replace(root / OWNERS / f"{owner.epoch}.{LATEST}", line, _mark(owner))
        _replace(root / LATEST, line, _mark(owner))
    except CheckpointError:
        owner.check()  # a successor may have removed the temporary file
        raise
    for epoch in owners_latest(root):
        if epoch < owner.epoch:
            (root / OWNERS / f"{epoch}.{LATEST}").unlink(missing_ok=True)


def _replace(path: Path, line: str, mark: str) -> None:
    aside = path.with_name(f"{LATEST}.tmp-{uuid.uuid4().hex[:12]}{mark}")
    try:
        with aside.open("x") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise CheckpointError(f"{path} cannot be written: {error}") from error


def _mark(owner: Owner | None) -> str:
    """Return the suffix of the names of an owner's unfinished files."""
    return "" if owner is None else f"-e{owner.epoch}"


def name_aside(folder: Path, owner: Owner | None) -> Path:
    """Return a unique temporary name for a folder that is being written or removed."""
    return folder.with_name(f"{folder.name}.tmp-{uuid.uuid4().hex[:12]}{_mark(owner)}")


def candidates(root: Path) -> tuple[list[Path], str]:
    """Return the checkpoints to try when a run resumes, best first, and the problem with ``latest`` or "".

    The first is the one that ``latest`` names, followed by older ones. If it names none, all checkpoints follow each
    other, newest first. If an iteration was saved more than once, its earlier checkpoints come at the very end: the run
    had gone back to before that iteration and abandoned them.
    """
    problem = ""
    try:
        named = latest(root)
    except CheckpointError as error:
        named, problem = None, str(error)
    paths = [path for same in every_checkpoint(root).values() for path in same]
    if named is None and paths and not problem:
        problem = f"{root} has checkpoints, but no file {LATEST} that names one"
    upto = paths[: paths.index(named) + 1] if named in paths else paths
    newest = {iteration_of(path): path for path in upto}.values()
    return [*(path for path in upto if path not in newest), *newest][::-1], problem


def keep_newest(
    root: Path, iteration: int, count: int, line: set[str], owner: Owner | None, passed: Collection[int] = ()
) -> list[Path]:
    """Remove all but the newest ``count`` checkpoints up to an iteration, and return the removed ones.

    A checkpoint is renamed before it is removed, so that a killed removal leaves nothing that looks like a checkpoint.

    Args:
        line: Names of the checkpoints that this run wrote or resumed from. Others are not touched.
        passed: The last iterations that the checks have verified. The newest checkpoint up to each of them is kept.
    """
    upto: dict[int, list[Path]] = {}
    for number, paths in every_checkpoint(root).items():
        own = [path for path in paths if path.name in line]
        if own and number <= iteration:
            upto[number] = own
    spared = {max((number for number in upto if number <= last), default=-1) for last in passed}
    old = [number for number in list(upto)[: max(0, len(upto) - count)] if number not in spared]
    removed = [path for number in old for path in upto[number]]
    for path in removed:
        if owner is not None:
            owner.check()
        aside = name_aside(path, owner)
        path.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
    return removed


def is_ours(folder: Path) -> bool:
    """Return True if a folder in the place of a checkpoint is a checkpoint, is one without its layout, or is empty."""
    return (folder / LAYOUT_FILE).is_file() or (
        folder.is_dir() and all(is_part(path.name) for path in folder.iterdir())
    )


def remove_aside(folder: Path, owner: Owner | None = None) -> None:
    """Remove the temporary folders of this owner's saves of this folder."""
    for path in folder.parent.glob(f"{glob.escape(folder.name)}.tmp-*"):
        if owner is None or path.name.endswith(_mark(owner)):
            shutil.rmtree(path, ignore_errors=True)


def remove_left_over(folder: Path, owner: Owner | None = None) -> None:
    """Remove the temporary folders of killed saves of this folder and, given an owner, of all earlier owners."""
    remove_aside(folder, owner)
    if owner is None or not folder.parent.is_dir():
        return
    for path in (*folder.parent.iterdir(), *(folder.parent / OWNERS).glob(f"{LATEST}.tmp-*")):
        match = _ASIDE.fullmatch(path.name)
        if match is None or int(match[1] or 0) >= owner.epoch:
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def move_into_place(aside: Path, folder: Path, owner: Owner | None = None) -> Path:
    """Rename a complete folder to its final name, or to the name with the owner's epoch if that exists. Return it.

    Without an owner an existing checkpoint of that name is replaced, by two renames. Raises FolderLostError.
    """
    sync_folder(aside)
    if owner is not None:
        folder = _take_name(aside, folder, owner)
    else:
        _replace_folder(aside, folder, None)
    return folder


def _take_name(aside: Path, folder: Path, owner: Owner) -> Path:
    owner.check()
    if not folder.exists():
        try:
            _name(aside, folder)  # fails if a non-empty folder has appeared there since
            return folder
        except OSError as error:
            owner.check()  # a successor may also have removed the temporary folder
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    name = parse_checkpoint_name(folder.name)
    assert name is not None, "an owner saves only iterations"
    own = folder.with_name(iteration_name(name[0], owner.epoch))
    _replace_folder(aside, own, owner)  # no other owner uses this name
    return own


def _name(aside: Path, folder: Path) -> None:
    """Rename a complete folder and flush the name. Raises OSError, and then the folder does not have the name."""
    aside.rename(folder)
    try:
        sync_folder(folder.parent)
    except OSError:
        folder.rename(aside)
        raise


def _replace_folder(aside: Path, folder: Path, owner: Owner | None) -> None:
    replaced = None
    if folder.exists():
        replaced = name_aside(folder, owner)
        folder.rename(replaced)
    try:
        _name(aside, folder)
    except OSError:
        if replaced is not None:
            replaced.rename(folder)
        raise
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)
