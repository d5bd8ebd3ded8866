"""Setting aside checkpoints that may contain corrupted numbers: they are renamed, never removed."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

from megapar.core.checkpoint import folder as folders
from megapar.core.checkpoint.owner import Owner
from megapar.errors import CheckpointError
from megapar.files.checkpoint_names import LATEST
from megapar.files.location import Location, Place, at
from megapar.files.suspects import RECORD


def set_aside(root: Place, after: int, upto: int, owner: Owner | None, others: Collection[str] = ()) -> list[Location]:
    """Rename the checkpoints of iterations ``after`` < i <= ``upto`` to .suspect, and return their new paths in order.

    First, ``latest`` is set back to the newest checkpoint up to ``after``, or removed, so that it never names a missing
    folder even if this process is killed; the next start then repeats the call. Raises CheckpointError.

    Args:
        root: The folder of the checkpoints.
        after: The last iteration whose state is known to be correct.
        upto: The last iteration that may be affected.
        owner: Owner of the root.
        others: Names of checkpoints that the fault did not affect. ``latest`` is set back to one of them only if no
            other checkpoint is left.
    """
    every = folders.every_checkpoint(root)
    own = [(iteration, path) for iteration, paths in every.items() for path in paths if path.name not in others]
    suspect = [path for iteration, path in own if after < iteration <= upto]
    left = [path for iteration, path in own if iteration <= after]
    unaffected = [path for paths in every.values() for path in paths if path.name in others]
    try:
        _set_back_latest(at(root), left or unaffected, suspect, owner)
        return [path.publish_beside(f"{path.name}.suspect") for path in suspect]
    except OSError as error:
        raise CheckpointError(f"checkpoints under {root} cannot be set aside: {error}") from error


def put_away(root: Place, iteration: int) -> None:
    """Rename the record of a handled fault to one with its iteration. Raises CheckpointError."""
    path = at(root) / RECORD
    try:
        if path.is_file():
            path.publish_beside(f"{path.path.stem}-{iteration:07d}", path.path.suffix)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be renamed: {error}") from error


def _set_back_latest(root: Location, left: list[Location], suspect: list[Location], owner: Owner | None) -> None:
    named = None
    with suppress(CheckpointError):  # it does not name a checkpoint: a load reports that
        named = folders.latest(root)
    if named not in suspect:
        return
    if left:
        folders.publish_folder(left[-1], owner)
    else:
        (root / LATEST).remove()
