"""Checkpoint folders: their names, the latest one, and the rename that makes a finished one visible.

root/
  latest                          one line: the folder to resume from, and the epoch of the owner that wrote it
  iter_0000100/                   always complete: it was renamed to this after all its content was on disk
  iter_0000100.e3/                the same iteration saved again, by the third owner of the root
  iter_0000200.tmp-4f2a...-e3/    a running or killed save of that owner; never read as a checkpoint
  iter_0000104.suspect/           it may contain corrupted numbers; set aside, never removed
  owner/                          see ownership/owner.py

In an object store, which changes no names, files stay in the temporary folder, and iter_0000100 is an object that names
it (``files.bucket``).

An owner never takes an existing name or replaces a folder. If a successor has taken over without its knowledge, its
writes only add folders, and readers use the successor's. Without an owner, as in a conversion, a checkpoint replaces an
existing one of the same name.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection
from contextlib import suppress

from megapar.checkpoints.format.faults import RECORD, suspects
from megapar.checkpoints.format.names import (
    LATEST,
    LAYOUT_FILE,
    OWNERS,
    folders_below,
    is_of_owner,
    is_part,
    iteration_name,
    owners_latest,
    parse_checkpoint_name,
    read_latest,
)
from megapar.checkpoints.format.shards import write_bytes
from megapar.checkpoints.ownership.owner import Owner
from megapar.errors import CheckpointError
from megapar.files.location import Location, Place, at


def iteration_folder(root: Place, iteration: int) -> Location:
    """Return the folder for a checkpoint of this iteration. An owner uses another name if this one exists."""
    return at(root) / iteration_name(iteration)


def iteration_of(folder: Place) -> int:
    """Return the iteration of a checkpoint folder, or -1 if the name is not one of a checkpoint."""
    name = parse_checkpoint_name(at(folder).name)
    return -1 if name is None else name[0]


def every_checkpoint(root: Place) -> dict[int, list[Location]]:
    """Map each iteration, in ascending order, to the folders of its finished checkpoints, the newest owner's last."""
    try:
        parsed_names = sorted((parsed, name) for name in at(root).list() if (parsed := parse_checkpoint_name(name)))
    except OSError as error:
        raise CheckpointError(f"{root} cannot be listed: {error}") from error
    every: dict[int, list[Location]] = {}
    for (iteration, _), name in parsed_names:
        if _is_finished(at(root) / name):
            every.setdefault(iteration, []).append(at(root) / name)
    return every


def _is_finished(folder: Location) -> bool:
    """Return True for a finished checkpoint, and for a folder without read permission: reading it reports that."""
    try:
        return (folder / LAYOUT_FILE).is_file()
    except OSError:
        return True


def checkpoints(root: Place) -> dict[int, Location]:
    """Map each iteration, in ascending order, to the folder of its newest finished checkpoint."""
    return {iteration: paths[-1] for iteration, paths in every_checkpoint(root).items()}


def latest(root: Place) -> Location | None:
    """Return the folder that ``latest`` names, None without it. Raises CheckpointError if it is not a finished one."""
    root = at(root)
    try:
        published = read_latest(root)
    except OSError as error:
        raise CheckpointError(f"{root / LATEST} cannot be read: {error}") from error
    if published is None:
        return None
    name, _ = published
    if not parse_checkpoint_name(name) or not _is_finished(root / name):
        raise CheckpointError(f"{root / LATEST} names {name!r}, which is not a checkpoint there. {_choices(root)}")
    return root / name


def find(root: Place, iteration: int | None = None) -> Location:
    """Return the checkpoint of an iteration, even one set aside as suspect, or the latest. Raises CheckpointError."""
    if iteration is None:
        folder = latest(root)
        if folder is None:
            raise CheckpointError(f"{root} has no checkpoint that was published as {LATEST}. {_choices(root)}")
        return folder
    folder = checkpoints(root).get(iteration) or suspects(root).get(iteration)
    if folder is None:
        raise CheckpointError(f"{root} has no checkpoint of iteration {iteration}. {_choices(root)}")
    return folder


def _choices(root: Place) -> str:
    if not at(root).exists():
        return "The folder does not exist."
    saved, suspect = list(checkpoints(root)), list(suspects(root))
    text = f"Iterations saved there: {', '.join(map(str, saved[-10:]))}." if saved else "No iteration is saved there."
    if not saved and not suspect and (below := folders_below(root)):
        return f"{text} Did you mean {' or '.join(below[:3])}?"
    return f"{text} Set aside as suspect: {', '.join(map(str, suspect[-10:]))}." if suspect else text


def publish(root: Place, iteration: int, owner: Owner | None = None) -> None:
    """Make a finished checkpoint the latest, atomically. Call it on one rank.

    Raises CheckpointError, and FolderLostError if the owner has a successor.
    """
    folder = iteration_folder(root, iteration)
    if owner is not None:
        with_epoch = folder.with_name(iteration_name(iteration, owner.epoch))
        folder = with_epoch if (with_epoch / LAYOUT_FILE).is_file() else folder
    publish_folder(folder, owner)


def publish_folder(folder: Location, owner: Owner | None) -> None:
    """Make a checkpoint folder the latest of its root, as ``publish`` does."""
    root = folder.parent
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
            (root / OWNERS / f"{epoch}.{LATEST}").remove()


def _replace(path: Location, line: str, mark: str) -> None:
    aside = path.with_name(f"{LATEST}.tmp-{uuid.uuid4().hex[:12]}{mark}")
    try:
        write_bytes(aside, f"{line}\n".encode())
        aside.publish(path, replace=True)
    except OSError as error:
        aside.remove()
        raise CheckpointError(f"{path} cannot be written: {error}") from error


