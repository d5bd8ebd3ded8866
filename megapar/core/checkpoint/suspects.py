"""Setting checkpoints aside that may hold a fault: renamed, never removed."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from megapar.config.latest_name import LATEST
from megapar.config.suspects import RECORD
from megapar.core.checkpoint import folder as folders
from megapar.core.checkpoint.durable import sync_folder
from megapar.core.checkpoint.owner import Owner
from megapar.errors import CheckpointError


def set_aside(root: Path, after: int, upto: int, owner: Owner | None, others: Collection[str] = ()) -> list[Path]:
    """Rename the checkpoints of iterations ``after`` < i <= ``upto`` to .suspect; their new paths, oldest first.

    ``latest`` goes back first to the newest one up to ``after``, or away: a start that is killed in between finds no
    name that leads nowhere, and the next one goes on here. owner: of the root. others: names of checkpoints that the
    fault has nothing to do with, which ``latest`` goes back to only where no other one is left. Raises CheckpointError.
    """
    every = folders.every_checkpoint(root)
    own = [(at, path) for at, paths in every.items() for path in paths if path.name not in others]
    found = [path for at, path in own if after < at <= upto]
    left = [path for at, path in own if at <= after]
    try:
        _take_back(
            root, left or [path for paths in every.values() for path in paths if path.name in others], found, owner
        )
        renamed = [path.rename(_free(path.with_name(f"{path.name}.suspect"))) for path in found]
        if renamed:
            sync_folder(root)
    except OSError as error:
        raise CheckpointError(f"checkpoints under {root} cannot be set aside: {error}") from error
    return renamed


def put_away(root: Path, iteration: int) -> None:
    """The record of a fault has been acted on: keep it under the name of its iteration. Raises CheckpointError."""
    try:
        path = root / RECORD
        if path.exists():
            path.rename(_free(path.with_name(f"{path.stem}-{iteration:07d}{path.suffix}")))
            sync_folder(root)
    except OSError as error:
        raise CheckpointError(f"{root / RECORD} cannot be renamed: {error}") from error


def _take_back(root: Path, left: list[Path], leaving: list[Path], owner: Owner | None) -> None:
    named = None
    with suppress(CheckpointError):  # it names none: whoever loads says so
        named = folders.latest(root)
    if named not in leaving:
        return
    if left:
        folders.publish_folder(root, left[-1], owner)
    else:
        (root / LATEST).unlink()


def _free(path: Path) -> Path:
    """This name, or where it is taken the first of its kind that is not."""
    number = 2
    free = path
    while free.exists():
        stem, suffix = (path.stem, path.suffix) if path.suffix == ".json" else (path.name, "")
        free = path.with_name(f"{stem}-{number}{suffix}")
        number += 1
    return free
