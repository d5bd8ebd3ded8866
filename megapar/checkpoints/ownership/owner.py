"""Ownership of a folder of checkpoints: a lease in files, one set for each owner so far, numbered by its epoch.

root/owner/
  3.json        the third owner: its job and process; created once, and the run that creates it first is the owner
  3.beat        a number that the owner changes every few seconds, or "ended"
  3.latest      see format/names.py

The owner is the highest epoch. Nothing here compares clocks of two machines: a candidate watches the owner's heartbeat
on its own clock, and an owner whose heartbeat changes is alive. The candidate takes over at once if the owner is known
to have ended: it recorded its end, its process on this machine is gone, or this run is a restart of it. Otherwise it
takes over after the heartbeat has not changed for a minute. If that owner was only suspended, it does no harm when it
resumes: its writes never replace a file (save_load/folder.py), and it then finds that it has a successor and ends. In
an object store it finds that by its next heartbeat, which may only replace its own last one.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from types import MappingProxyType
from typing import Any

from megapar.checkpoints.format.names import (
    OWNERS,
    epochs_of,
    is_of_owner,
    owners_latest,
    parse_checkpoint_name,
    read_latest,
)
from megapar.core.comm.world import World
from megapar.errors import CheckpointError, Complaint, FolderLostError, FolderOwnedError
from megapar.files.bucket import BucketStore
from megapar.files.location import Location, Lock, Place, at
from megapar.files.location import replace as overwrite
from megapar.files.objects import ChangedError
from megapar.health.stop.process import MAX_TEXT, Process
from megapar.launch_environment import job_id, launch_id, slurm_job, starts_before

BEAT_SECONDS = 2.0
STORE_BEAT_SECONDS = 10.0  # in a store that is not a disk, where every request is paid for
PATIENCE_SECONDS = 60.0
UNLOCKED_SECONDS = 10.0  # the same for an owner on this machine that no longer holds its lock
ENDED = "ended"
SUCCEEDED = "succeeded"
_QUIET_SECONDS = 3.0
_POLL_SECONDS = 0.25
_TRIES = 100
_MOST_BYTES = 1 << 14
_BEAT_DIGITS = 20  # a fixed length, so that overwriting it needs no space on a full disk
_KEPT = 8  # records of earlier owners
_UNFINISHED = re.compile(r"[0-9a-f]{32}\.tmp")
_WAITING = "waiting"
_FIELDS: Mapping[str, type] = MappingProxyType(
    {"name": str, "launch": str, "round": int, "user": str, "since": str, "locks": bool}
)


@dataclass(frozen=True)
class Lease:
    """The record of an owner.

    Attributes:
        epoch: Its number among the owners of the folder.
        launch: The launcher's identity; "" without a launcher.
        round: The launcher's restart count.
        slurm: Slurm's job id and its count of starts; ("", 0) without Slurm.
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
    def of_this_process(cls) -> Lease:
        """Make the lease with which this process applies for a folder."""
        environ = os.environ
        return cls(
            epoch=0,
            process=Process.here(),
            name=job_id(environ),
            launch=launch_id(environ),
            round=starts_before(environ),
            slurm=slurm_job(environ),
            user=_user(),
            since=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )

    @classmethod
    def from_json(cls, epoch: int, record: Any) -> Lease:
        """Make a lease from the content of its file. Raises KeyError, TypeError or ValueError if it is not a lease."""
        fields = {name: record[name] for name in _FIELDS}
        job, starts = record["slurm"]
        for value, kind in [*zip(fields.values(), _FIELDS.values(), strict=True), (job, str), (starts, int)]:
            if type(value) is not kind or (type(value) is str and len(value) > MAX_TEXT):
                raise ValueError(f"{value!r:.50} is not a field of a lease")
        return cls(epoch=epoch, process=Process.from_json(record["process"]), slurm=(job, starts), **fields)

    def to_json(self) -> dict[str, Any]:
        """Return the content of its file."""
        fields = {name: getattr(self, name) for name in _FIELDS}
        return {"process": self.process.to_json(), "slurm": list(self.slurm), **fields}

    def follows(self, other: Lease) -> bool:
        """Return True if this is a restart of ``other`` by its launcher or Slurm, so that ``other`` has ended."""
        restarted = bool(self.launch) and self.launch == other.launch and self.round > other.round
        queued = bool(self.slurm[0]) and self.slurm[0] == other.slurm[0] and self.slurm[1] > other.slurm[1]
        return restarted or queued or self.process == other.process


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in a container
        return str(os.getuid())


def newest_epoch(root: Place) -> int:
    """Return the owner's epoch, or 0 if the folder never had an owner. A listing may lack the newest ones."""
    newest = max(epochs_of(root), default=0)
    while (at(root) / OWNERS / f"{newest + 1}.json").is_file():
        newest += 1
    return newest


def highest_epoch(root: Place) -> int:
    """Return the highest epoch that any file in the folder mentions. Records of owners may have been removed."""
    latest = read_latest(root)
    epochs = [parsed[1] for name in at(root).list() if (parsed := parse_checkpoint_name(name))]
    return max(newest_epoch(root), latest[1] if latest else 0, *owners_latest(root), *epochs, 0)


