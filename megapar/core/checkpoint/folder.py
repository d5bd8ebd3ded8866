"""Folders of checkpoints: names, the one that is the latest, and how a finished one takes its place.

root/
  latest                          one line: the folder to resume from and the epoch of the owner that says so
  iter_0000100/                   complete by construction: it got this name when everything in it was on disk
  iter_0000100.e3/                the same iteration again, by the third owner of the folder
  iter_0000200.tmp-4f2a...-e3/    a save of that owner that is under way, or was killed; never taken for a checkpoint
  owner/                          see lease.py

An owner (owner.py) takes nobody's name and nobody's place: what it does while it does not know yet that it has a
successor adds to the folder, and what readers take is the successor's. Without an owner, as for a folder that a
conversion makes aside, a checkpoint replaces the one of its name.
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

from megapar.config.latest_name import LATEST, OWNERS, iteration_name, of_name, owners_latest, read_latest
from megapar.config.suspects import suspects
from megapar.core.checkpoint.durable import sync_folder
from megapar.core.checkpoint.layout import FILE_NAME
from megapar.core.checkpoint.owner import Owner
from megapar.errors import CheckpointError

_ASIDE = re.compile(r"(?:iter_[0-9]{7,18}(?:\.e[0-9]+)?|latest)\.tmp-[0-9a-f]{12}(?:-e([0-9]+))?")


def iteration_folder(root: Path, iteration: int) -> Path:
    """Where the checkpoint of an iteration lies, unless that name was taken."""
    return root / iteration_name(iteration)


def iteration_of(folder: Path) -> int:
    """Of a checkpoint's folder; -1 for one of another name."""
    name = of_name(folder.name)
    return -1 if name is None else name[0]


def every_checkpoint(root: Path) -> dict[int, list[Path]]:
    """Iteration -> folders of every finished checkpoint of it, the newest owner's last; iterations in rising order."""
    try:
        if not root.is_dir():
            return {}
        found = sorted((name, path) for path in root.iterdir() if (name := of_name(path.name)))
    except OSError as error:
        raise CheckpointError(f"{root} cannot be looked through: {error}") from error
    every: dict[int, list[Path]] = {}
    for (iteration, _), path in found:
        if _is_finished(path):
            every.setdefault(iteration, []).append(path)
    return every


def _is_finished(folder: Path) -> bool:
    """Whether it is to be taken for a checkpoint. One that may not be looked into is: whoever reads it says so."""
    try:
        return stat.S_ISREG((folder / FILE_NAME).stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def checkpoints(root: Path) -> dict[int, Path]:
    """Iteration -> folder of the newest finished checkpoint of it, in rising order; empty where there is none."""
    return {iteration: paths[-1] for iteration, paths in every_checkpoint(root).items()}


def latest(root: Path) -> Path | None:
    """The folder that ``latest`` names; None where nothing was published under this root.

    Raises CheckpointError where it names no finished checkpoint.
    """
    try:
        found = read_latest(root)
    except OSError as error:
        raise CheckpointError(f"{root / LATEST} cannot be read: {error}") from error
    if found is None:
        return None
    name, _ = found
    if not of_name(name) or not _is_finished(root / name):
        raise CheckpointError(f"{root / LATEST} names {name!r}, which is no checkpoint there. {_choices(root)}")
    return root / name


def find(root: Path, iteration: int | None = None) -> Path:
    """The checkpoint of an iteration, be it one that was set aside as suspect, or the latest.

    Raises CheckpointError with those that exist.
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
        return "There is no such folder."
    found, aside = list(checkpoints(root)), list(suspects(root))
    told = f"Iterations saved there: {', '.join(map(str, found[-10:]))}." if found else "No iteration is saved there."
    return f"{told} Set aside as suspect: {', '.join(map(str, aside[-10:]))}." if aside else told


def publish(root: Path, iteration: int, owner: Owner | None = None) -> None:
    """Make a finished checkpoint the latest, atomically; called on one rank.

    Raises CheckpointError; FolderLostError where the owner is none any more.
    """
    folder = iteration_folder(root, iteration)
    if owner is not None:
        own = root / iteration_name(iteration, owner.epoch)
        folder = own if own.exists() else folder
    publish_folder(root, folder, owner)


def publish_folder(root: Path, folder: Path, owner: Owner | None) -> None:
    """Make one of a root's checkpoints the latest, as ``publish`` does."""
    if not (folder / FILE_NAME).is_file():
        raise CheckpointError(f"{folder} is no finished checkpoint and cannot become the latest")
    if owner is None:
        _replace(root / LATEST, folder.name, "")
        return
    owner.check()
    line = f"{folder.name} {owner.epoch}"
    try:
        _replace(root / OWNERS / f"{owner.epoch}.{LATEST}", line, _mark(owner))
        _replace(root / LATEST, line, _mark(owner))
    except CheckpointError:
        owner.check()  # a successor has removed what was written aside
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
    """What names of an owner's unfinished files end in."""
    return "" if owner is None else f"-e{owner.epoch}"


def name_aside(folder: Path, owner: Owner | None) -> Path:
    """A new name for what is to become a folder, or was one."""
    return folder.with_name(f"{folder.name}.tmp-{uuid.uuid4().hex[:12]}{_mark(owner)}")


def candidates(root: Path) -> tuple[list[Path], str]:
    """(the checkpoints to try when a run resumes, best first; what is wrong with ``latest``, or "").

    The one that ``latest`` names and then older ones; where it names none, all of them, newest first. Of an iteration
    that was saved again the earlier ones come last of all: the run had turned back before it, and left their line.
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
    """Remove all but the newest ``count`` checkpoints up to an iteration; those that were removed.

    line: names of the checkpoints that the run has made or comes from; no other is touched. passed: last iterations at
    which a check vouches for the run; the newest up to each stays, too. One is renamed before it is removed, so that a
    killed removal leaves nothing that looks like a checkpoint.
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
    """Whether a folder that stands in the way of a checkpoint is one, be it without its layout, or empty."""
    known = re.compile(r"scalars\.json|shard-[0-9]+\.safetensors")
    return (folder / FILE_NAME).is_file() or (
        folder.is_dir() and all(known.fullmatch(path.name) for path in folder.iterdir())
    )


def remove_aside(folder: Path, owner: Owner | None = None) -> None:
    """Remove what saves of this folder by this owner left aside."""
    for path in folder.parent.glob(f"{glob.escape(folder.name)}.tmp-*"):
        if owner is None or path.name.endswith(_mark(owner)):
            shutil.rmtree(path, ignore_errors=True)


def remove_left_over(folder: Path, owner: Owner | None = None) -> None:
    """Remove what killed saves of this folder and, where an owner asks, those of earlier owners left aside."""
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
    """Give a complete folder its name, or where that is taken the one with the owner's epoch; which one it got.

    Without an owner a checkpoint of that name makes way, by two renames. Raises FolderLostError.
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
            aside.rename(folder)  # which fails where a folder that holds anything has come there meanwhile
            sync_folder(folder.parent)
            return folder
        except OSError as error:
            owner.check()  # a successor may have removed what was aside, too
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    name = of_name(folder.name)
    assert name is not None, "an owner saves iterations"
    own = folder.with_name(iteration_name(name[0], owner.epoch))
    _replace_folder(aside, own, owner)  # nobody else's name
    return own


def _replace_folder(aside: Path, folder: Path, owner: Owner | None) -> None:
    replaced = None
    if folder.exists():
        replaced = name_aside(folder, owner)
        folder.rename(replaced)
    aside.rename(folder)
    sync_folder(folder.parent)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)
