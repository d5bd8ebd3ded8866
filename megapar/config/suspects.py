"""What a guard has found, as the run that ended on it wrote it down, and the checkpoints that were set aside for it.

    corruption.json             of a run that has ended so, until the next start has acted on it
    corruption-0000105.json     after that; 105 is the iteration at which it was found
    iter_0000104.suspect        a checkpoint from after the last check that passed: --ckpt-step 104 still loads it

Standard library only.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megapar.errors import UnverifiedError

RECORD = "corruption.json"
NEVER = -1
"""The iteration of a check that has not passed yet."""
_MAX_BYTES = 1 << 20
_SUSPECT = re.compile(r"iter_([0-9]{7,18})(?:\.e([0-9]+))?\.suspect(?:-([0-9]+))?")


@dataclass(frozen=True)
class Blamed:
    """A rank that is to blame, or one of those among which nobody can say. device: with its number on the node."""

    rank: int
    node: str
    device: str

    def __str__(self) -> str:
        return f"rank {self.rank} on node {self.node}, device {self.device}"


@dataclass(frozen=True)
class Fault:
    """What a guard has found. check: its name. iteration: after which it found it. began: the iteration at which that
    start of the run began.

    verified: for every check that was on the last iteration after which it found nothing, or NEVER. others: names of
    checkpoints that lay in the folder when that start began and are of other lines than its own.
    """

    check: str
    iteration: int
    began: int
    verified: Mapping[str, int]
    blamed: tuple[Blamed, ...]
    parameters: tuple[str, ...]
    message: str
    others: tuple[str, ...] = ()

    @property
    def limit(self) -> int:
        """The last iteration at which this check vouches for the run; NEVER where there is none."""
        return self.verified.get(self.check, NEVER)

    def __str__(self) -> str:
        where = "; ".join(map(str, self.blamed)) or "no rank is known"
        passed = ", ".join(f"{name} {at if at != NEVER else 'never'}" for name, at in sorted(self.verified.items()))
        return (
            f"after iteration {self.iteration} the check {self.check!r} found wrong numbers: {where}. "
            f"Last passed at iteration: {passed or 'none'}"
        )

    def to_json(self) -> dict[str, Any]:
        """For the record."""
        return asdict(self)


def read_fault(folder: Path) -> Fault | None:
    """What a run that saved here was ended by, and no start has acted on; None: nothing.

    Raises UnverifiedError where something is recorded that cannot be read.
    """
    path = folder / RECORD
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _unreadable(path, error) from error
    with os.fdopen(descriptor, "rb") as file:
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ValueError("it is no plain file")
            return fault_of(json.loads(file.read(_MAX_BYTES)))
        except (OSError, ValueError, RecursionError) as error:
            raise _unreadable(path, error) from error


def fault_of(found: Any) -> Fault:
    """From the form of ``to_json``. Raises ValueError."""
    if not isinstance(found, dict):
        raise ValueError("it holds no object")
    try:
        return Fault(
            _text(found["check"]),
            _count(found["iteration"]),
            _count(found["began"]),
            {_text(name): _count(at, NEVER) for name, at in found["verified"].items()},
            tuple(Blamed(_count(one["rank"]), _text(one["node"]), _text(one["device"])) for one in found["blamed"]),
            tuple(map(_text, found["parameters"])),
            _text(found["message"]),
            tuple(map(_text, found.get("others", ()))),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.50} is no text")
    return value


def _count(value: object, least: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{value!r:.50} is no count")
    return value


def _unreadable(path: Path, error: Exception) -> UnverifiedError:
    return UnverifiedError(
        f"{path} says that a run found wrong numbers, and cannot be read: {str(error)[:200]}. Look at the checkpoints "
        f"beside it; name one by --ckpt-step, or move the file away."
    )


def suspects(root: Path) -> dict[int, Path]:
    """Iteration -> checkpoint that was set aside, of several the newest owner's and of its own the last, in rising
    order.
    """
    found: dict[int, tuple[tuple[int, int], Path]] = {}
    for path in root.iterdir() if root.is_dir() else ():
        match = _SUSPECT.fullmatch(path.name)
        if match:
            at, age = int(match[1]), (int(match[2] or 0), int(match[3] or 1))
            if at not in found or age > found[at][0]:
                found[at] = (age, path)
    return {at: path for at, (_, path) in sorted(found.items())}
