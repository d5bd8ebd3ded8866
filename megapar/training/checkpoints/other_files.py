"""Files beside a model's weights that a conversion takes along, as its tokenizer; never what lies elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from megapar.errors import CheckpointError


def files_beside(folder: Path, left_out: Callable[[str], bool]) -> list[Path]:
    """The files of a folder by their names, but for hidden ones and those of a name that is left out.

    What is converted is often published. So a link is followed within the folder, and from a snapshot in the cache of
    the Hub to its blobs; raises CheckpointError where one leads elsewhere.
    """
    found = sorted(path for path in folder.iterdir() if not path.name.startswith(".") and not left_out(path.name))
    root = folder.resolve()
    snapshots = (one for one in root.parents if one.name == "snapshots")
    roots = [root, *(one.parent / "blobs" for one in snapshots)]
    outside = [path for path in found if path.is_symlink() and not _within(path, roots)]
    if outside:
        more = f", and {len(outside) - 1} more lead outside of it, too" if len(outside) > 1 else ""
        raise CheckpointError(
            f"{outside[0]} is a link to {os.readlink(outside[0])}, which is not in that folder{more}; a conversion "
            "copies no other folder's files: remove the link, or put the file itself in its place"
        )
    return [path for path in found if path.is_file()]


def _within(path: Path, roots: list[Path]) -> bool:
    try:
        place = path.resolve()
    except (OSError, RuntimeError):  # links in a circle
        return False
    return any(place.is_relative_to(root) for root in roots)
