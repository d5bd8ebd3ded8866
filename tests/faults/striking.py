"""What every fault has: what is asked for, where, and the line that it writes first."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megapar.launch_environment import starts_before
from megapar.trainer import Trainer
from megapar.training.step.gradients import Gradients

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


def before(module: Any, name: str, when: Callable[..., bool], number: int = signal.SIGKILL) -> None:
    """Strike in front of a call of ``module.name`` for whose arguments ``when`` holds; it may do something itself."""
    kept = getattr(module, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if when(*args, **kwargs):
            strike(number)
        return kept(*args, **kwargs)

    setattr(module, name, call)


def after_step(act: Callable[[Trainer], None]) -> None:
    """Call ``act`` behind every step of this process."""
    kept = Trainer.step

    def step(self: Trainer) -> Any:
        done = kept(self)
        act(self)
        return done

    Trainer.step = step  # type: ignore[method-assign]


def in_step(number: int) -> None:
    """Strike in the forward and backward of the step."""
    before(Gradients, "make", lambda _, work: work.iteration == SPEC["iteration"], number)


def in_save(module: Any, name: str, path_of: Callable[..., Any], number: int = signal.SIGKILL) -> None:
    """Strike once in a phase of the save of the iteration: a stop takes a moment to reach its own thread."""
    wanted = f"iter_{SPEC['iteration']:07d}"
    calls = iter([True])
    before(module, name, lambda *args, **_: wanted in str(path_of(*args)) and next(calls, False), number)
