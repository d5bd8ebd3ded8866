"""Cost of watching for bad numbers, diverged replicas, hangs and slow ranks, at the default rates.

    python -m benchmarks.reliability.run

One process trains a small decoder. In each round the same trainer runs --steps steps with all checks at their defaults
and --steps steps without any. That shows little on a machine whose steps differ by several percent, so the calls of the
checks are also timed one by one and added up, which gives their time to the microsecond. The comparison of replicas,
which one process does not need, is timed separately on all parameters and divided by its interval.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from datetime import timedelta
from unittest.mock import patch

from benchmarks.support.watching import SMALL, look_seconds, timed
from megapar.arguments import parse
from megapar.core.comm.axis import Axis
from megapar.core.comm.flight_recorder import FlightRecorder
from megapar.core.comm.world import World
from megapar.core.device.pick import pick
from megapar.health.hangs.watchdog import Watchdog
from megapar.trainer import Trainer
from megapar.training.building.corpus import make_corpus
from megapar.training.reports import monitor
from megapar.training.step.step_guard import StepGuard

FLAGS = (
    *SMALL,
    *("--seq-length", "128", "--micro-batch-size", "2", "--global-batch-size", "4", "--log-interval", "10"),
)


def steps(trainer: Trainer, count: int, watchdog: Watchdog | None) -> float:
    """Return the seconds of this many steps with their log."""
    start = time.perf_counter()
    for _ in range(count):
        if watchdog is not None:
            watchdog.before_step(trainer.progress.iteration + 1)
        trainer.monitor.add(trainer.step())
        if watchdog is not None:
            watchdog.after_step(trainer.progress.iteration)
    records = trainer.monitor.flush()
    if watchdog is not None:
        for record in records:
            trainer.bad_steps.watch(record.iteration, record.loss, record.grad_norm)
    return time.perf_counter() - start


def without(trainer: Trainer, count: int) -> float:
    """Return the same without the check of the norm, the flight recorder and the percentiles."""
    with (
        patch.object(math, "isfinite", lambda value: True),
        patch.object(StepGuard, "_is_bad", lambda *_: False),
        patch.object(FlightRecorder, "note", lambda *_: None),
        patch.object(Axis, "note", lambda *_: None),
        patch("megapar.training.reports.monitor.find_pace", lambda *_: None),
    ):
        return steps(trainer, count, None)


def watch_calls(trainer: Trainer, count: int, watchdog: Watchdog) -> float:
    """Return the seconds spent in the calls that watch, over this many steps, including the cost of timing them."""
    watching = (
        *((StepGuard, "_is_bad"), (FlightRecorder, "note"), (Axis, "note")),
        *((Watchdog, "before_step"), (Watchdog, "after_step")),
        *((type(trainer.bad_steps), "watch"), (monitor, "find_pace")),
    )
    with timed(watching) as spent:
        steps(trainer, count, watchdog)
    return spent[0]


def main() -> None:
    """Print the table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    config = parse("moe", [*FLAGS, "--train-iters", "1000000"], {})
    world = World.start(config.grid, pick(options.device), timedelta(seconds=60))
    trainer = Trainer(config, world, make_corpus(config))
    trainer.start()
    watchdog = trainer.watch
    watchdog.start()
    steps(trainer, options.steps, watchdog)
    ratios, seconds = [], []
    for number in range(options.rounds):
        if number % 2:
            off = without(trainer, options.steps)
            on = steps(trainer, options.steps, watchdog)
        else:
            on = steps(trainer, options.steps, watchdog)
            off = without(trainer, options.steps)
        ratios.append(on / off)
        seconds.append(off / options.steps)
    step = statistics.median(seconds)
    calls = watch_calls(trainer, 100, watchdog) / 100 / step
    watchdog.close()
    trainer.loader.close()
    look = statistics.median(look_seconds(trainer) for _ in range(9))
    guard = look / config.reliability.replica_check_interval / step
    watching = statistics.median(ratios) - 1
    print(f"step                     {step:9.4f} s")
    low, _, high = statistics.quantiles(ratios, n=4)
    print(f"numbers, hangs, pace     {100 * calls:9.3f} % of a step, their calls added up")
    print(
        f"  steps with and without {100 * watching:9.2f} % (half of the rounds within {100 * low - 100:.2f} to "
        f"{100 * high - 100:.2f})"
    )
    print(f"replica guard            {100 * guard:9.3f} % of a step")
    print(json.dumps({"step_seconds": step, "calls": calls, "watching": watching, "guard": guard, "ratios": ratios}))


if __name__ == "__main__":
    main()
