"""Lineage of a run: the checkpoints under ``--save`` that it made, and those that it was resumed from.

A folder contains several lineages if a run went back to an earlier checkpoint, or was finetuned in the folder of its
base. Every checkpoint names those before it on its lineage. A run neither removes nor resumes from checkpoints of
other lineages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from megapar.core.checkpoint import storage, store
from megapar.errors import CheckpointError
from megapar.files.checkpoint_names import parse_checkpoint_name
from megapar.files.location import Location
from megapar.training.checkpoints.scalars import check_scalars

NAMES = "lineage"
"""The scalar with the names of the checkpoints before this one on its lineage."""
MOST_NAMES = 4096
"""Maximum number of names, the newest ones. ``--keep`` and going back need no more."""


class Lineage:
    """Names of the checkpoints on the lineage of a run.

    Attributes:
        names: The current names, up to date on rank 0 only.
        agreed: The names as of the last save, in order, the same on all ranks.
        others: Names of other lineages in the folder at the start of the run, the same on all ranks.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.agreed: list[str] = []
        self.others: frozenset[str] = frozenset()

    def begin(self, present: Collection[str], own: Collection[str]) -> None:
        """Start with the checkpoints ``present`` in the folder, of which ``own`` are on this lineage."""
        self.names = set(present) & set(own)
        self.others = frozenset(present) - self.names
        self.agree(lambda names: names)

    def agree(self, agree: Callable[[list[str]], list[str]]) -> list[str]:
        """Return the names for the next checkpoint's scalars. ``agree`` returns rank 0's value on all ranks."""
        self.agreed = agree(sorted(self.names, key=_place)[-MOST_NAMES:])
        return self.agreed


def before(name: str, scalars: Mapping[str, Any], present: Collection[str]) -> set[str]:
    """Return the names on the lineage of a checkpoint, including its own.

    A checkpoint of an earlier version does not record its lineage. Then all earlier checkpoints in the folder count.

    Args:
        name: Name of the checkpoint. "" if it is in another folder.
        present: Names of all checkpoints in the folder.
    """
    recorded = scalars.get(NAMES)
    if isinstance(recorded, list):
        return {*recorded, *([name] if name else [])}
    last = scalars.get("iteration", 0)
    return {other for other in present if _place(other)[0] <= last}


def in_order(checkpoints: Sequence[Location]) -> tuple[list[Location], set[str]]:
    """Sort checkpoints, best first, so that those on the lineage of the best one come before all others.

    Unreadable checkpoints keep their position, because their lineage is unknown.

    Returns:
        The checkpoints in order, and the names of those on other lineages.
    """
    for number, folder in enumerate(checkpoints):
        scalars = scalars_of(folder)
        if scalars is not None:
            lineage = before(folder.name, scalars, [path.name for path in checkpoints[number:]])
            lineage |= {path.name for path in checkpoints[:number]}
            others = [path for path in checkpoints if path.name not in lineage]
            return [*(path for path in checkpoints if path.name in lineage), *others], {path.name for path in others}
    return list(checkpoints), set()


def scalars_of(folder: Location) -> Mapping[str, Any] | None:
    """Return the scalars of a checkpoint, or None if they cannot be read, or no run wrote them."""
    try:
        scalars = storage.read_scalars(folder, store.read_layout(folder).scalars, "full")
        check_scalars(str(folder), scalars, None, optimizer=False)
    except CheckpointError:
        return None
    return scalars


def _place(name: str) -> tuple[int, int]:
    return parse_checkpoint_name(name) or (-1, 0)
