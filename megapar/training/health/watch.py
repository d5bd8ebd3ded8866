"""The watchdog of a run as the flags say it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from megapar.arguments import Config
from megapar.core.comm.world import World
from megapar.core.health.sections import Sections
from megapar.core.health.watchdog import Watchdog
from megapar.rules.sections import origin_of_limit, section_limits


def make_watch(config: Config) -> Watchdog:
    """What ends a run that hangs, and tells of one that is unusually slow; this rank is starting up from now on."""
    options = config.reliability
    limits = section_limits(options.section_timeouts, options.step_timeout_seconds)
    watch = Watchdog(
        Sections(limits, compiled=_compiled),
        rank=int(os.environ.get("RANK", "0")),
        named=lambda name: origin_of_limit(name, limits, options.section_timeouts),
        records=Path(config.checkpoint.save) if config.checkpoint.save else None,
    )
    watch.sections.begin("start-up")
    return watch


def meet(watch: Watchdog, world: World) -> None:
    """The ranks have found each other."""
    watch.meet(
        world.rank,
        world.grid.world_size,
        world.spare_store("watchdog"),
        world.recorder,
        lambda: {axis.communicator: axis.ranks for axis in (*world.axes(), *world.queues) if axis.size > 1},
    )


def _compiled() -> int:
    """How many pieces of Python torch has compiled, or begun to, in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else sum(utils.counters["frames"].values())
