"""One of two ranks: steps of the real trainer, one trainer for each way, on one set of process groups."""

from __future__ import annotations

import argparse
import os
import time
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

from benchmarks.step_hiding.ways import WAYS, flags
from benchmarks.support.contest import Figures, serve
from megapar.arguments import parse
from megapar.core.comm.world import World
from megapar.core.device.pick import pick
from megapar.trainer import Trainer
from megapar.training.building import build

RANKS = 2


class Steps:
    """A request is the name of a way."""

    def __init__(self, rank: int, rendezvous: str) -> None:
        os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(RANKS))
        configs = {way: parse("moe", flags(way), dict(os.environ)) for way in WAYS}
        first = next(iter(configs.values()))
        self._world = World.start(first.grid, pick("cpu"), timedelta(minutes=10), rendezvous)
        corpus = build.make_corpus(first)
        self._trainers = {way: Trainer(config, self._world, corpus) for way, config in configs.items()}
        for trainer in self._trainers.values():
            trainer.start()

    def __call__(self, request: str) -> Figures:
        """Seconds of a step, of them those that the rank waited, by axis and kind, and the norm of the gradient."""
        trainer = self._trainers[request]
        dist.barrier()
        start = time.perf_counter()
        step = trainer.step()
        seconds = time.perf_counter() - start
        waits = {} if step.exposed is None else step.exposed.seconds()
        return {"seconds": seconds, "norm": float(step.norm), **waits}


def main() -> None:
    """Join the other rank and serve turns."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int)
    parser.add_argument("--rendezvous")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    serve(Steps(options.rank, options.rendezvous))


if __name__ == "__main__":
    main()
