"""Owners for tests: what they ask for a folder with, a clock that runs when it is waited for, and an owner that sleeps.

The one that sleeps is stopped in the middle of a save, in another process. It saves 2, stops itself in the save of 4,
and goes on with 6 when it is woken. It writes how each ended.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from megapar.checkpoints.ownership.owner import Lease, Owner, Watch, acquire
from megapar.checkpoints.save_load import collective_io
from megapar.checkpoints.save_load import folder as folders
from megapar.errors import CheckpointError
from megapar.files.location import Location
from megapar.health.stop.process import Process
from tests.checkpoints.save_load.states import LAYOUT, SCALARS, make_state


def claim(**changed: Any) -> Lease:
    """Who asks."""
    known = {"process": Process.here(), "name": "a", "launch": "", "round": 0, "slurm": ("", 0)}
    return Lease(**{"epoch": 0, **known, "user": "u", "since": "now", **changed})


class Waiting:
    """A watch whose seconds pass at once. told: what people were told; seconds: that passed."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.seconds = 0.0

    def pause(self, seconds: float) -> None:
        """Let them pass."""
        self.seconds += seconds

    @property
    def watch(self) -> Watch:
        """For ``take``."""
        return Watch(self.told.append, lambda: self.seconds, self.pause)


def save(owner: Owner, iteration: int, salt: int = 0, keep: int = 0) -> Location:
    """A checkpoint of an owner, published; the name that it got."""
    named = []

    def then(folder: Location) -> None:
        named.append(folder)
        folders.publish(owner.root, iteration, owner)
        line = {name for name in owner.root.list() if name.startswith("iter_")}
        if keep:
            folders.keep_newest(owner.root, iteration, keep, line, owner)

    folder = folders.iteration_folder(owner.root, iteration)
    state = make_state("one", 0, filled=True, salt=salt)
    collective_io.save(folder, state, SCALARS, layout=LAYOUT, group=None, then=then, owner=owner)
    return named[0]


def stop_before(kept: Callable[..., Any], when: Callable[..., bool]) -> Callable[..., Any]:
    """A function that stops this process before one of its calls."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if when(*args):
            os.kill(os.getpid(), signal.SIGSTOP)
        return kept(*args, **kwargs)

    return call


PLACES: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "rename": (Path, "rename", lambda path, target: target.name == "iter_0000004"),
    "latest": (os, "replace", lambda path, target: target.name == "latest"),
    "publish": (folders, "_replace", lambda path, *_: path.name == "latest"),
    "own latest": (os, "replace", lambda path, target: target.name.endswith(".latest")),
    "removal": (shutil, "rmtree", lambda path, **_: "iter_0000002" in path.name),
}


def sleep(root: Path, place: str, out: Path) -> None:
    """Save three times, and sleep in the second, before it does what ``place`` names. out: takes what it says."""
    owner = acquire(root, claim(), Watch(print))
    save(owner, 2)
    where, name, when = PLACES[place]
    with out.open("w", encoding="utf-8") as told, patch.object(where, name, stop_before(getattr(where, name), when)):
        for iteration in (4, 6):
            try:
                save(owner, iteration, keep=1 if place == "removal" else 0)
                print("saved", file=told, flush=True)
            except CheckpointError as error:
                print(type(error).__name__, file=told, flush=True)
    os._exit(0)
