"""One rank of megapar's own trainer; a turn is one optimizer step, or the step's collectives alone."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.sharding.shape import DECODER, TRAINING
from benchmarks.support.contest import Figures, serve
from megapar.arguments import parse
from megapar.core import transport
from megapar.core.device.pick import pick
from megapar.core.sharding.segment import Segment
from megapar.core.sharding.zero import ZeroSharding
from megapar.core.world import World
from megapar.trainer import Trainer
from megapar.training import build


class Turns:
    """``step``: seconds of a training step and, of it, of the optimizer. ``communicate``: of a step's collectives.

    Nothing else runs during the latter, which come one after the other: of it ``first`` is the first layer's gather and
    ``last`` its reduction, which have nothing to hide under.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._device = trainer.world.device
        self._updating = 0.0
        update = trainer.job.optimizer.step

        def timed(lr: float) -> None:
            self._updating = self._timed(lambda: update(lr))

        trainer.job.optimizer.step = timed  # type: ignore[method-assign]

    def __call__(self, request: str) -> Figures:
        """One turn."""
        if request == "communicate":
            return self._communicate()
        if self._trainer.world.grid.world_size > 1:
            dist.barrier()
        seconds = self._timed(self._trainer.step)
        return {"seconds": seconds, "optimizer": self._updating}

    def _communicate(self) -> Figures:
        sharding = self._trainer.job.sharding
        assert isinstance(sharding, ZeroSharding)
        sharding.wait()
        dist.barrier()
        reductions = [self._timed(lambda s=s: _reduce(s)) for s in reversed(sharding.segments)]  # type: ignore[misc]
        gathers = [self._timed(lambda s=s: _gather(s)) for s in sharding.segments]  # type: ignore[misc]
        return {"seconds": sum(reductions) + sum(gathers), "first": gathers[0], "last": reductions[-1]}

    def _timed(self, work: Callable[[], object]) -> float:
        self._device.synchronize()
        start = time.perf_counter()
        work()
        self._device.synchronize()
        return time.perf_counter() - start


def _reduce(segment: Segment) -> None:
    whole = torch.zeros(segment.shard.size * segment.row, device=segment.master.device)
    transport.reduce_scatter(whole.new_empty(segment.row), whole, segment.shard)


def _gather(segment: Segment) -> None:
    row = torch.zeros(segment.row, dtype=segment.dtype, device=segment.master.device)
    transport.all_gather(row.new_empty(segment.shard.size * segment.row), row, segment.shard)


def main() -> None:
    """Build the trainer from the model's flags and those behind ``--``, and serve turns."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rendezvous")
    parser.add_argument("--device")
    parser.add_argument("flags", nargs="*")
    options = parser.parse_args()
    torch.set_num_threads(1)
    flags = [*DECODER, *TRAINING, "--device", options.device, *options.flags]
    config = parse("moe", flags, dict(os.environ))
    corpus = build.make_corpus(config)
    device = pick(options.device, int(os.environ.get("LOCAL_RANK", "0")))
    serve(Turns(Trainer(config, World.start(config.grid, device, build.timeout(config), options.rendezvous), corpus)))


if __name__ == "__main__":
    main()
