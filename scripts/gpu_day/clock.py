"""Seconds and clock of each step of a dense model, after the first: does the GPU lower its clock, and in which steps?

The host waits for the device after each step, as in a race.
"""

from __future__ import annotations

import time
from functools import partial
from statistics import median

from scripts.gpu_day.clocks import sampled
from scripts.gpu_day.day import Answer, Day
from scripts.gpu_day.trainers import flags, parsed, real, trainer

STEPS, SMALL_STEPS = 30, 5
SLOW = 1.04  # times the median of all steps


def run(day: Day) -> None:
    """Time the steps."""
    day.attempt("steps", partial(steps, day), least=3.0)


def steps(day: Day) -> Answer:
    """Return seconds, median clock and highest power of each step, and the numbers of slow steps, from 1."""
    config = parsed(flags(day, "dense", real(day, layers=12)), "dense")
    times: list[tuple[float, float]] = []
    with trainer(config, day.device) as made, sampled(day.on_gpu) as clocks:
        for _ in range(SMALL_STEPS if day.small else STEPS):
            day.synchronize()
            began = time.perf_counter()
            made.monitor.add(made.step())
            day.synchronize()
            times.append((began, time.perf_counter()))
            if len(times) > 1 and day.seconds_left < 0.0:
                break
    seconds = [end - begin for begin, end in times]
    within = [clocks.between(*period) for period in times]
    usual = median(seconds[1:])
    figures = {
        "seconds": seconds,
        "slow_steps": [number for number, took in enumerate(seconds, 1) if number > 1 and took > SLOW * usual],
        "sm_mhz": [median(sample.sm_mhz for sample in some) if some else None for some in within],
        "watts": [max(sample.watts for sample in some) if some else None for some in within],
    }
    return Answer(None, figures | ({"not_to_be_had": clocks.lacks} if clocks.lacks else {}))
