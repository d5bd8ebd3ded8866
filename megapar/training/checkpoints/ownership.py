"""Ownership of the folder of ``--save``: rank 0 takes it for all ranks and broadcasts the result."""

from __future__ import annotations

import getpass
import os
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from megapar.config.start import check_save
from megapar.core.checkpoint import owner as owners
from megapar.core.checkpoint.lease import Lease
from megapar.core.checkpoint.owner import Owner
from megapar.core.comm.world import World
from megapar.errors import CheckpointError, FolderOwnedError
from megapar.launch_environment import job_id, launch_id, slurm_job, starts_before

_WAITING = "waiting"


def take(save: str, load: str | None, world: World, agree: Callable[[Any], Any]) -> Owner | None:
    """Own the folder of ``--save`` until this rank leaves the world. Returns None on every rank except rank 0.

    It can take a minute to find out whether the present owner is alive, which is more than a collective may wait. So
    rank 0 repeatedly broadcasts that it is waiting. Raises FolderOwnedError or CheckpointError, on every rank.

    Args:
        save: The folder.
        load: The folder of --load. None without it.
        agree: Returns rank 0's value on all ranks.
    """
    owner, failure = None, ["", ""]

    def pause(seconds: float) -> None:
        agree([_WAITING, ""])
        time.sleep(seconds)

    if world.rank == 0:
        try:
            owner = owners.take(save, _claim(), owners.Watch(_print, pause=pause))
            _check_saved_meanwhile(owner, save, load)
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


def _check_saved_meanwhile(owner: Owner, save: str, load: str | None) -> None:
    """Raise FolderOwnedError if another run saved here after this one checked the folder before its start."""
    if owner.followed is None or owner.followed.process == owner.lease.process:
        return
    complaints = check_save(os.environ, {"save": save, "load": load})
    if complaints:
        raise FolderOwnedError(" ".join(map(str, complaints)))


def _claim() -> Lease:
    environ = os.environ
    since = datetime.now(timezone.utc).isoformat(timespec="seconds")
    times = starts_before(environ), slurm_job(environ)
    return owners.claim(job_id(environ), launch_id(environ), *times, _user(), since)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in a container
        return str(os.getuid())


def _print(text: str) -> None:
    sys.stderr.write(f"megapar: {text}\n")
    sys.stderr.flush()
