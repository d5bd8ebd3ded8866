"""Optimizer steps of megapar's own trainer as turns."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta

from benchmarks.support.contest import Figures
from megapar.arguments import Config
from megapar.core.comm.world import World
from megapar.core.device.accelerators import pick
from megapar.trainer import Trainer
from megapar.training.building.corpus import make_corpus


def make_trainer(config: Config, rendezvous: str | None) -> Trainer:
    """Return the trainer of this rank. Errors of the data are raised before there is a process group."""
    corpus = make_corpus(config)
    device = pick(config.runtime.device, int(os.environ.get("LOCAL_RANK", "0")))
    device.prepare_process()
    trainer = Trainer(
        config,
        World.start(config.grid, device, timedelta(minutes=config.parallel.distributed_timeout_minutes), rendezvous),
        corpus,
    )
    trainer.start()
    return trainer


def timed(trainer: Trainer) -> Callable[[str], Figures]:
    """Return the function that runs one step for any request, with its seconds."""
    device = trainer.world.device

    def step(request: str) -> Figures:
        device.synchronize()
        start = time.perf_counter()
        trainer.step()
        device.synchronize()
        return {"seconds": time.perf_counter() - start}

    return step
