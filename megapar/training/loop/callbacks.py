"""Callbacks: the garbage collector, the watchdog, the profiler and those of the caller, around the steps of a run."""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from megapar.arguments import Config
from megapar.core.comm.world import World
from megapar.core.device.base import Device
from megapar.files.location import at
from megapar.health.hangs.sections import Sections
from megapar.health.hangs.watchdog import Watchdog
from megapar.health.stop.failure import WAITED, note
from megapar.rules.sections import origin_of_limit, section_limits
from megapar.training.reports.record import Record
from megapar.training.step.job import Job

TRACE = "trace.json"


class Callback(Protocol):
    """Called before and after every step, on every rank."""

    def before_step(self, iteration: int) -> None:
        """Run before step ``iteration``."""

    def after_step(self, iteration: int) -> None:
        """Run after step ``iteration``."""

    def close(self) -> None:
        """Release resources at the end of the run, also after a failure."""


class TrainerCallback(Callback):
    """Code of the caller around the steps of a run, on every rank. An exception ends the run.

    Subclass it, override what is needed, and pass instances to ``train(config, callbacks=[...])``.
    """

    def begin(self, trainer: Any) -> None:
        """Run once before the first step, after a checkpoint is loaded.

        ``trainer`` is the ``Trainer``: ``trainer.job.model`` is this rank's part of the model, ``trainer.progress`` the
        position in the data, ``trainer.config`` the configuration, and ``trainer.stop(reason)`` ends the run.
        """

    def before_step(self, iteration: int) -> None:
        """Run before step ``iteration``, counted from 1."""

    def after_step(self, iteration: int) -> None:
        """Run after step ``iteration``. The device may still be computing it."""

    def logged(self, record: Record) -> None:
        """Run for each step when its numbers are read from the device, every ``--log-interval`` steps."""

    def close(self) -> None:
        """Run at the end of the run, also after a failure."""


def check_instances(given: Sequence[Any], base: type[Any]) -> None:
    """Raise TypeError unless these are instances of ``base``, without methods by which Hugging Face calls them."""
    for one in given:
        if not isinstance(one, base):
            what = f"the class {one.__name__}" if isinstance(one, type) else f"a {type(one).__name__}"
            raise TypeError(f"train takes instances of subclasses of {base.__name__}, not {what}")
        if others := sorted(name for name in vars(type(one)) if name.startswith("on_")):
            methods = ", ".join(name for name in vars(base) if name[0] != "_")
            raise TypeError(f"{type(one).__name__}.{others[0]} is never called; a {base.__name__} has {methods}")


class Collector:
    """Callback that disables automatic collection between ``open`` and ``close`` and collects every ``interval`` steps.

    Objects that exist at ``open`` are frozen, so that no collection scans them: modules, tables and the model live
    until the end.
    """

    def __init__(self, interval: int) -> None:
        self._interval = interval

    def open(self) -> None:
        """Collect once, freeze all objects and disable automatic collection."""
        gc.collect()
        gc.freeze()
        gc.disable()

    def before_step(self, iteration: int) -> None:
        """Do nothing: no collection runs inside a step."""

    def after_step(self, iteration: int) -> None:
        """Collect if it is due, which is the same on every rank."""
        if iteration % self._interval == 0:
            gc.collect()

    def close(self) -> None:
        """Restore Python's automatic collection."""
        gc.unfreeze()
        gc.enable()


class Profile:
    """A callback that profiles the steps START to END, both included, of one rank.

    Args:
        folder: Folder for ``trace.json``. None if another rank records.
        settle: Waits for collectives in flight between steps, on all ranks. A collective that ends after the profiler
            was started or stopped is reported to a missing profiler, which crashes the process (torch 2.13).
    """

    def __init__(self, steps: str, folder: Path | None, device: Device, settle: Callable[[], None]) -> None:
        self._settle = settle
        first, _, last = steps.partition(":")
        self._first, self._last, self._folder = int(first), int(last), folder
        self._device = device
        self._profiler: Any = None

    def before_step(self, iteration: int) -> None:
        """Start the profiler before the first step."""
        if iteration == self._first:
            self._settle()
            if self._folder is None:
                return
            self._profiler = self._device.new_profiler()
            self._profiler.start()

    def after_step(self, iteration: int) -> None:
        """Write the trace after the last step."""
        if iteration == self._last:
            self._settle()
            self.close()

    def close(self) -> None:
        """Write the recorded steps, also if the run ends early. Warns if that fails: training continues."""
        profiler, self._profiler = self._profiler, None
        if profiler is None or self._folder is None:
            return
        profiler.stop()
        path = self._folder / TRACE
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
        except OSError as error:  # of the folder; torch reports the file itself, without an error
            message = f"--profile: {path} cannot be written: {error}. Training continues"
            warnings.warn(message, RuntimeWarning, stacklevel=2)


def make_watchdog(config: Config) -> Watchdog:
    """Return the watchdog, which ends a run that hangs and reports a slow one. Begins its start-up section."""
    options = config.reliability
    limits = section_limits(options.section_timeouts, options.step_timeout_seconds)
    watchdog = Watchdog(
        Sections(limits, compiled=_compiled),
        rank=int(os.environ.get("RANK") or "0"),
        origin_of_limit=lambda name: origin_of_limit(name, limits, options.section_timeouts),
        record_folder=at(config.checkpoint.save) if config.checkpoint.save else None,
        note_wait=lambda: note(ConnectionError(WAITED), os.environ),
    )
    watchdog.sections.begin("start-up")
    return watchdog


def connect(watchdog: Watchdog, world: World) -> None:
    """Pass the communicators and the store of the ranks to the watchdog, after the rendezvous."""
    launched = world.launched  # the numbers of logs and launchers
    watchdog.connect(
        launched[world.rank],
        world.grid.world_size,
        world.spare_store("watchdog"),
        world.recorder,
        lambda: {
            axis.communicator: [launched[rank] for rank in axis.ranks]
            for axis in (*world.axes(), *world.queues)
            if axis.size > 1
        },
    )


def _compiled() -> int:
    """Return the number of frames that torch has compiled, or started to compile, in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else sum(utils.counters["frames"].values())


def make_callbacks(config: Config, job: Job, watchdog: Watchdog, user_callbacks: Sequence[Callback]) -> list[Callback]:
    """Return the callbacks that the flags turn on, and the watchdog, ordered outermost to innermost.

    Those of the caller are outermost. The profiler is innermost, so that its trace contains only the step.
    """
    callbacks: list[Callback] = [*user_callbacks]
    if config.training.manual_gc == "on":
        collector = Collector(config.training.manual_gc_interval)
        collector.open()
        callbacks.append(collector)
    watchdog.start()
    callbacks.append(watchdog)
    if config.logging.profile is not None:
        callbacks.append(_make_profile(config.logging.profile, config, job))
    return callbacks


def _make_profile(steps: str, config: Config, job: Job) -> Profile:
    """Return the profiler. Rank 0 writes its trace next to the metrics, or to the working folder without them."""
    logging = config.logging
    named = Path(logging.metrics_file).parent if logging.metrics_file else Path(logging.tensorboard_dir or "")
    world = job.world
    return Profile(steps, named.absolute() if world.rank == 0 else None, world.device, job.sharding.wait)
