"""AMPipe with a delayed side stream: its work is late, and the losses must not change.

A spinning kernel precedes every launch on the stream of the axis, so that code that reads early, or reuses memory that
the stream still reads, computes with wrong data. Only the launch is modified; waits are unchanged. A CPU has no stream
to delay, but the runs are compared anyway.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from megapar.core.comm.async_pairs import Deferred
from scripts.gpu_day.day import Answer, Day
from scripts.gpu_day.trainers import flags, losses, parsed, trainer

CYCLES = 20_000_000  # about 10 ms, longer than a layer
STEPS = 4
# Two runs of a configuration may add in different orders; a corrupted buffer changes far more.
TOLERANCE = 2e-3
RUNS = {
    "plain": "--moe-model-type megatron_moe",
    "capacity": "--moe-model-type deepspeed_moe",
    "recompute": "--moe-model-type megatron_moe --recompute-interval 1",
    "documents": "--moe-model-type megatron_moe --reset-attention-mask --reset-position-ids",
}


def run(day: Day) -> None:
    """Compare every run with 2 slices and one with 4, on time and late."""
    for name, more in list(RUNS.items())[: 2 if day.small else None]:
        day.attempt(f"{name}, 2 slices", partial(race, day, more, 2), least=5.0)
    day.attempt("plain, 4 slices", partial(race, day, RUNS["plain"], 4), least=5.0)
    day.attempt("cross-layer, 2 slices", partial(race, day, RUNS["plain"], 2, cross_layer=True), least=5.0)


def race(day: Day, more: str, slices: int, *, cross_layer: bool = False) -> Answer:
    """Compare the losses without slices, with slices, and with slices and a delayed stream."""
    config = parsed(flags(day, "moe", more), "moe")
    steps = 2 if day.small else STEPS
    found, launches = {}, {}
    for name, degree, late in (("whole", 1, False), ("on time", slices, False), ("late", slices, True)):
        sleeps = noted(asleep=late and day.on_gpu)
        with sleeps as counts, trainer(config, day.device, degree, cross_layer=cross_layer) as made:
            found[name] = losses(made, steps)
        launches[name] = dict(counts)
    apart = max(abs(a / b - 1) for a, b in zip(found["late"], found["on time"], strict=True))
    sliced = max(abs(a / b - 1) for a, b in zip(found["on time"], found["whole"], strict=True))
    raced = bool(launches["late"].get("aside" if day.on_gpu else "at once")) and not launches["whole"]
    figures = {"late_to_on_time": apart, "on_time_to_whole": sliced, "losses": found, "launches": launches["late"]}
    return Answer(raced and apart <= TOLERANCE and sliced <= 5 * TOLERANCE, figures)


@contextmanager
def noted(*, asleep: bool) -> Iterator[Counter[str]]:
    """Count deferred launches, on the stream of the axis or at once; ``asleep`` delays the former by ``CYCLES``."""
    launch, counts = Deferred.launch, Counter[str]()

    def noting(deferred: Deferred, message: Any, exchanges: Any, rows: Any, after: Any = None, **more: Any) -> None:
        counts["at once" if after is None else "aside"] += 1
        if asleep and after is not None:
            with deferred._comm.stream(exchanges[0].axis):
                torch.cuda._sleep(CYCLES)
        launch(deferred, message, exchanges, rows, after, **more)

    with patch.object(Deferred, "launch", noting):
        yield counts
