"""Faults that end, stop or signal processes of a job, at a moment that is asked for."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from megapar.checkpoints.format import shards
from megapar.checkpoints.save_load import collective_io, folder, storage
from megapar.tools.launcher.stopper import children
from megapar.trainer import Trainer
from megapar.training.step import expert_places
from megapar.training.step.gradients import Gradients
from tests.faults.striking import ATTEMPT, RANK, SPEC, STEPS, before, note, strike


def strike_node() -> None:
    """Kill this node: the launcher, its other ranks, and this one."""
    note()
    launcher, ranks = os.getppid(), children(os.getppid())
    os.kill(launcher, signal.SIGKILL)
    for rank in ranks:
        if rank != os.getpid():
            os.kill(rank, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def node_is_due(trainer: Trainer, *_: Any) -> bool:
    """Kill the node of this rank in the step; never comes back to say so."""
    if trainer.progress.iteration + 1 == SPEC["iteration"]:
        strike_node()
    return False


def after_rename() -> None:
    """Strike when the folder has its name and ``latest`` names the one before."""
    wanted = f"iter_{SPEC['iteration']:07d}"
    before(folder, "publish", lambda root, iteration, *_: f"iter_{iteration:07d}" == wanted)


def stop_in_rename() -> None:
    """Stop when the owner has looked whether it still is one, and the folder does not have its name yet."""
    wanted = f"iter_{SPEC['iteration']:07d}"
    before(Path, "rename", lambda _, target: Path(target).name == wanted, signal.SIGSTOP)


def in_latest() -> None:
    """Strike when the new ``latest`` is written aside and not renamed."""

    def begin(root: Any, iteration: int, *_: Any) -> bool:
        if iteration == SPEC["iteration"]:
            before(os, "fsync", lambda *_: True)
        return False

    before(folder, "publish", begin)


def in_move() -> None:
    """Strike when experts move in the step or in the save before it, after ``seed`` and one more parameters."""
    calls = itertools.count(-SPEC["seed"])
    before(expert_places, "move_rows", lambda *_: STEPS[0] + 1 == SPEC["iteration"] and next(calls) == 1)


def at_random() -> None:
    """Strike at a moment that the seed and the attempt decide, counted from the first step."""
    delay = random.Random(f"{SPEC['seed']}/{ATTEMPT}").uniform(0.0, SPEC["seconds"])
    victim = random.Random(f"{SPEC['seed']}/{ATTEMPT}/rank").randrange(int(os.environ["WORLD_SIZE"]))

    def begin(_: Trainer) -> bool:
        if victim == RANK:
            threading.Timer(delay, strike).start()
        return False

    before(Trainer, "train", begin)


# Phase -> the call that begins it, among how many calls one is drawn, and which ranks make it.
PHASES: dict[str, tuple[Any, str, int, str]] = {
    "step": (Gradients, "make", 12, "any"),
    "shard": (shards, "_write_tensor", 100, "any"),
    "scalars and manifest": (storage, "write_bytes", 8, "0"),
    "rename": (collective_io, "move_into_place", 4, "0"),
    "latest": (folder, "publish", 4, "0"),
}


def in_phase_at_random() -> None:
    """Strike in a phase, the attempts' in turns: in one of its next calls, up to a few milliseconds after it began."""
    phase = list(PHASES)[ATTEMPT % len(PHASES)]
    module, name, most, who = PHASES[phase]
    draw = random.Random(f"{SPEC['seed']}/{ATTEMPT}/phase")
    wanted, delay = draw.randrange(most), draw.uniform(0.0, SPEC["seconds"])
    if (draw.randrange(int(os.environ["WORLD_SIZE"])) if who == "any" else 0) != RANK:
        return
    calls = itertools.count()

    def begin(*_: Any, **__: Any) -> bool:
        if next(calls) == wanted:
            threading.Timer(delay, strike, kwargs={"what": phase}).start()
        return False

    before(module, name, begin)


def freeze() -> None:
    """The disk of the checkpoints answers no more while this rank writes, after the others have."""
    struck: list[int] = []

    def begin(file: Any, *_: Any) -> bool:
        place = Path(str(file._path))
        if not struck and f"iter_{SPEC['iteration']:07d}" in str(place):
            struck.append(1)
            others = int(os.environ.get("WORLD_SIZE", "1")) - 1
            while len([path for path in place.parent.iterdir() if path.stat().st_size > 1000]) < others:
                time.sleep(0.01)
            time.sleep(0.3)  # for what they bring to disk
            note()
            subprocess.run(["fsfreeze", "-f", str(place.parents[2])], check=True)
        return False

    before(shards, "_write_tensor", begin)


def launcher_and_ranks(order: str) -> list[int]:
    """Processes of the job in the order in which a signal reaches them."""
    launcher = os.getppid()
    ranks = children(launcher)
    orders = {
        "launcher": [launcher],
        "launcher first": [launcher, *ranks],
        "ranks first": [*ranks, launcher],
        "between": [ranks[0], launcher, *ranks[1:]],
    }
    return orders[order]


def signal_job() -> None:
    """Send a signal to the launcher, or to it and all ranks in some order, in the step."""

    def due(_: Any, work: Any) -> bool:
        if work.iteration == SPEC["iteration"]:
            note()
            for pid in launcher_and_ranks(SPEC["harm"]):
                os.kill(pid, signal.Signals[SPEC["name"]])
        return False

    before(Gradients, "make", due)


def two_signals_around_a_slow_save() -> None:
    """The launcher gets one signal in the step; the save that follows takes 30 s, and after some all get another."""
    first, second = (signal.Signals[name] for name in SPEC["name"].split())
    slow = [False, False]

    def begin(_: Any, work: Any) -> bool:
        if work.iteration == SPEC["iteration"]:
            note()
            slow[0] = True
            os.kill(os.getppid(), first)
        return False

    def again() -> None:
        note(second.name)
        for pid in launcher_and_ranks("launcher first"):
            os.kill(pid, second)

    def write(*_: Any, **__: Any) -> bool:
        if slow == [True, False]:
            slow[1] = True
            threading.Timer(SPEC["seconds"], again).start()
            time.sleep(30.0)
        return False

    before(Gradients, "make", begin)
    before(shards, "_write_tensor", write)


def stop_and_signal() -> None:
    """Stand still in the step, so that the others are stuck in a collective, and have the launcher signalled."""

    def due(_: Any, work: Any) -> bool:
        if work.iteration == SPEC["iteration"]:
            subprocess.Popen(["sh", "-c", f"sleep 2; kill -{SPEC['name'].removeprefix('SIG')} {os.getppid()}"])
            return True
        return False

    before(Gradients, "make", due, signal.SIGSTOP)


def kill_launcher() -> None:
    """Kill the launcher alone, in the step."""

    def due(_: Any, work: Any) -> bool:
        if work.iteration == SPEC["iteration"]:
            note()
            os.kill(os.getppid(), signal.SIGKILL)
        return False

    before(Gradients, "make", due)


def kill_warm() -> None:
    """Kill the process of which ranks are forks, and this rank, in the step."""

    def due(_: Any, work: Any) -> bool:
        if work.iteration != SPEC["iteration"]:
            return False
        for pid in children(os.getppid()):
            if os.getsid(pid) != pid:  # ranks lead sessions
                os.kill(pid, signal.SIGKILL)
        return True

    before(Gradients, "make", due)
