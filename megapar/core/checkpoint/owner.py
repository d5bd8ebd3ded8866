"""Owners of a checkpoint folder: how a run becomes the owner, and how an owner finds that it was replaced.

A candidate watches the owner's heartbeat on its own clock; an owner whose heartbeat changes is alive. The candidate
takes over at once if the owner is known to have ended: it recorded its end, its process on this machine is gone, or
this run is a restart of it. Otherwise it takes over after the heartbeat has not changed for a minute. If that owner was
only suspended, it does no harm when it resumes: its writes never replace a file (folder.py), and it then finds that it
has a successor and ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from megapar.core.checkpoint import lease as leases
from megapar.core.checkpoint.lease import ENDED, Lease
from megapar.errors import CheckpointError, FolderLostError, FolderOwnedError
from megapar.files.location import Location, Lock, Place, at
from megapar.health.stop.process import Process

BEAT_SECONDS = 2.0
PATIENCE_SECONDS = 60.0
UNLOCKED_SECONDS = 10.0  # the patience with an owner on this machine that no longer holds its lock
_QUIET_SECONDS = 3.0
_POLL_SECONDS = 0.25
_TRIES = 100


@dataclass(frozen=True)
class Watch:
    """The settings for watching an owner.

    Attributes:
        report: Receives a message for the user if the wait is long.
        clock: Returns the time in seconds; monotonic.
        pause: Waits for this many seconds.
    """

    report: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    pause: Callable[[float], None] = time.sleep


def take(root: Place, mine: Lease, watch: Watch, beat_seconds: float = BEAT_SECONDS) -> Owner:
    """Become the owner of a folder.

    Raises FolderOwnedError if another owner is alive, CheckpointError if the folder cannot be read or written.

    Args:
        root: The folder.
        mine: The lease of this run; its epoch is chosen here.
        watch: The settings for watching the present owner.
        beat_seconds: Time between two heartbeats.
    """
    root = at(root)
    try:
        for _ in range(_TRIES):
            # Chosen before the wait: the first run to create this epoch gets it, and the others start again.
            epoch, before = leases.highest(root) + 1, leases.newest(root)
            if before:
                _wait_for_end(root, before, mine, watch)
            claimed = replace(mine, epoch=epoch)
            lock = leases.create(root, claimed)
            if lock is None:
                continue
            if leases.newest(root) == epoch:
                leases.tidy(root, epoch)
                followed = leases.read(root, before) if before else None
                return Owner(root, claimed, lock, beat_seconds, followed)
            lock.release()
    except OSError as error:
        raise CheckpointError(f"--save {root} cannot be owned: {error}") from error
    raise CheckpointError(f"--save {root} cannot be owned: other runs repeatedly took it first")


def _wait_for_end(root: Location, epoch: int, mine: Lease, watch: Watch) -> None:
    """Wait until the owner has ended or counts as ended. Raises FolderOwnedError if it is alive."""
    first, start, reported = leases.read_beat(root, epoch), watch.clock(), False
    while True:
        owner, beat = leases.read(root, epoch), leases.read_beat(root, epoch)
        if beat == ENDED or leases.newest(root) > epoch:  # take() examines the next owner
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
        if quiet >= UNLOCKED_SECONDS and owner is not None and leases.is_unlocked(root, owner):
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
        root: The folder.
        lease: The lease of this owner.
        followed: The lease of the previous owner, if known.
    """

    def __init__(self, root: Location, lease: Lease, lock: Lock, beat_seconds: float, followed: Lease | None) -> None:
        self.root = root
        self.lease = lease
        self.followed = followed
        self._lock = lock
        self._count = 0
        self._stopped = threading.Event()
        self._seconds = beat_seconds
        self._lost = False
        self._thread = threading.Thread(target=self._keep, name="megapar-owner", daemon=True)
        self._thread.start()

    @property
    def epoch(self) -> int:
        """The number of this owner. Earlier owners have smaller ones."""
        return self.lease.epoch

    @property
    def lost(self) -> bool:
        """True if the thread has found a successor. Does not access the disk."""
        return self._lost

    def check(self) -> None:
        """Raise FolderLostError if the folder has a newer owner."""
        try:
            newest = leases.newest(self.root)
        except OSError as error:
            raise CheckpointError(f"{self.root} cannot be read: {error}") from error
        if newest > self.epoch:
            self._lost = True
            raise FolderLostError(
                f"--save {self.root} has another owner by now, because this run wrote no heartbeat for a while: "
                f"{_description(leases.read(self.root, newest))}. This run ends; no file of the other run was touched."
            )

    def release(self) -> None:
        """Record the end, so that the next owner need not wait. Safe to call twice."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        self._thread.join(self._seconds)  # the thread may be blocked in an unreachable file system
        if not self._lost:
            with suppress(OSError):
                leases.write_beat(self._lock, ENDED)
        self._lock.release()

    def _keep(self) -> None:
        while not self._stopped.wait(self._seconds):
            with suppress(OSError):  # the disk is full or unreachable: try again
                self.beat()
            if self._lost:
                return

    def beat(self) -> None:
        """Write a heartbeat, unless there is a successor. Raises OSError."""
        newest = leases.newest(self.root)
        self._lost = newest > self.epoch
        if self._lost or self._stopped.is_set():
            return
        self._count += 1
        path = self.root.local_path()
        if newest < self.epoch and (path is None or path.is_dir()):  # the records were removed, but not the folder
            lock = leases.create(self.root, self.lease)
            if lock is not None:
                self._lock.release()
                self._lock = lock
        leases.write_beat(self._lock, str(self._count))


def claim(name: str, launch: str, round_: int, slurm: tuple[str, int], user: str, since: str) -> Lease:
    """Return the lease with which this process applies for a folder.

    Args:
        name: The name of the job.
        launch: The launcher's identity.
        round_: The launcher's restart count.
        slurm: Slurm's job id and its count of starts.
        user: The user's name.
        since: The present time, for messages.
    """
    return Lease(
        epoch=0,
        process=Process.here(),
        name=name,
        launch=launch,
        round=round_,
        slurm=slurm,
        user=user,
        since=since,
    )