def read_lease(root: Place, epoch: int) -> Lease | None:
    """Return that owner, or None if its record cannot be read."""
    try:
        return Lease.from_json(epoch, (at(root) / OWNERS / f"{epoch}.json").json(_MOST_BYTES))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def create_lease(root: Place, lease: Lease) -> Lock | None:
    """Become the owner with this epoch. Return the held record, or None if another run came first. Raises OSError."""

    def record(locked: bool) -> bytes:
        return (json.dumps(lease.to_json() | {"locks": locked}, indent=1) + "\n").encode()

    lock = (at(root) / OWNERS / f"{lease.epoch}.json").lock(record)
    if lock is not None:
        _write_beat(lock, "0")
    return lock


def _write_beat(lock: Lock, text: str) -> None:
    lock.renew(text.rjust(_BEAT_DIGITS).encode() + b"\n")


def read_beat(root: Place, epoch: int) -> str:
    """Return the owner's last heartbeat, or "" if it cannot be read."""
    try:
        return (at(root) / OWNERS / f"{epoch}.beat").head(_BEAT_DIGITS + 1).decode(errors="replace").strip()
    except OSError:
        return ""


def _is_unlocked(root: Place, lease: Lease) -> bool:
    """Return True if an owner on this machine has released its lock. Only a hint: some file systems fake locks."""
    if not lease.locks or not lease.process.same_machine(Process.here()):
        return False
    try:
        return not (at(root) / OWNERS / f"{lease.epoch}.json").is_locked()
    except OSError:
        return False


def _remove_old_records(root: Place, epoch: int) -> None:
    """Remove the records of owners much older than this one, and those that killed starts left unfinished.

    An old owner's ``latest`` stays until another owner publishes: it may be the only record of the newest checkpoint.
    """
    folder = at(root) / OWNERS
    old = [f"{other}.{suffix}" for other in epochs_of(root) if other < epoch - _KEPT for suffix in ("json", "beat")]
    for name in [*old, *filter(_UNFINISHED.fullmatch, folder.list())]:
        with suppress(OSError):
            if name in old or not (folder / name).is_locked():
                (folder / name).remove()


@dataclass(frozen=True)
class Watch:
    """The settings for watching an owner. ``report`` receives a message for the user if the wait is long."""

    report: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    pause: Callable[[float], None] = time.sleep


def acquire(root: Place, mine: Lease, watch: Watch, beat_seconds: float = BEAT_SECONDS) -> Owner:
    """Become the owner of a folder with the lease of this run, whose epoch is chosen here.

    Raises FolderOwnedError if another owner is alive, CheckpointError if the folder cannot be read or written.
    """
    root = at(root)
    try:
        for _ in range(_TRIES):
            # Chosen before the wait: the first run to create this epoch gets it, and the others start again.
            epoch, before = highest_epoch(root) + 1, newest_epoch(root)
            if before:
                _wait_for_end(root, before, mine, watch)
            lease = replace(mine, epoch=epoch)
            lock = create_lease(root, lease)
            if lock is None:
                continue
            if newest_epoch(root) == epoch:
                _remove_old_records(root, epoch)
                _take_heartbeat(root, before)
                _end_uploads(root, epoch)
                followed = read_lease(root, before) if before else None
                return Owner(root, lease, lock, beat_seconds, followed)
            lock.release()
    except OSError as error:
        raise CheckpointError(f"--save {root} cannot be owned: {error}") from error
    raise CheckpointError(f"--save {root} cannot be owned: other runs repeatedly took it first")


def _take_heartbeat(root: Location, epoch: int) -> None:
    """Overwrite the heartbeat of an earlier owner that may resume: its next one fails, whatever a listing shows it."""
    if epoch and root.local_path() is None and read_beat(root, epoch) != ENDED:
        overwrite(root / OWNERS / f"{epoch}.beat", SUCCEEDED.rjust(_BEAT_DIGITS).encode() + b"\n")


def _end_uploads(root: Location, epoch: int) -> None:
    """End the uploads that this owner and earlier ones have begun in an object store."""
    if isinstance(root.store, BucketStore):
        root.store.end_uploads(root.path, partial(is_of_owner, epoch=epoch))


def _wait_for_end(root: Location, epoch: int, mine: Lease, watch: Watch) -> None:
    """Wait until the owner has ended or counts as ended. Raises FolderOwnedError if it is alive."""
    first, start, reported = read_beat(root, epoch), watch.clock(), False
    while True:
        owner, beat = read_lease(root, epoch), read_beat(root, epoch)
        if beat == ENDED or newest_epoch(root) > epoch:  # acquire() examines the next owner
            return
        if owner is not None and (mine.follows(owner) or owner.process.lives() is False):
            return
        if beat != first:
            raise FolderOwnedError(
                f"--save {root} belongs to another run, which is alive: {_description(owner)}. Wait until it has "
                "ended, end it there, or set --save to another folder."
            )
        quiet = watch.clock() - start
        patience = PATIENCE_SECONDS
        if quiet >= UNLOCKED_SECONDS and owner is not None and _is_unlocked(root, owner):
            patience = UNLOCKED_SECONDS
        if quiet >= patience:
            return
        if not reported and quiet >= _QUIET_SECONDS:
            reported = True
            watch.report(
                f"waiting up to {PATIENCE_SECONDS:.0f} s to see whether the owner of --save {root} is alive: "
                f"{_description(owner)}"
            )
        watch.pause(_POLL_SECONDS)


