"""One rank of megapar's own trainer; a turn is a few optimizer steps, or the step's collectives alone."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from benchmarks.sharding.shape import DECODER, TIMED_STEPS, TRAINING
from benchmarks.support.contest import Figures, serve
from benchmarks.support.steps import make_trainer
from megapar.arguments import parse
from megapar.core.comm import collectives
from megapar.core.comm.meter import Waits
from megapar.core.sharding.bucket import Bucket
from megapar.core.sharding.zero import ZeroSharding
from megapar.trainer import Trainer


class Turns:
    """``step``: seconds of a training step and, of it, of waits by kind of collective.

    ``communicate``: seconds of each segment's gather (``gather UNITS``) and reduction (``reduce UNITS``) while nothing
    else runs: all of a kind are launched, and their time is shared out by size. ``marks``: of a step, when each unit
    begins (``needed UNIT``), has its gradients (``complete UNIT``), and when the backward is through (``backward``).
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._device = trainer.world.device

    def __call__(self, request: str) -> Figures:
        """Answer one request."""
        if request == "communicate":
            return self._communicate()
        if request == "marks":
            return self._mark()
        if self._trainer.world.grid.world_size > 1:
            dist.barrier()
        self._trainer.step()
        waits: list[Waits] = []
        seconds = [
            self._timed(lambda: waits.append(self._trainer.step().exposed or Waits())) for _ in range(TIMED_STEPS)
        ]
        shares = [{kind: value / TIMED_STEPS for kind, value in step.seconds().items()} for step in waits]
        kinds = {kind for share in shares for kind in share}
        means = {kind: sum(share.get(kind, 0.0) for share in shares) for kind in kinds}
        return {"seconds": sum(seconds) / TIMED_STEPS, **means}

    def _communicate(self) -> Figures:
        sharding = self._trainer.job.sharding
        assert isinstance(sharding, ZeroSharding)
        sharding.wait()
        segments = sharding.buckets
        dist.barrier()
        kinds = {
            "reduce": self._timed(partial(_fly, [_reduction(segment) for segment in reversed(segments)])),
            "gather": self._timed(partial(_fly, [_gather(segment) for segment in segments])),
        }
        total = sum(segment.row for segment in segments)
        shares = {" ".join(sorted(segment.units)): segment.row / total for segment in segments}
        found = {f"{kind} {units}": kinds[kind] * share for kind in kinds for units, share in shares.items()}
        return {"seconds": sum(kinds.values()), **found}

    def _mark(self) -> Figures:
        marks: Figures = {}
        start = time.perf_counter()

        def mark(name: str, *_: object) -> None:
            self._device.synchronize()
            marks[name] = time.perf_counter() - start

        units = self._trainer.job.model.units()
        hooks = [
            modules[0].register_forward_pre_hook(partial(mark, f"needed {unit}")) for unit, modules in units.items()
        ]
        for unit, modules in units.items():
            for parameter in (p for module in modules for p in module.parameters()):
                hooks.append(parameter.register_post_accumulate_grad_hook(partial(mark, f"complete {unit}")))
        marks["seconds"] = self._timed(self._trainer.step)
        marks["backward"] = max(seconds for name, seconds in marks.items() if name.startswith("complete"))
        for hook in hooks:
            hook.remove()
        return marks

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


def _reduction(segment: Bucket) -> Launch:
    whole = torch.zeros(segment.shard.size * segment.row, device=segment.master.device)
    piece, scratch = torch.zeros_like(whole[: segment.row]), torch.zeros_like(whole)
    return lambda: collectives.reduce_scatter(piece, whole, segment.shard, async_op=True, scratch=scratch)


def _gather(segment: Bucket) -> Launch:
    row = torch.zeros(segment.row, dtype=segment.dtype, device=segment.master.device)
    whole = row.new_zeros(segment.shard.size * segment.row)
    return lambda: collectives.all_gather(whole, row, segment.shard, async_op=True)


def main() -> None:
    """Build the trainer from the model's flags and those behind ``--``, and serve turns."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rendezvous")
    parser.add_argument("--device")
    parser.add_argument("flags", nargs="*")
    options = parser.parse_args()
    torch.set_num_threads(1)
    flags = [*DECODER, *TRAINING, "--device", options.device, *options.flags]
    serve(Turns(make_trainer(parse("moe", flags, dict(os.environ)), options.rendezvous)))


if __name__ == "__main__":
    main()
