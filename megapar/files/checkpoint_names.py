"""Names of checkpoints and of their files, and the latest checkpoint of a folder.

    iter_0000100        the checkpoint of iteration 100
    iter_0000100.e3     a second one: the name was taken when the third owner of the folder saved it
    latest              "iter_0000100 3": the name, and the epoch of the owner that published it
    owner/3.latest      the same, written only by that owner

Each checkpoint contains layout.json (``core.checkpoint.layout``), scalars.json (the state of the run except tensors),
and a file of tensors for each rank that wrote any.

The checkpoint published by the owner with the highest epoch is the latest, regardless of which owner wrote ``latest``
last: an owner that was suspended and has lost the folder may still write it. A ``latest`` without an epoch was written
by an old version or by hand, and is followed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from megapar.files.location import Location, Place, at
from megapar.files.regular_file import UnfitFileError

LAYOUT_FILE = "layout.json"
SCALARS_FILE = "scalars.json"
LATEST = "latest"
OWNERS = "owner"
EPOCH = "[1-9][0-9]{0,15}"
_NAME = re.compile(rf"iter_([0-9]{{7,18}})(?:\.e({EPOCH}))?")
_LINE = re.compile(rf"({_NAME.pattern})(?: ({EPOCH}))?")
_PART = re.compile(rf"{re.escape(SCALARS_FILE)}|shard-[0-9]+\.safetensors")
_MOST_BYTES = 100


def shard_name(rank: int) -> str:
    """Return the name of the file of tensors that a rank writes."""
    return f"shard-{rank:05d}.safetensors"


def is_part(name: str) -> bool:
    """Return True if a file of this name is part of a checkpoint, next to its layout."""
    return _PART.fullmatch(name) is not None


def holds_checkpoints(root: Place) -> bool:
    """Return True if a complete checkpoint is directly below ``root``, of whatever iteration."""
    names = (name for name in names_in(root) if name.startswith("iter_"))
    return any(LAYOUT_FILE in names_in(at(root) / name) for name in names)


def names_in(folder: Place) -> Iterable[str]:
    """Return the names in a folder; none if it cannot be read, which the loader reports."""
    try:
        return at(folder).list()
    except OSError:
        return ()


def iteration_name(iteration: int, epoch: int = 0) -> str:
    """Return the name of a checkpoint; with an epoch if the plain name is taken."""
    return f"iter_{iteration:07d}" + (f".e{epoch}" if epoch else "")


def parse_checkpoint_name(name: str) -> tuple[int, int] | None:
    """Return (iteration, epoch in the name or 0), or None if it is not the name of a checkpoint."""
    match = _NAME.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2] or 0))


def folders_below(root: Place) -> list[str]:
    """Return the folders with checkpoints that are one level below ``root``, sorted; it is often named by mistake."""
    return sorted(str(at(root) / name) for name in names_in(root) if LATEST in names_in(at(root) / name))


def newest_name(root: Place, iteration: int) -> str:
    """Return the name of the newest checkpoint of an iteration; the plain name if there is none."""
    names = map(parse_checkpoint_name, names_in(root))
    return iteration_name(iteration, max((name[1] for name in names if name and name[0] == iteration), default=0))


def read_latest(root: Place) -> tuple[str, int] | None:
    """Return (name of the latest checkpoint under ``root``, epoch), or None if none has been published.

    The checkpoint may not exist. A text that is not a checkpoint's name is returned unchanged, with epoch 0. Raises
    OSError if a file cannot be read.
    """
    text = _read(at(root) / LATEST)
    if text is None:
        return None
    published = _parsed(text)
    if published is None or not published[1]:
        return published or (text.strip(), 0)
    for epoch in sorted(owners_latest(root), reverse=True):
        if epoch <= published[1]:
            break
        newer = _parsed(_read(at(root) / OWNERS / f"{epoch}.{LATEST}") or "")
        if newer is not None:
            return newer
    return published


def owners_latest(root: Place) -> list[int]:
    """Return the epochs of the folder's owners that have published a checkpoint."""
    return _epochs(root, LATEST)


def _epochs(root: Place, suffix: str) -> list[int]:
    names = (at(root) / OWNERS).list()
    return [int(match[1]) for name in names if (match := re.fullmatch(rf"({EPOCH})\.{suffix}", name))]


def epochs_of(root: Place) -> list[int]:
    """Return the epochs of all owners that are still recorded in the folder. Raises OSError if it cannot be read."""
    return _epochs(root, "json")


def _parsed(text: str) -> tuple[str, int] | None:
    match = _LINE.fullmatch(text.strip())
    return None if match is None else (match[1], int(match[4] or 0))


def _read(path: Location) -> str | None:
    """Return the beginning of a regular file, or None if there is none. Folders, pipes and devices are not read."""
    try:
        return path.head(_MOST_BYTES).decode(errors="replace")
    except (FileNotFoundError, UnfitFileError):
        return None
