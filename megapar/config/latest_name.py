"""Names of checkpoints, and the one that a folder calls the latest. Standard library only.

    iter_0000100        the checkpoint of iteration 100
    iter_0000100.e3     another one of it: when the third owner of the folder saved it, the name was taken
    latest              "iter_0000100 3": the name, and the epoch of the owner that published it
    owner/3.latest      the same, as that owner alone writes it

What the owner with the highest epoch has published is the latest, whoever wrote ``latest`` last: an owner that slept
through its own end may still do that. A ``latest`` without an epoch is an old one or a person's, and is followed.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

LATEST = "latest"
OWNERS = "owner"
EPOCH = "[1-9][0-9]{0,15}"
_NAME = re.compile(rf"iter_([0-9]{{7,18}})(?:\.e({EPOCH}))?")
_LINE = re.compile(rf"({_NAME.pattern})(?: ({EPOCH}))?")
_MOST_BYTES = 100


def iteration_name(iteration: int, epoch: int = 0) -> str:
    """The name of a checkpoint; with an epoch, where the plain one is taken."""
    return f"iter_{iteration:07d}" + (f".e{epoch}" if epoch else "")


def of_name(name: str) -> tuple[int, int] | None:
    """(iteration, epoch in the name or 0); None for what is no checkpoint's name."""
    match = _NAME.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2] or 0))


def newest_of(root: Path, iteration: int) -> str:
    """The name of the newest checkpoint of an iteration; the plain one where there is none."""
    found = (of_name(path.name) for path in root.glob(f"{iteration_name(iteration)}*"))
    return iteration_name(iteration, max((name[1] for name in found if name), default=0))


def read_latest(root: Path) -> tuple[str, int] | None:
    """(what is called the latest under ``root``, epoch); None where nothing was published.

    Whether there is such a checkpoint is not asked; a text that is no name comes back as it is, with epoch 0. Raises
    OSError where a file cannot be read.
    """
    text = _read(root / LATEST)
    if text is None:
        return None
    said = _parsed(text)
    if said is None or not said[1]:
        return said or (text.strip(), 0)
    for epoch in sorted(owners_latest(root), reverse=True):
        if epoch <= said[1]:
            break
        newer = _parsed(_read(root / OWNERS / f"{epoch}.{LATEST}") or "")
        if newer is not None:
            return newer
    return said


def owners_latest(root: Path) -> list[int]:
    """Epochs of the owners of a folder that have published."""
    return _epochs(root, LATEST)


def _epochs(root: Path, suffix: str) -> list[int]:
    try:
        names = os.listdir(root / OWNERS)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [int(match[1]) for name in names if (match := re.fullmatch(rf"({EPOCH})\.{suffix}", name))]


def epochs_of(root: Path) -> list[int]:
    """Epochs of all owners of a folder that are still noted there. Raises OSError where that cannot be read."""
    return _epochs(root, "json")


def _parsed(text: str) -> tuple[str, int] | None:
    match = _LINE.fullmatch(text.strip())
    return None if match is None else (match[1], int(match[4] or 0))


def _read(path: Path) -> str | None:
    """The beginning of a plain file; None where there is none. What waits or never ends is not opened."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        return file.read(_MOST_BYTES).decode(errors="replace")
