"""Which checkpoints under ``--save`` are of a run's line: those that it has made, and those that it comes from.

A folder holds several lines where a run went back to an earlier checkpoint, or was tuned beside what it began from.
Every checkpoint names those before it on its own; what another line made is no more removed than gone on from.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from megapar.config.latest_name import of_name
from megapar.core.checkpoint import storage, store
from megapar.errors import CheckpointError

NAMES = "lineage"
"""The scalar that has the names of the checkpoints before one on its line."""
MOST_NAMES = 4096
"""Of the newest; ``--keep`` and a way back look at no more."""


class Lineage:
    """names: of the run's line, as rank 0 knows them while the run goes on. told: the same as of the last save, in
    order, and others: names that lay there when the run began and are of other lines; both the same on all ranks.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.told: list[str] = []
        self.others: frozenset[str] = frozenset()

    def begin(self, there: Collection[str], own: Collection[str]) -> None:
        """A run begins beside these checkpoints, some of them its own."""
        self.names = set(there) & set(own)
        self.others = frozenset(there) - self.names
        self.tell(lambda names: names)

    def tell(self, agree: Callable[[list[str]], list[str]]) -> list[str]:
        """The names for the next checkpoint's scalars. agree: gives rank 0's to all ranks."""
        self.told = agree(sorted(self.names, key=_place)[-MOST_NAMES:])
        return self.told


def before(name: str, scalars: Mapping[str, Any], there: Collection[str]) -> set[str]:
    """The line of the checkpoint of this name, with itself; "" where it lies elsewhere.

    One of an earlier version says nothing: then all that were there before it are taken for its line.
    """
    said = scalars.get(NAMES)
    if isinstance(said, list):
        return {*said, *([name] if name else [])}
    last = scalars.get("iteration", 0)
    return {other for other in there if _place(other)[0] <= last}


def in_order(found: Sequence[Path]) -> tuple[list[Path], set[str]]:
    """(checkpoints, best first, with those of the best one's line before all others; names of the others).

    What cannot be read stays where it is: nobody knows its line.
    """
    for number, folder in enumerate(found):
        scalars = scalars_of(folder)
        if scalars is not None:
            line = before(folder.name, scalars, [path.name for path in found[number:]])
            line |= {path.name for path in found[:number]}
            others = [path for path in found if path.name not in line]
            return [*(path for path in found if path.name in line), *others], {path.name for path in others}
    return list(found), set()


def scalars_of(folder: Path) -> Mapping[str, Any] | None:
    """What a checkpoint says of its run; None where that cannot be read."""
    try:
        return storage.read_scalars(folder, store.read_layout(folder).scalars, "full")
    except CheckpointError:
        return None


def _place(name: str) -> tuple[int, int]:
    return of_name(name) or (-1, 0)
