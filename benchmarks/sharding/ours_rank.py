"""One rank of megapar's own trainer; a turn is one optimizer step, or the step's collectives alone."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence

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

    Nothing else runs during the latter: all reductions are launched, then all gathers. ``first`` and ``last`` are the
    seconds of the first layer's gather and reduction by themselves, which have nothing to hide under.
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
        reductions = [_reduction(segment) for segment in reversed(sharding.segments)]
        gathers = [_gather(segment) for segment in sharding.segments]
        dist.barrier()
        seconds = self._timed(lambda: _fly(reductions)) + self._timed(lambda: _fly(gathers))
        first, last = (self._timed(lambda one=one: _fly([one])) for one in (gathers[0], reductions[-1]))  # type: ignore[misc]
        return {"seconds": seconds, "first": first, "last": last}

    def _timed(self, work: Callable[[], object]) -> float:
        self._device.synchronize()
        start = time.perf_counter()
        work()
        self._device.synchronize()
        return time.perf_counter() - start


Launch = Callable[[], dist.Work | None]


def _fly(launches: Sequence[Launch]) -> None:
    """Launch all, then wait for all."""
    for work in [launch() for launch in launches]:
        if work is not None:
            work.wait()


def _reduction(segment: Segment) -> Launch:
    whole = torch.zeros(segment.shard.size * segment.row, device=segment.master.device)
    piece, scratch = torch.zeros_like(whole[: segment.row]), torch.zeros_like(whole)
    return lambda: transport.reduce_scatter(piece, whole, segment.shard, async_op=True, scratch=scratch)


def _gather(segment: Segment) -> Launch:
    row = torch.zeros(segment.row, dtype=segment.dtype, device=segment.master.device)
    whole = row.new_zeros(segment.shard.size * segment.row)
    return lambda: transport.all_gather(whole, row, segment.shard, async_op=True)


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