def _description(owner: Lease | None) -> str:
    if owner is None:
        return "a run without a readable record"
    job = f"job {owner.name}, " if owner.name else ""
    return f"{job}process {owner.process.pid} on {owner.process.host}, user {owner.user}, since {owner.since}"


class Owner:
    """This process's ownership of a folder, until ``release``, its end, or a successor. A thread writes heartbeats.

    Attributes:
        followed: The lease of the previous owner, if known.
        lost: The thread has found a successor.
    """

    def __init__(self, root: Location, lease: Lease, lock: Lock, beat_seconds: float, followed: Lease | None) -> None:
        self.root = root
        self.lease = lease
        self.followed = followed
        self._lock = lock
        self._count = 0
        self._stopped = threading.Event()
        self._seconds = beat_seconds
        self.lost = False
        self._thread = threading.Thread(target=self._write_beats, name="megapar-owner", daemon=True)
        self._thread.start()

    @property
    def epoch(self) -> int:
        """The number of this owner. Earlier owners have smaller ones."""
        return self.lease.epoch

    def check(self) -> None:
        """Raise FolderLostError if the folder has a newer owner."""
        try:
            newest = newest_epoch(self.root)
        except OSError as error:
            raise CheckpointError(f"{self.root} cannot be read: {error}") from error
        if newest > self.epoch or self.lost:
            self.lost = True
            raise FolderLostError(
                f"--save {self.root} has another owner by now, because this run wrote no heartbeat for a while: "
                f"{_description(read_lease(self.root, newest))}. This run ends; no file of the other run was touched."
            )

    def release(self) -> None:
        """Record the end, so that the next owner need not wait. Safe to call twice."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        self._thread.join(self._seconds)  # the thread may be blocked in an unreachable file system
        if not self.lost:
            with suppress(OSError):
                _write_beat(self._lock, ENDED)
                _end_uploads(self.root, self.epoch)
        self._lock.release()

    def _write_beats(self) -> None:
        while not self._stopped.wait(self._seconds):
            with suppress(OSError):  # the disk is full or unreachable: try again
                self.beat()
            if self.lost:
                return

    def beat(self) -> None:
        """Write a heartbeat, unless there is a successor. Raises OSError."""
        newest = newest_epoch(self.root)
        self.lost = newest > self.epoch
        if self.lost or self._stopped.is_set():
            return
        self._count += 1
        if newest < self.epoch and self.root.exists():  # the records were removed, but not the folder
            lock = create_lease(self.root, self.lease)
            if lock is not None:
                self._lock.release()
                self._lock = lock
        try:
            _write_beat(self._lock, str(self._count))
        except ChangedError:  # a successor has overwritten the last one
            self.lost = True


def acquire_for_all_ranks(
    save: str, world: World, agree: Callable[[Any], Any], check: Callable[[], Sequence[Complaint]]
) -> Owner | None:
    """Own the folder of ``--save`` until this rank leaves the world. Returns None on every rank except rank 0.

    It can take a minute to find out whether the present owner is alive, which is more than a collective may wait. So
    rank 0 repeatedly broadcasts that it is waiting. Raises FolderOwnedError or CheckpointError, on every rank.

    Args:
        agree: Returns rank 0's value on all ranks.
        check: Returns complaints about another run's checkpoints in the folder. Called again if the folder had another
            owner since the start: it may have saved after this run checked the folder.
    """
    owner, failure = None, ["", ""]

    def pause(seconds: float) -> None:
        agree([_WAITING, ""])
        time.sleep(seconds)

    if world.rank == 0:
        try:
            seconds = BEAT_SECONDS if at(save).local_path() else STORE_BEAT_SECONDS
            owner = acquire(save, Lease.of_this_process(), Watch(_print, pause=pause), seconds)
            stranger = owner.followed is not None and owner.followed.process != owner.lease.process
            if stranger and (complaints := check()):
                raise FolderOwnedError(" ".join(map(str, complaints)))
        except CheckpointError as error:
            failure = ["owned" if isinstance(error, FolderOwnedError) else "unwritable", str(error)]
            if owner is not None:
                owner.release()
    kind, text = agree(failure)
    while kind == _WAITING:
        kind, text = agree(None)
    if kind:
        raise (FolderOwnedError if kind == "owned" else CheckpointError)(text)
    if owner is not None:
        world.on_leave.append(owner.release)
    return owner


def _print(text: str) -> None:
    sys.stderr.write(f"megapar: {text}\n")
    sys.stderr.flush()
