"""Callbacks: the garbage collector, the watchdog, the profiler and those of the caller, around the steps of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from megapar.arguments import Config
from megapar.health.hangs.watchdog import Watchdog
from megapar.training.loop.manual_gc import Collector
from megapar.training.reports.profile import Profile
from megapar.training.step.job import Job


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


class TrainerCallback(Callback):
    """Code of the caller around the steps of a run, on every rank. An exception ends the run.

    Subclass it, override what is needed, and pass instances to ``train(config, callbacks=[...])``.
    """

    def begin(self, trainer: Any) -> None:
        """Run once before the first step, after a checkpoint is loaded.

        ``trainer`` is the ``Trainer``: ``trainer.job.model`` is this rank's part of the model, ``trainer.progress`` the
        position in the data, ``trainer.config`` the configuration.
        """

    def before_step(self, iteration: int) -> None:
        """Run before step ``iteration``, counted from 1."""

    def after_step(self, iteration: int) -> None:
        """Run after step ``iteration``. The device may still be computing it."""

    def close(self) -> None:
        """Run at the end of the run, also after a failure."""


def make_callbacks(config: Config, job: Job, watch: Watchdog, own: Sequence[Callback] = ()) -> list[Callback]:
    """Return the callbacks that the flags turn on, and the watchdog, ordered outermost to innermost.

    Those of the caller, ``own``, are outermost. The profiler is innermost, so that its trace contains only the step.
    """
    callbacks: list[Callback] = [*own]
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
    named = Path(logging.metrics_file).parent if logging.metrics_file else Path(logging.tensorboard_dir or "")
    world = job.world
    return Profile(steps, named.absolute() if world.rank == 0 else None, world.device, job.sharding.wait)
