"""Ownership of a checkpoint folder, recorded in files: one set for each owner so far, numbered by its epoch.

root/owner/
  3.json        the third owner: its job and process; created once, and the run that creates it first is the owner
  3.beat        a number that the owner changes every few seconds, or "ended"
  3.latest      see megapar/files/checkpoint_names.py

The owner is the highest epoch. Nothing here reads a clock, because the clocks of two machines may differ.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from megapar.files.checkpoint_names import OWNERS, epochs_of, owners_latest, parse_checkpoint_name, read_latest
from megapar.files.location import Lock, Place, at
from megapar.health.stop.process import MAX_TEXT, Process

ENDED = "ended"
_MOST_BYTES = 1 << 14
_BEAT_DIGITS = 20  # a fixed length, so that overwriting it needs no space on a full disk
_KEPT = 8  # records of earlier owners
_UNFINISHED = re.compile(r"[0-9a-f]{32}\.tmp")


@dataclass(frozen=True)
class Lease:
    """The record of an owner.

    Attributes:
        epoch: Its number among the owners of the folder.
        process: The process that owns the folder.
        name: The name of its job.
        launch: The launcher's identity; "" without a launcher.
        round: The launcher's restart count.
        slurm: Slurm's job id and its count of starts; ("", 0) without Slurm.
        user: The user's name.
        since: The time it took the folder, for messages.
        locks: The store can tell whether it still holds its record.
    """

    epoch: int
    process: Process
    name: str
    launch: str
    round: int
    slurm: tuple[str, int]
    user: str
    since: str
    locks: bool = False

    @classmethod
    def from_json(cls, epoch: int, found: Any) -> Lease:
        """Make a lease from the content of its file. Raises KeyError, TypeError or ValueError if it is not a lease."""
        texts = [found[name] for name in ("name", "launch", "user", "since")]
        job, times = found["slurm"]
        numbers = [found["round"], times]
        if any(type(text) is not str or len(text) > MAX_TEXT for text in (*texts, job)):
            raise ValueError("a field is not a short text")
        if any(type(number) is not int for number in numbers) or type(found["locks"]) is not bool:
            raise ValueError("a field is not a number")
        name, launch, user, since = texts
        process = Process.from_json(found["process"])
        return cls(
            epoch=epoch,
            process=process,
            name=name,
            launch=launch,
            round=found["round"],
            slurm=(job, times),
            user=user,
            since=since,
            locks=found["locks"],
        )

    def to_json(self) -> dict[str, Any]:
        """Return the content of its file."""
        kept = {"process": self.process.to_json(), "slurm": list(self.slurm)}
        plain = {name: getattr(self, name) for name in ("name", "launch", "round", "user", "since", "locks")}
        return kept | plain

    def follows(self, other: Lease) -> bool:
        """Return True if this is a restart of ``other`` by its launcher or Slurm, so that ``other`` has ended."""
        restarted = bool(self.launch) and self.launch == other.launch and self.round > other.round
        queued = bool(self.slurm[0]) and self.slurm[0] == other.slurm[0] and self.slurm[1] > other.slurm[1]
        return restarted or queued or self.process == other.process


def newest(root: Place) -> int:
    """Return the owner's epoch, or 0 if the folder never had an owner."""
    return max(epochs_of(root), default=0)


def highest(root: Place) -> int:
    """Return the highest epoch that any file in the folder mentions. Records of owners may have been removed."""
    named = read_latest(root)
    epochs = [parsed[1] for name in at(root).list() if (parsed := parse_checkpoint_name(name))]
    return max(newest(root), named[1] if named else 0, *owners_latest(root), *epochs, 0)


def read(root: Place, epoch: int) -> Lease | None:
    """Return that owner, or None if its record cannot be read."""
    try:
        return Lease.from_json(epoch, (at(root) / OWNERS / f"{epoch}.json").json(_MOST_BYTES))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def create(root: Place, lease: Lease) -> Lock | None:
    """Become the owner with this epoch. Return the held record, or None if another run came first. Raises OSError."""

    def record(locked: bool) -> bytes:
        return (json.dumps(lease.to_json() | {"locks": locked}, indent=1) + "\n").encode()

    lock = (at(root) / OWNERS / f"{lease.epoch}.json").lock(record)
    if lock is not None:
        write_beat(lock, "0")
    return lock


def write_beat(lock: Lock, text: str) -> None:
    """Write the owner's heartbeat. Raises OSError."""
    lock.renew(text.rjust(_BEAT_DIGITS).encode() + b"\n")


def read_beat(root: Place, epoch: int) -> str:
    """Return the owner's last heartbeat, or "" if it cannot be read."""
    try:
        return (at(root) / OWNERS / f"{epoch}.beat").head(_BEAT_DIGITS + 1).decode(errors="replace").strip()
    except OSError:
        return ""


def is_unlocked(root: Place, lease: Lease) -> bool:
    """Return True if an owner on this machine has released its lock. Only a hint: some file systems fake locks."""
    if not lease.locks or not lease.process.same_machine(Process.here()):
        return False
    try:
        return not (at(root) / OWNERS / f"{lease.epoch}.json").is_locked()
    except OSError:
        return False


def tidy(root: Place, epoch: int) -> None:
    """Remove the records of owners much older than this one, and those that killed starts left unfinished.

    An old owner's ``latest`` stays until another owner publishes: it may be the only record of the newest checkpoint.
    """
    folder = at(root) / OWNERS
    old = [f"{other}.{suffix}" for other in epochs_of(root) if other < epoch - _KEPT for suffix in ("json", "beat")]
    for name in [*old, *filter(_UNFINISHED.fullmatch, folder.list())]:
        with suppress(OSError):
            if name in old or not (folder / name).is_locked():
                (folder / name).remove()
