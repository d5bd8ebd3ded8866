"""What goes with the steps of a run without being a part of them."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from megapar.arguments import Config
from megapar.core.health.manual_gc import Collector
from megapar.core.health.watchdog import Watchdog
from megapar.training.building.job import Job
from megapar.training.reports.profile import Profile


class Callback(Protocol):
    """Sees every step begin and end, on every rank alike."""

    def before_step(self, iteration: int) -> None:
        """Step number ``iteration`` is about to begin."""
        ...

    def after_step(self, iteration: int) -> None:
        """It has ended."""
        ...

    def close(self) -> None:
        """The run is over, or has failed."""
        ...


def make_companions(config: Config, job: Job, watch: Watchdog) -> list[Callback]:
    """The watchdog, and others as the flags say.

    The one that looks most closely at a step is the last to see it begin and the first to see it end.
    """
    companions: list[Callback] = []
    if config.training.manual_gc == "on":
        collector = Collector(config.training.manual_gc_interval)
        collector.open()
        companions.append(collector)
    watch.start()
    companions.append(watch)
    if config.logging.profile is not None:
        companions.append(_make_profile(config.logging.profile, config, job))
    return companions


def _make_profile(steps: str, config: Config, job: Job) -> Profile:
    """The profiler, which records on rank 0, beside the metrics, or without them in the working folder."""
    logging = config.logging
    named = Path(logging.metrics_jsonl).parent if logging.metrics_jsonl else Path(logging.tensorboard_dir or "")
    world = job.world
    return Profile(steps, named.absolute() if world.rank == 0 else None, world.device, job.sharding.wait)
