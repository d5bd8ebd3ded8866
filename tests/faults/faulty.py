"""The trainer's entry script with a fault in it: ``faulty.py FLAGS``, the fault is JSON in MEGAPAR_TEST_FAULT.

    {"kind": "kill in step", "rank": 1, "iteration": 4, "attempts": [0], "seed": 7, "notes": "/where/faults/are/noted"}

kind: see ``FAULTS``. attempts: numbers of the restart in which it strikes. A fault that strikes writes a line first.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from megapar import trainer
from megapar.arguments import parse_or_exit
from megapar.checkpoints.format import shards
from megapar.checkpoints.format.names import LAYOUT_FILE
from megapar.checkpoints.ownership import owner
from megapar.checkpoints.save_load import collective_io, folder, storage
from megapar.core.device.base import Device
from megapar.errors import DataError
from megapar.files import disk, objects
from megapar.trainer import Trainer, main
from tests.faults import wrong_numbers
from tests.faults.blows import (
    after_rename,
    at_random,
    freeze,
    in_latest,
    in_move,
    in_phase_at_random,
    kill_launcher,
    kill_warm,
    node_is_due,
    signal_job,
    stop_and_signal,
    stop_in_rename,
    two_signals_around_a_slow_save,
)
from tests.faults.spoiled import (
    by_interval_only,
    damage,
    diverge,
    fail_in_evaluation,
    fail_in_step,
    fail_publications,
    flip_in_memory,
    no_space_check,
    not_a_number,
    throw,
)
from tests.faults.striking import ATTEMPT, RANK, SPEC, STEPS, after_step, before, in_save, in_step

FAULTS: dict[str, Callable[[], None]] = {
    "none": lambda: None,
    "kill in step": lambda: in_step(signal.SIGKILL),
    "SIGTERM": lambda: in_step(signal.SIGTERM),
    "SIGUSR1": lambda: in_step(signal.SIGUSR1),
    "SIGSTOP": lambda: in_step(signal.SIGSTOP),
    "kill in shard": lambda: in_save(shards, "_write_tensor", lambda file, tensor: file._path),
    "kill in scalars": lambda: in_save(storage, "write_bytes", lambda path, content: path),
    "kill in manifest": lambda: in_save(
        storage, "write_bytes", lambda path, _: path if path.name == LAYOUT_FILE else ""
    ),
    "kill before rename": lambda: in_save(collective_io, "move_into_place", lambda aside, folder, *_: folder),
    "kill after rename": after_rename,
    "kill in latest": in_latest,
    "SIGSTOP in rename": stop_in_rename,
    "kill in move": in_move,
    "kill at random": at_random,
    "kill in a phase at random": in_phase_at_random,
    "kill node": lambda: before(Trainer, "step", node_is_due),
    "NaN once": lambda: not_a_number(always=False),
    "NaN always": lambda: not_a_number(always=True),
    "divergence": diverge,
    "flip in memory": flip_in_memory,
    "damage local": lambda: damage(local=True),
    "damage disk": lambda: damage(local=False),
    "no space check": no_space_check,
    "freeze": freeze,
    "SIGSTOP in shard": lambda: in_save(shards, "_write_tensor", lambda file, _: file._path, signal.SIGSTOP),
    "SIGSTOP in evaluation": lambda: before(
        trainer, "evaluate", lambda *_, **__: STEPS[0] == SPEC["iteration"], signal.SIGSTOP
    ),
    "bug in evaluation": lambda: fail_in_evaluation(ValueError("a held-out sample is damaged")),
    "bad data": lambda: fail_in_step(DataError("record 7 of a.jsonl is no object")),
    "bug": lambda: fail_in_step(ValueError("a bug")),
    "no memory for copies": lambda: throw(Device, "pinned_zeros", MemoryError("no memory")),
    "kill in owner": lambda: before(disk, "_link", lambda *_: True),
    "no publication": fail_publications,
    "no removal": lambda: throw(folder, "keep_newest", OSError(1, "Operation not permitted")),
    "signal to the job": signal_job,
    "two signals around a slow save": two_signals_around_a_slow_save,
    "SIGSTOP and signal": stop_and_signal,
    "kill launcher": kill_launcher,
    "kill warm": kill_warm,
    "wrong product once": wrong_numbers.product_once,
    "wrong product always": wrong_numbers.product_always,
    "flip at rest": lambda: wrong_numbers.flip_at_rest(always=False),
    "flip in a save": wrong_numbers.flip_in_save,
    "weak cell": lambda: wrong_numbers.flip_at_rest(always=True),
}
EVERY_RANK = ("kill at random", "kill in a phase at random", "no space check", "flip in memory")


def watch_steps() -> None:
    """Know how far the process is, and note when the first step after a start is done."""
    first = [True]

    def tell(trainer: Trainer) -> None:
        STEPS[0] = trainer.progress.iteration
        if first[0] and RANK == 0:
            with Path(SPEC["notes"] + ".starts").open("a") as notes:
                start = {"attempt": ATTEMPT, "first": STEPS[0], "at": time.time()}
                notes.write(json.dumps(start) + "\n")
            first[0] = False

    after_step(tell)


if __name__ == "__main__":
    watch_steps()
    if os.environ.get("MEGAPAR_TEST_IMPATIENT"):  # of what a store does not answer
        objects.PAUSE_SECONDS, objects.STALL_SECONDS = 0.01, 2.0
        owner.STORE_BEAT_SECONDS = 0.5
    if ahead := float(os.environ.get("MEGAPAR_TEST_CLOCK", "0")):
        right = time.time
        time.time = lambda: right() + ahead
    if SPEC["harm"] == "found late":
        by_interval_only()
    here = int(os.environ.get("LOCAL_RANK", "0")) if SPEC["kind"] == "kill node" else RANK
    if ATTEMPT in SPEC["attempts"] and (SPEC["kind"] in EVERY_RANK or SPEC["rank"] == here):
        FAULTS[SPEC["kind"]]()
    main(parse_or_exit("moe", sys.argv[1:]))
