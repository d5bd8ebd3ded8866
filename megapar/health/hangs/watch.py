"""The watchdog of a run, from its flags."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from megapar.arguments import Config
from megapar.core.comm.world import World
from megapar.health.hangs.sections import Sections
from megapar.health.hangs.watchdog import Watchdog
from megapar.rules.sections import origin_of_limit, section_limits


def make_watch(config: Config) -> Watchdog:
    """Return the watchdog, which ends a run that hangs and reports a slow one. Begins its start-up section."""
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
    """Pass the communicators and the store of the ranks to the watchdog, after the rendezvous."""
    watch.meet(
        world.rank,
        world.grid.world_size,
        world.spare_store("watchdog"),
        world.recorder,
        lambda: {axis.communicator: axis.ranks for axis in (*world.axes(), *world.queues) if axis.size > 1},
    )


def _compiled() -> int:
    """Return the number of frames that torch has compiled, or started to compile, in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else sum(utils.counters["frames"].values())
