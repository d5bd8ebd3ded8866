"""Owning a folder of checkpoints: who may become the owner, and how an owner learns that it is none any more.

Whether an owner lives is judged by seeing its beat change while one watches, on one's own clock. One that is known to
have ended is followed at once: it said so, its process is gone from this machine, or this job is that one started
again. Any other is followed when its beat has stood still for a minute, even if it is only asleep: nothing of what it
may still do when it wakes up takes the place of anything (folder.py), and then it learns of its successor and ends.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from megapar.core.checkpoint import lease as leases
from megapar.core.checkpoint.lease import ENDED, Lease
from megapar.core.health.process import Process
from megapar.errors import CheckpointError, FolderLostError, FolderOwnedError

BEAT_SECONDS = 2.0
PATIENCE_SECONDS = 60.0
UNLOCKED_SECONDS = 10.0  # of an owner on this machine that had a lock and has it no more
_QUIET_SECONDS = 3.0
_LOOK_SECONDS = 0.25
_TRIES = 100


@dataclass(frozen=True)
class Watch:
    """How an owner is watched. say: what people are told meanwhile; clock: in seconds, never set back."""

    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    pause: Callable[[float], None] = time.sleep


def take(root: Path, mine: Lease, watch: Watch, beat_seconds: float = BEAT_SECONDS) -> Owner:
    """Become the owner of a folder. mine: who asks; its epoch is chosen here.

    Raises FolderOwnedError where another owner lives, CheckpointError where the folder cannot be read or written.
    """
    try:
        for _ in range(_TRIES):
            # Before anybody is judged: who comes first gets this number, the others judge again.
            epoch, before = leases.highest(root) + 1, leases.newest(root)
            if before:
                _let_end(root, before, mine, watch)
            claimed = replace(mine, epoch=epoch)
            descriptor = leases.create(root, claimed)
            if descriptor is None:
                continue
            if leases.newest(root) == epoch:
                leases.tidy(root, epoch)
                followed = leases.read(root, before) if before else None
                return Owner(root, claimed, descriptor, beat_seconds, followed)
            os.close(descriptor)
    except OSError as error:
        raise CheckpointError(f"--save {root} cannot be owned: {error}") from error
    raise CheckpointError(f"--save {root} cannot be owned: others take it again and again")


def _let_end(root: Path, epoch: int, mine: Lease, watch: Watch) -> None:
    """Return when the owner has ended, or may be taken for it. Raises FolderOwnedError when it lives."""
    first, start, told = leases.read_beat(root, epoch), watch.clock(), False
    while True:
        owner, beat = leases.read(root, epoch), leases.read_beat(root, epoch)
        if beat == ENDED or leases.newest(root) > epoch:  # of the next one take() judges
            return
        if owner is not None and (mine.follows(owner) or owner.process.lives() is False):
            return
        if beat != first:
            raise FolderOwnedError(
                f"--save {root} belongs to another run, which is alive: {_told(owner)}. Wait until it has ended, end "
                "it there, or give another folder."
            )
        quiet = watch.clock() - start
        patience = PATIENCE_SECONDS
        if quiet >= UNLOCKED_SECONDS and owner is not None and leases.is_unlocked(root, owner):
            patience = UNLOCKED_SECONDS
        if quiet >= patience:
            return
        if not told and quiet >= _QUIET_SECONDS:
            told = True
            seconds = f"{PATIENCE_SECONDS:.0f} s"
            watch.say(f"waiting up to {seconds} to see whether the owner of --save {root} is alive: {_told(owner)}")
        watch.pause(_LOOK_SECONDS)


def _told(owner: Lease | None) -> str:
    if owner is None:
        return "one that left no readable note"
    job = f"job {owner.name}, " if owner.name else ""
    return f"{job}process {owner.process.pid} on {owner.process.host}, user {owner.user}, since {owner.since}"


class Owner:
    """This process owns a folder until ``release``, its end, or a successor. A thread keeps the beat.

    lease: of this owner; followed: of the one before, where there was one that is known.
    """

    def __init__(self, root: Path, lease: Lease, descriptor: int, beat_seconds: float, followed: Lease | None) -> None:
        self.root = root
        self.lease = lease
        self.followed = followed
        self._descriptor = descriptor  # with the lock
        self._count = 0
        self._stopped = threading.Event()
        self._seconds = beat_seconds
        self._lost = False
        self._thread = threading.Thread(target=self._keep, name="megapar-owner", daemon=True)
        self._thread.start()

    @property
    def epoch(self) -> int:
        """Of this owner; those before it have smaller ones."""
        return self.lease.epoch

    @property
    def lost(self) -> bool:
        """Whether there is a successor, as the thread has seen. No disk is asked."""
        return self._lost

    def check(self) -> None:
        """Raise FolderLostError where somebody else owns the folder by now."""
        try:
            newest = leases.newest(self.root)
        except OSError as error:
            raise CheckpointError(f"{self.root} cannot be read: {error}") from error
        if newest > self.epoch:
            self._lost = True
            raise FolderLostError(
                f"--save {self.root} has another owner by now, as this one gave no sign of life for a while: "
                f"{_told(leases.read(self.root, newest))}. This run ends; nothing of the other one's was touched."
            )

    def release(self) -> None:
        """Own it no more; the next one need not wait. Safe to call twice."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        self._thread.join(self._seconds)  # it may be stuck in a file system that is gone
        if not self._lost:
            with suppress(OSError):
                leases.write_beat(self.root, self.epoch, ENDED)
        with suppress(OSError):
            os.close(self._descriptor)

    def _keep(self) -> None:
        while not self._stopped.wait(self._seconds):
            with suppress(OSError):  # a disk that is full or away: try again
                self.beat()
            if self._lost:
                return

    def beat(self) -> None:
        """Show that this owner lives, or learn that it is none. Raises OSError."""
        newest = leases.newest(self.root)
        self._lost = newest > self.epoch
        if self._lost or self._stopped.is_set():
            return
        self._count += 1
        if newest < self.epoch and self.root.is_dir():  # somebody has removed the notes
            descriptor = leases.create(self.root, self.lease)
            if descriptor is not None:
                self._descriptor, old = descriptor, self._descriptor
                os.close(old)
        leases.write_beat(self.root, self.epoch, str(self._count))


def claim(name: str, launch: str, round_: int, slurm: tuple[str, int], user: str, since: str) -> Lease:
    """What this process asks with."""
    return Lease(0, Process.here(), name, launch, round_, slurm, user, since)
