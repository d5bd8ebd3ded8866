"""Callbacks: the garbage collector, the watchdog and the profiler, which run around the steps of a run.

Tested in ``tests/test_trainer.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from megapar.arguments import Config
from megapar.core.health.manual_gc import Collector
from megapar.core.health.watchdog import Watchdog
from megapar.training.building.job import Job
from megapar.training.reports.profile import Profile


class Callback(Protocol):
    """Called before and after every step, on every rank."""

    def before_step(self, iteration: int) -> None:
        """Run before step ``iteration``."""
        ...

    def after_step(self, iteration: int) -> None:
        """Run after step ``iteration``."""
        ...

    def close(self) -> None:
        """Release resources at the end of the run, also after a failure."""
        ...


def make_callbacks(config: Config, job: Job, watch: Watchdog) -> list[Callback]:
    """Return the callbacks that the flags turn on, and the watchdog, ordered outermost to innermost.

    The profiler is innermost, so that its trace contains only the step.
    """
    callbacks: list[Callback] = []
    if config.training.manual_gc == "on":
        collector = Collector(config.training.manual_gc_interval)
        collector.open()
        callbacks.append(collector)
    watch.start()
    callbacks.append(watch)
    if config.logging.profile is not None:
        callbacks.append(_make_profile(config.logging.profile, config, job))
    return callbacks


def _make_profile(steps: str, config: Config, job: Job) -> Profile:
    """Return the profiler. Rank 0 writes its trace next to the metrics, or to the working folder without them."""
    logging = config.logging
    named = Path(logging.metrics_jsonl).parent if logging.metrics_jsonl else Path(logging.tensorboard_dir or "")
    world = job.world
    return Profile(steps, named.absolute() if world.rank == 0 else None, world.device, job.sharding.wait)
