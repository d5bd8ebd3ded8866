"""The trainer's entry script with a fault in it: ``faulty.py FLAGS``, the fault is JSON in MEGAPAR_TEST_FAULT.

    {"kind": "kill in step", "rank": 1, "iteration": 4, "attempts": [0], "seed": 7, "notes": "/where/faults/are/noted"}

kind: see ``FAULTS``. attempts: numbers of the restart in which it strikes. A fault that strikes writes a line first.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megapar.arguments import parse_or_exit
from megapar.core.checkpoint import folder, shard_file, storage
from megapar.trainer import Trainer, main

SPEC: dict[str, Any] = json.loads(os.environ["MEGAPAR_TEST_FAULT"])
RANK = int(os.environ.get("RANK", "0"))
ATTEMPT = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
STEPS: list[int] = [0]  # the last iteration that this process has finished


def strike(number: int = signal.SIGKILL) -> None:
    """Note the fault and let it happen."""
    with Path(SPEC["notes"]).open("a") as notes:
        notes.write(json.dumps({"attempt": ATTEMPT, "rank": RANK, "finished": STEPS[0], "at": time.time()}) + "\n")
        notes.flush()
        os.fsync(notes.fileno())
    os.kill(os.getpid(), number)


def before(module: Any, name: str, when: Callable[..., bool], number: int = signal.SIGKILL) -> None:
    """Strike in front of a call of ``module.name`` for whose arguments ``when`` holds."""
    kept = getattr(module, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if when(*args, **kwargs):
            strike(number)
        return kept(*args, **kwargs)

    setattr(module, name, call)


def in_step(number: int) -> None:
    """Strike in the forward and backward of the step."""
    before(Trainer, "_forward_backward", lambda self, *_: self.progress.iteration + 1 == SPEC["iteration"], number)


def in_save(module: Any, name: str, path_of: Callable[..., Any]) -> None:
    """Strike in a phase of the save of the iteration."""
    wanted = f"iter_{SPEC['iteration']:07d}"
    before(module, name, lambda *args, **_: wanted in str(path_of(*args)))


def after_rename() -> None:
    """Strike when the folder has its name and ``latest`` names the one before."""
    wanted = f"iter_{SPEC['iteration']:07d}"
    before(folder, "publish", lambda root, iteration: f"iter_{iteration:07d}" == wanted)


def in_latest() -> None:
    """Strike when the new ``latest`` is written aside and not renamed."""
    kept = folder.publish

    def publish(root: Path, iteration: int) -> None:
        if iteration == SPEC["iteration"]:
            before(os, "fsync", lambda *_: True)
        kept(root, iteration)

    folder.publish = publish


def at_random() -> None:
    """Strike at a moment that the seed and the attempt decide, counted from the first step."""
    delay = random.Random(f"{SPEC['seed']}/{ATTEMPT}").uniform(0.0, SPEC["seconds"])
    victim = random.Random(f"{SPEC['seed']}/{ATTEMPT}/rank").randrange(int(os.environ["WORLD_SIZE"]))
    kept = Trainer.run

    def run(self: Trainer) -> Any:
        if victim == RANK:
            threading.Timer(delay, strike).start()
        return kept(self)

    Trainer.run = run  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[], None]] = {
    "none": lambda: None,
    "kill in step": lambda: in_step(signal.SIGKILL),
    "SIGTERM": lambda: in_step(signal.SIGTERM),
    "SIGUSR1": lambda: in_step(signal.SIGUSR1),
    "SIGSTOP": lambda: in_step(signal.SIGSTOP),
    "kill in shard": lambda: in_save(shard_file, "_write_tensor", lambda file, tensor: file._path),
    "kill in scalars": lambda: in_save(storage, "write_bytes", lambda path, content: path),
    "kill in manifest": lambda: in_save(storage, "move_into_place", lambda aside, folder: folder),
    "kill after rename": after_rename,
    "kill in latest": in_latest,
    "kill at random": at_random,
}


def watch_steps() -> None:
    """Know how far the process is, and note when the first step after a start is done."""
    kept = Trainer.step
    first = [True]

    def step(self: Trainer) -> Any:
        done = kept(self)
        STEPS[0] = self.progress.iteration
        if first[0] and RANK == 0:
            with Path(SPEC["notes"] + ".starts").open("a") as notes:
                start = {"attempt": ATTEMPT, "first": self.progress.iteration, "at": time.time()}
                notes.write(json.dumps(start) + "\n")
            first[0] = False
        return done

    Trainer.step = step  # type: ignore[method-assign]


if __name__ == "__main__":
    watch_steps()
    if ATTEMPT in SPEC["attempts"] and (SPEC["kind"] == "kill at random" or SPEC["rank"] == RANK):
        FAULTS[SPEC["kind"]]()
    main(parse_or_exit("moe", sys.argv[1:]))
