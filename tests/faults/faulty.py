"""The trainer's entry script with a fault in it: ``faulty.py FLAGS``, the fault is JSON in MEGAPAR_TEST_FAULT.

    {"kind": "kill in step", "rank": 1, "iteration": 4, "attempts": [0], "seed": 7, "notes": "/where/faults/are/noted"}

kind: see ``FAULTS``. attempts: numbers of the restart in which it strikes. A fault that strikes writes a line first.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megapar import trainer
from megapar.arguments import parse_or_exit
from megapar.config.launched import starts_before
from megapar.core.checkpoint import folder, shard_file, storage
from megapar.core.device.base import Device
from megapar.errors import DataError
from megapar.tools.stopper import children
from megapar.trainer import Trainer, main
from megapar.training.gradients import Gradients
from megapar.training.guards import ReplicaGuard
from megapar.training.work import Feed
from tests.faults import state_flips, wrong_products

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
    launcher, ranks = os.getppid(), children(os.getppid())
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


def in_save(module: Any, name: str, path_of: Callable[..., Any], number: int = signal.SIGKILL) -> None:
    """Strike once in a phase of the save of the iteration: a stop takes a moment to reach its own thread."""
    wanted = f"iter_{SPEC['iteration']:07d}"
    calls = iter([True])
    before(module, name, lambda *args, **_: wanted in str(path_of(*args)) and next(calls, False), number)


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
    kept = folder.publish

    def publish(root: Path, iteration: int, *owner: Any) -> None:
        if iteration == SPEC["iteration"]:
            before(os, "fsync", lambda *_: True)
        kept(root, iteration, *owner)

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


def flip_in_memory() -> None:
    """One bit of what this rank holds of a parameter is another one after the step. name: master, moment, parameter."""
    kept = Trainer.step

    def step(self: Trainer) -> Any:
        done = kept(self)
        if self.progress.iteration == SPEC["iteration"]:
            self.job.sharding.wait()  # on every rank: it may begin what others take part in
            if SPEC["rank"] != RANK:
                return done
            note()
            held = self.job.sharding.views
            tensors = {
                "master": lambda: [view.tensor for view in held([part.master for part in self.job.sharding.parts])],
                "moment": lambda: [view.tensor for view in held(self.job.optimizer.moments("exp_avg"))],
                "parameter": lambda: list(self.job.model.parameters()),
            }[SPEC["name"]]()
            whole = next(tensor for tensor in tensors if tensor.numel())
            whole.detach().view(-1)[:1].view(torch.int64).bitwise_xor_(1 << 44)
        return done

    Trainer.step = step  # type: ignore[method-assign]


def by_interval_only() -> None:
    """The replica guard, on every rank, as a check that costs too much to run before saves."""
    ReplicaGuard.before_saves = False


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


def damage_disk() -> None:
    """Kill this rank in the step, with the newest checkpoint on disk damaged."""

    def due(trainer: Trainer, *_: Any) -> bool:
        if trainer.progress.iteration + 1 == SPEC["iteration"]:
            trainer.checkpoints.settle()
            if trainer.local_saves is not None:
                trainer.local_saves.settle()
            newest = max(Path(SPEC["name"]).glob("iter_*"))
            path = next(newest.glob("shard-*"))
            content = bytearray(path.read_bytes())
            content[len(content) // 3] ^= 16
            path.write_bytes(content)
            strike()
        return False

    before(Trainer, "step", due)


def no_space_check() -> None:
    """The disk is full before anybody has looked."""
    storage._check_space = lambda *_: None


def freeze() -> None:
    """The disk of the checkpoints answers no more while this rank writes, after the others have."""
    kept, struck = shard_file._write_tensor, []

    def write(file: Any, tensor: Any) -> int:
        if not struck and f"iter_{SPEC['iteration']:07d}" in str(file._path):
            struck.append(1)
            others = int(os.environ.get("WORLD_SIZE", "1")) - 1
            while len([path for path in file._path.parent.iterdir() if path.stat().st_size > 1000]) < others:
                time.sleep(0.01)
            time.sleep(0.3)  # for what they bring to disk
            note()
            subprocess.run(["fsfreeze", "-f", str(file._path.parents[2])], check=True)
        return kept(file, tensor)

    shard_file._write_tensor = write


def fail_in_step(error: Exception) -> None:
    """An exception in the step, on this rank."""
    kept = Feed.next

    def following(self: Feed, loader: Any, progress: Any) -> Any:
        if progress.iteration + 1 == SPEC["iteration"]:
            note()
            raise error
        return kept(self, loader, progress)

    Feed.next = following  # type: ignore[method-assign]


def throw(module: Any, name: str, error: BaseException) -> None:
    """A call of ``module.name`` always fails."""

    def call(*_: Any, **__: Any) -> Any:
        raise error

    setattr(module, name, call)


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
    before(shard_file, "_write_tensor", write)


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


FAULTS: dict[str, Callable[[], None]] = {
    "none": lambda: None,
    "kill in step": lambda: in_step(signal.SIGKILL),
    "SIGTERM": lambda: in_step(signal.SIGTERM),
    "SIGUSR1": lambda: in_step(signal.SIGUSR1),
    "SIGSTOP": lambda: in_step(signal.SIGSTOP),
    "kill in shard": lambda: in_save(shard_file, "_write_tensor", lambda file, tensor: file._path),
    "kill in scalars": lambda: in_save(storage, "write_bytes", lambda path, content: path),
    "kill in manifest": lambda: in_save(storage, "write_bytes", lambda path, _: path if path.stem == "layout" else ""),
    "kill before rename": lambda: in_save(storage, "move_into_place", lambda aside, folder, *_: folder),
    "kill after rename": after_rename,
    "kill in latest": in_latest,
    "SIGSTOP in rename": stop_in_rename,
    "kill at random": at_random,
    "kill in a phase at random": in_phase_at_random,
    "kill node": lambda: before(Trainer, "step", node_is_due),
    "NaN once": lambda: not_a_number(always=False),
    "NaN always": lambda: not_a_number(always=True),
    "divergence": diverge,
    "flip in memory": flip_in_memory,
    "damage local": damage_local,
    "damage disk": damage_disk,
    "no space check": no_space_check,
    "freeze": freeze,
    "SIGSTOP in shard": lambda: in_save(shard_file, "_write_tensor", lambda file, _: file._path, signal.SIGSTOP),
    "SIGSTOP in evaluation": lambda: before(
        trainer, "evaluate", lambda *_, **__: STEPS[0] == SPEC["iteration"], signal.SIGSTOP
    ),
    "bad data": lambda: fail_in_step(DataError("record 7 of a.jsonl is no object")),
    "bug": lambda: fail_in_step(ValueError("a bug")),
    "no memory for copies": lambda: throw(Device, "pinned_zeros", MemoryError("no memory")),
    "no removal": lambda: throw(folder, "keep_newest", OSError(1, "Operation not permitted")),
    "signal to the job": signal_job,
    "two signals around a slow save": two_signals_around_a_slow_save,
    "SIGSTOP and signal": stop_and_signal,
    "kill launcher": kill_launcher,
    "kill warm": kill_warm,
    "wrong product once": lambda: wrong_products.passing(SPEC["iteration"], note),
    "wrong product always": lambda: wrong_products.lasting(SPEC["iteration"], note),
    "flip at rest": lambda: state_flips.at_rest(SPEC["name"], SPEC["iteration"], note),
    "flip in a save": lambda: state_flips.in_save(SPEC["name"], SPEC["iteration"], note),
    "weak cell": lambda: state_flips.at_rest(SPEC["name"], SPEC["iteration"], note, always=True),
}
EVERY_RANK = ("kill at random", "kill in a phase at random", "no space check", "flip in memory")


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
    if SPEC["harm"] == "found late":
        by_interval_only()
    here = int(os.environ.get("LOCAL_RANK", "0")) if SPEC["kind"] == "kill node" else RANK
    if ATTEMPT in SPEC["attempts"] and (SPEC["kind"] in EVERY_RANK or SPEC["rank"] == here):
        FAULTS[SPEC["kind"]]()
    main(parse_or_exit("moe", sys.argv[1:]))