def _mark(owner: Owner | None) -> str:
    """Return the suffix of the names of an owner's unfinished files."""
    return "" if owner is None else f"-e{owner.epoch}"


def name_aside(folder: Location, owner: Owner | None) -> Location:
    """Return a unique temporary name for a folder that is being written or removed."""
    return folder.with_name(f"{folder.name}.tmp-{uuid.uuid4().hex[:12]}{_mark(owner)}")


def candidates(root: Place) -> tuple[list[Location], str]:
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
    root: Place, iteration: int, count: int, lineage: set[str], owner: Owner | None, passed: Collection[int] = ()
) -> list[Location]:
    """Remove all but the newest ``count`` checkpoints up to an iteration, and return the removed ones.

    A checkpoint is renamed before it is removed, so that a killed removal leaves nothing that looks like a checkpoint.

    Args:
        lineage: Names of the checkpoints that this run wrote or resumed from. Others are not touched.
        passed: The last iterations that the checks have verified. The newest checkpoint up to each of them is kept.
    """
    upto: dict[int, list[Location]] = {}
    for number, paths in every_checkpoint(root).items():
        removable = [path for path in paths if path.name in lineage]
        if removable and number <= iteration:
            upto[number] = removable
    spared = {max((number for number in upto if number <= last), default=-1) for last in passed}
    old = [number for number in list(upto)[: max(0, len(upto) - count)] if number not in spared]
    removed = [path for number in old for path in upto[number]]
    for path in removed:
        if owner is not None:
            owner.check()
        aside = name_aside(path, owner)
        path.publish(aside)
        aside.remove()
    return removed


def may_replace(folder: Location) -> bool:
    """Return True if a checkpoint may take this name: it is free, or a checkpoint with or without its layout has it."""
    names = folder.list()
    return names.get(LAYOUT_FILE) is not None or (not folder.is_file() and all(map(is_part, names)))


def remove_aside(folder: Location, owner: Owner | None) -> None:
    """Remove the temporary folders of this owner's saves of this folder."""
    with suppress(OSError):
        for name in folder.parent.list():
            if name.startswith(f"{folder.name}.tmp-") and (owner is None or name.endswith(_mark(owner))):
                folder.with_name(name).remove()


def remove_left_over(folder: Location, owner: Owner | None) -> None:
    """Remove the temporary folders of killed saves of this folder and, given an owner, of all earlier owners."""
    remove_aside(folder, owner)
    if owner is None:
        return
    for parent in (folder.parent, folder.parent / OWNERS):
        for name in parent.list():
            if is_of_owner(name, owner.epoch - 1):
                (parent / name).remove()


def move_into_place(aside: Location, folder: Location, owner: Owner | None) -> Location:
    """Give a complete folder its final name, or the name with the owner's epoch if that is taken. Return it.

    Without an owner an existing checkpoint of that name is replaced. Raises FolderLostError.
    """
    if owner is None:
        aside.publish(folder, replace=True)
        return folder
    owner.check()
    try:
        aside.publish(folder)
        return folder
    except FileExistsError:
        owner.check()
    except OSError:
        owner.check()  # a successor may also have removed the temporary folder
        raise
    name = parse_checkpoint_name(folder.name)
    assert name is not None, "an owner saves only iterations"
    with_epoch = folder.with_name(iteration_name(name[0], owner.epoch))
    aside.publish(with_epoch, replace=True)  # no other owner uses this name
    return with_epoch


def set_aside(root: Place, after: int, upto: int, owner: Owner | None, others: Collection[str] = ()) -> list[Location]:
    """Rename the checkpoints of iterations ``after`` < i <= ``upto`` to .suspect, and return their new paths in order.

    First, ``latest`` is set back to the newest checkpoint up to ``after``, or removed, so that it never names a missing
    folder even if this process is killed; the next start then repeats the call. Raises CheckpointError.

    Args:
        after: The last iteration whose state is known to be correct.
        upto: The last iteration that may be affected.
        others: Names of checkpoints that the fault did not affect. ``latest`` is set back to one of them only if no
            other checkpoint is left.
    """
    every = [(iteration, path) for iteration, paths in every_checkpoint(root).items() for path in paths]
    suspect = [path for iteration, path in every if after < iteration <= upto and path.name not in others]
    trusted = [path for iteration, path in every if iteration <= after and path.name not in others]
    unaffected = [path for _, path in every if path.name in others]
    try:
        _set_back_latest(at(root), trusted or unaffected, suspect, owner)
        return [path.publish_beside(f"{path.name}.suspect") for path in suspect]
    except OSError as error:
        raise CheckpointError(f"checkpoints under {root} cannot be set aside: {error}") from error


def file_fault(root: Place, iteration: int) -> None:
    """Rename the record of a handled fault to one with its iteration. Raises CheckpointError."""
    path = at(root) / RECORD
    try:
        if path.is_file():
            path.publish_beside(f"{path.path.stem}-{iteration:07d}", path.path.suffix)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be renamed: {error}") from error


def _set_back_latest(root: Location, trusted: list[Location], suspect: list[Location], owner: Owner | None) -> None:
    newest = None
    with suppress(CheckpointError):  # it does not name a checkpoint: a load reports that
        newest = latest(root)
    if newest not in suspect:
        return
    if trusted:
        publish_folder(trusted[-1], owner)
    else:
        (root / LATEST).remove()
