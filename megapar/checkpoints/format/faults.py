"""Records of detected faults, and the checkpoints that were set aside because of them.

corruption.json             written by a run that ended on a fault, until the next start has handled it
corruption-0000105.json     the same file afterwards; 105 is the iteration at which the fault was found
iter_0000104.suspect        a checkpoint saved after the last check that passed: --ckpt-step 104 still loads it
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megapar.errors import UnverifiedError
from megapar.files.location import Location, Place, at

RECORD = "corruption.json"
NEVER = -1  # iteration of a check that has not passed yet
_MAX_BYTES = 1 << 20
_SUSPECT = re.compile(r"iter_([0-9]{7,18})(?:\.e([0-9]+))?\.suspect(?:-([0-9]+))?")


@dataclass(frozen=True)
class Blamed:
    """A faulty rank, or a candidate if it is unknown. ``device`` contains its number on the node."""

    rank: int
    node: str
    device: str

    def __str__(self) -> str:
        return f"rank {self.rank} on node {self.node}, device {self.device}"


@dataclass(frozen=True)
class Fault:
    """Fault that a check has found.

    Attributes:
        iteration: Iteration after which the fault was found.
        began: Iteration at which this start of the run began.
        verified: For every enabled check, the last iteration after which it passed, or NEVER.
        blamed: Faulty ranks, or candidates.
        others: Names of checkpoints of other runs that were in the folder when this start began.
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
        """Last iteration at which this check passed, or NEVER."""
        return self.verified.get(self.check, NEVER)

    def __str__(self) -> str:
        where = "; ".join(map(str, self.blamed)) or "no rank is known"
        passed = ", ".join(f"{name} {at if at != NEVER else 'never'}" for name, at in sorted(self.verified.items()))
        return (
            f"after iteration {self.iteration} the check {self.check!r} found wrong numbers: {where}. "
            f"Last passed at iteration: {passed or 'none'}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the content of the record."""
        return asdict(self)


def read_fault(folder: Place) -> Fault | None:
    """Return the fault that ended a run which saved here, unless a start has handled it. Raises UnverifiedError."""
    path = at(folder) / RECORD
    try:
        return fault_of(path.json(_MAX_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise UnverifiedError(
            f"{path} records that a run found wrong numbers, and cannot be read: {str(error)[:200]}. Inspect the "
            f"checkpoints next to it; choose one with --ckpt-step, or move the file away."
        ) from error


def fault_of(record: Mapping[str, Any]) -> Fault:
    """Parse the output of ``to_json``. Raises ValueError."""
    try:
        return Fault(
            _text(record["check"]),
            _count(record["iteration"]),
            _count(record["began"]),
            {_text(name): _count(at, NEVER) for name, at in record["verified"].items()},
            tuple(
                Blamed(_count(item["rank"]), _text(item["node"]), _text(item["device"])) for item in record["blamed"]
            ),
            tuple(map(_text, record["parameters"])),
            _text(record["message"]),
            tuple(map(_text, record.get("others", ()))),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.50} is not a string")
    return value


def _count(value: object, least: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{value!r:.50} is not a count")
    return value


def suspects(root: Place) -> dict[int, Location]:
    """Return iteration -> checkpoint set aside, ascending; of several, the last one of the highest epoch."""
    newest: dict[int, tuple[tuple[int, int], str]] = {}
    for name in at(root).list():
        if match := _SUSPECT.fullmatch(name):
            iteration, age = int(match[1]), (int(match[2] or 0), int(match[3] or 1))
            newest[iteration] = max(newest.get(iteration, (age, name)), (age, name))
    return {iteration: at(root) / name for iteration, (_, name) in sorted(newest.items())}
