"""One stage of a pipeline of sleeping layers; ``run`` starts four of them."""

from __future__ import annotations

import argparse
import time
from itertools import permutations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.support.contest import Figures, serve
from megapar.core.comm.accounts import WaitMeter
from megapar.core.comm.axis import Axis
from megapar.core.device.base import Device
from megapar.core.pipeline.runner import Queues, Runner
from megapar.core.pipeline.schedule import make_schedule
from megapar.core.tensor_parallel.weight_gradients import DeferWgrad, WeightGradients

WIDTH = 256


class _Sleep(torch.autograd.Function):
    """Function that takes the same time for the forward, the gradient of the input and that of the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, defer_wgrad: DeferWgrad, seconds: float) -> Tensor:
        ctx.defer_wgrad, ctx.seconds = defer_wgrad, seconds
        time.sleep(seconds)
        return x + weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        def product() -> Tensor:
            time.sleep(ctx.seconds)
            return grads[0].sum(0)

        time.sleep(ctx.seconds)
        return grads[0], ctx.defer_wgrad(product), None, None


class SleepingLayers:
    """Chunks for the runner without computation and memory, and with exact times."""

    def __init__(self, last_chunk: int, seconds: float, weight_gradients: WeightGradients) -> None:
        self._last = last_chunk
        self._seconds = seconds
        self._weight = nn.Parameter(torch.zeros(WIDTH))
        self._defer_wgrad = weight_gradients.of(self._weight)

    def empty(self, micro_batch: int, chunk: int) -> Tensor:
        return torch.empty(4, WIDTH)

    def forward(self, chunk: int, micro_batch: int, x: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        x = torch.ones(4, WIDTH) if x is None else x
        y = _Sleep.apply(x, self._weight, self._defer_wgrad, self._seconds)
        return (None, y.sum()) if chunk == self._last else (y, None)

    def before_backward(self, chunk: int, micro_batch: int) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--rendezvous", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    world_size = options.world_size
    dist.init_process_group("gloo", init_method=options.rendezvous, rank=options.rank, world_size=world_size)
    axes = {}
    for ends in permutations(range(world_size), 2):  # all ranks make all groups
        group = dist.new_group(list(ends))
        if options.rank in ends:
            axes[ends] = Axis("pp", 2, ends.index(options.rank), group, ends, queue="{}>{}".format(*ends))
    queues = Queues(options.rank, axes, Device())

    def turn(request: str) -> Figures:
        """Run one step: ``SCHEDULE CHUNKS MICRO_BATCHES SECONDS``, the last of a stage's forward of a micro-batch."""
        name, chunks, micro_batches, seconds = request.split()
        schedule = make_schedule(name, world_size, int(chunks), int(micro_batches))
        store = WeightGradients()
        work = SleepingLayers(schedule.num_chunks - 1, float(seconds) / int(chunks), store)
        meter = WaitMeter()
        dist.barrier()
        start = time.perf_counter()
        Runner(schedule, queues, work, store if schedule.splits_backward else None, meter).run()
        return {"seconds": time.perf_counter() - start, "waited": sum(meter.take().seconds().values())}

    serve(turn)


if __name__ == "__main__":
    main()
