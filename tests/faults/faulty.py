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

import torch

from megapar.arguments import parse_or_exit
from megapar.config.launched import starts_before
from megapar.core.checkpoint import folder, shard_file, storage
from megapar.tools.launch import _children
from megapar.trainer import Trainer, main
from megapar.training.gradients import Gradients
from tests.faults import state_flips

SPEC: dict[str, Any] = json.loads(os.environ["MEGAPAR_TEST_FAULT"])
RANK = int(os.environ.get("RANK", "0"))
ATTEMPT = starts_before(os.environ)
STEPS: list[int] = [0]  # the last iteration that this process has finished


def note(what: str = "") -> None:
    """The fault is about to happen. No fsync: a killed process leaves what it has written, and a fault waits there."""
    line = {"attempt": ATTEMPT, "rank": RANK, "finished": STEPS[0], "at": time.time(), "what": what}
    with Path(SPEC["notes"]).open("a") as notes:
        notes.write(json.dumps(line) + "\n")


def strike(number: int = signal.SIGKILL, what: str = "") -> None:
    """Note the fault and let it happen."""
    note(what)
    os.kill(os.getpid(), number)


def strike_node() -> None:
    """Kill this node: the launcher, its other ranks, and this one."""
    note()
    launcher, ranks = os.getppid(), _children(os.getppid())
    os.kill(launcher, signal.SIGKILL)
    for rank in ranks:
        if rank != os.getpid():
            os.kill(rank, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


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
    before(Gradients, "make", lambda _, work: work.iteration == SPEC["iteration"], number)


def in_save(module: Any, name: str, path_of: Callable[..., Any]) -> None:
    """Strike in a phase of the save of the iteration."""
    wanted = f"iter_{SPEC['iteration']:07d}"
    before(module, name, lambda *args, **_: wanted in str(path_of(*args)))


def node_is_due(trainer: Trainer, *_: Any) -> bool:
    """Kill the node of this rank in the step; never comes back to say so."""
    if trainer.progress.iteration + 1 == SPEC["iteration"]:
        strike_node()
    return False


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


# Phase -> the call that begins it, among how many calls one is drawn, and which ranks make it.
PHASES: dict[str, tuple[Any, str, int, str]] = {
    "step": (Gradients, "make", 12, "any"),
    "shard": (shard_file, "_write_tensor", 100, "any"),
    "scalars and manifest": (storage, "write_bytes", 8, "0"),
    "rename": (storage, "move_into_place", 4, "0"),
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
    kept, calls = getattr(module, name), [0]

    def call(*args: Any, **kwargs: Any) -> Any:
        if calls[0] == wanted:
            threading.Timer(delay, strike, kwargs={"what": phase}).start()
        calls[0] += 1
        return kept(*args, **kwargs)

    setattr(module, name, call)


def not_a_number(always: bool) -> None:
    """A module of this rank gives NaN: once in the step, or in every step from there on."""
    kept = Trainer.run

    def run(self: Trainer) -> Any:
        struck: list[int] = []

        def hook(module: object, inputs: object, output: Any) -> Any:
            due = self.progress.iteration + 1 >= SPEC["iteration"] and (always or not struck)
            if not due:
                return output
            if not struck:
                note()
                struck.append(1)
            return output * torch.nan

        dict(self.job.model.named_modules())["layers.1.mlp_norm"].register_forward_hook(hook)
        return kept(self)

    Trainer.run = run  # type: ignore[method-assign]


def diverge() -> None:
    """One bit of a parameter of this rank is another one after the step."""
    kept = Trainer.step

    def step(self: Trainer) -> Any:
        done = kept(self)
        if self.progress.iteration == SPEC["iteration"]:
            note()
            self.job.sharding.wait()
            with torch.no_grad():
                dict(self.job.model.named_parameters())["final_norm.weight"][0] *= 1 + 1e-12
        return done

    Trainer.step = step  # type: ignore[method-assign]


def damage_local() -> None:
    """Kill this rank in the step, with its newest local checkpoint damaged."""

    def due(trainer: Trainer, *_: Any) -> bool:
        if trainer.progress.iteration + 1 == SPEC["iteration"]:
            saves = trainer.local_saves
            assert saves is not None
            saves.settle()
            newest = max(saves._local._iterations().items())[1]
            path = newest / f"rank-{RANK:05d}.{SPEC['name']}"
            content = bytearray(path.read_bytes())
            content[len(content) // 3] ^= 16
            path.write_bytes(content if SPEC["harm"] == "bit flip" else content[: len(content) // 2])
            strike()
        return False

    before(Trainer, "step", due)


def no_space_check() -> None:
    """The disk is full before anybody has looked."""
    storage._check_space = lambda *_: None


FAULTS: dict[str, Callable[[], None]] = {
    "none": lambda: None,
    "kill in step": lambda: in_step(signal.SIGKILL),
    "SIGTERM": lambda: in_step(signal.SIGTERM),
    "SIGUSR1": lambda: in_step(signal.SIGUSR1),
    "SIGSTOP": lambda: in_step(signal.SIGSTOP),
    "kill in shard": lambda: in_save(shard_file, "_write_tensor", lambda file, tensor: file._path),
    "kill in scalars": lambda: in_save(storage, "write_bytes", lambda path, content: path),
    "kill in manifest": lambda: in_save(storage, "write_bytes", lambda path, _: path if path.stem == "layout" else ""),
    "kill before rename": lambda: in_save(storage, "move_into_place", lambda aside, folder: folder),
    "kill after rename": after_rename,
    "kill in latest": in_latest,
    "kill at random": at_random,
    "kill in a phase at random": in_phase_at_random,
    "kill node": lambda: before(Trainer, "step", node_is_due),
    "NaN once": lambda: not_a_number(always=False),
    "NaN always": lambda: not_a_number(always=True),
    "divergence": diverge,
    "damage local": damage_local,
    "no space check": no_space_check,
    "flip at rest": lambda: state_flips.at_rest(SPEC["name"], SPEC["iteration"], note),
    "weak cell": lambda: state_flips.at_rest(SPEC["name"], SPEC["iteration"], note, always=True),
}
EVERY_RANK = ("kill at random", "kill in a phase at random", "no space check")


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
    here = int(os.environ.get("LOCAL_RANK", "0")) if SPEC["kind"] == "kill node" else RANK
    if ATTEMPT in SPEC["attempts"] and (SPEC["kind"] in EVERY_RANK or SPEC["rank"] == here):
        FAULTS[SPEC["kind"]]()
    main(parse_or_exit("moe", sys.argv[1:]))
