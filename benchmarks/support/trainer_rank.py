"""One rank of a contest between layouts: steps of the real trainer, one trainer for each row, on one set of groups.

``command`` is its command line. The module of the rows also has ``flags(row)``, the flags of one of them.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from benchmarks.support.contest import Figures, serve
from megapar.arguments import parse
from megapar.core.comm.world import World
from megapar.core.device.accelerators import pick
from megapar.trainer import Trainer
from megapar.training.building.corpus import make_corpus


class Steps:
    """Steps by request, the name of a row."""

    def __init__(self, configured: Mapping[str, Sequence[str]], rendezvous: str) -> None:
        configs = {row: parse("moe", flags, dict(os.environ)) for row, flags in configured.items()}
        first = next(iter(configs.values()))
        self._world = World.start(first.grid, pick("cpu"), timedelta(minutes=10), rendezvous)
        corpus = make_corpus(first)
        self._trainers = {row: Trainer(config, self._world, corpus) for row, config in configs.items()}
        for trainer in self._trainers.values():
            trainer.start()

    def __call__(self, request: str) -> Figures:
        """Return the seconds of a step, those that the rank waited by "axis/kind", and the norm of the gradient."""
        trainer = self._trainers[request]
        dist.barrier()
        start = time.perf_counter()
        step = trainer.step()
        seconds = time.perf_counter() - start
        waits = {} if step.exposed is None else step.exposed.seconds()
        return {"seconds": seconds, "norm": float(step.norm), **waits}


def command(rows: str, ranks: int, rendezvous: str, *, node: int = 1) -> list[str]:
    """Return the command line of a rank, to which its number is appended. rows: as in ``step_hiding.ways:WAYS``."""
    line = [sys.executable, "-m", "benchmarks.support.trainer_rank", "--rows", f"benchmarks.{rows}"]
    return [*line, "--ranks", str(ranks), "--node", str(node), "--rendezvous", rendezvous, "--rank"]


def main() -> None:
    """Join the other ranks and serve turns."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", help="MODULE:NAME")
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--node", type=int, default=1, help="ranks of a node")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--rendezvous")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    place = {"RANK": options.rank, "LOCAL_RANK": options.rank % options.node, "WORLD_SIZE": options.ranks}
    os.environ.update({name: str(number) for name, number in place.items()})
    module, _, name = options.rows.partition(":")
    rows = importlib.import_module(module)
    serve(Steps({row: rows.flags(row) for row in getattr(rows, name)}, options.rendezvous))


if __name__ == "__main__":
    main()
