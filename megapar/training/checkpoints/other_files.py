"""Files next to a model's weights that a conversion copies, such as the tokenizer, but none from other folders."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from megapar.errors import CheckpointError


def files_beside(folder: Path, left_out: Callable[[str], bool]) -> list[Path]:
    """Return the files of a folder, sorted by name, except hidden files and those for which ``left_out`` is True.

    Converted models are often published, so links must not leak other files: a link is followed only within the folder,
    and from a snapshot in the Hub's cache to its blobs. Raises CheckpointError for other links.
    """
    paths = sorted(path for path in folder.iterdir() if not path.name.startswith(".") and not left_out(path.name))
    root = folder.resolve()
    snapshots = (parent for parent in root.parents if parent.name == "snapshots")
    roots = [root, *(snapshot.parent / "blobs" for snapshot in snapshots)]
    outside = [path for path in paths if path.is_symlink() and not _within(path, roots)]
    if outside:
        more = f", and {len(outside) - 1} more links lead outside of it" if len(outside) > 1 else ""
        raise CheckpointError(
            f"{outside[0]} is a link to {os.readlink(outside[0])}, which is not in that folder{more}; a conversion "
            "does not copy files of other folders: remove the link, or replace it with the file itself"
        )
    return [path for path in paths if path.is_file()]


def _within(path: Path, roots: list[Path]) -> bool:
    try:
        place = path.resolve()
    except (OSError, RuntimeError):  # links in a circle
        return False
    return any(place.is_relative_to(root) for root in roots)
