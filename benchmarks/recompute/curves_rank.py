"""One rank of a reduced GPT-117M; a turn is a whole short training run with other flags."""

from __future__ import annotations

import argparse
import gc
import os
import resource
from pathlib import Path

import torch

from benchmarks.recompute.rank import CONFIG
from benchmarks.support.contest import Figures, serve
from megapar.arguments import Config, parse
from megapar.core.comm.world import World
from megapar.core.device.base import Device
from megapar.core.device.pick import pick
from megapar.trainer import Trainer
from megapar.training.building import build

SETTLED = 10  # steps after which whatever is made once has been made


def main() -> None:
    """Serve ``DTYPE FLAGS``: losses by step, and what is held of memory for what is in use."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rendezvous")
    parser.add_argument("--device")
    parser.add_argument("--steps", type=int)
    parser.add_argument("flags", nargs="*")
    options = parser.parse_args()
    torch.set_num_threads(1)
    common = ["--config", str(CONFIG), "--device", options.device, "--train-iters", str(options.steps), *options.flags]
    common += ["--world-size", os.environ["WORLD_SIZE"]]
    device = pick(options.device, int(os.environ["LOCAL_RANK"]))

    def configure(dtype: str, *more: str) -> Config:
        return parse(
            "moe", [*common, "--dtype", dtype, "--log-interval", str(options.steps + 1), *more], dict(os.environ)
        )

    first = configure("fp32")
    world = World.start(first.grid, device, build.timeout(first), options.rendezvous)

    def turn(request: str) -> Figures:
        config = configure(*request.split())
        gc.collect()
        trainer = Trainer(config, world, build.make_corpus(config))
        trainer.start()
        held = _Held(device)
        for step in range(options.steps):
            trainer.monitor.add(trainer.step())
            if step + 1 == SETTLED:
                held.start()
        figures = held.ratio()
        records = trainer.monitor.flush()
        trainer.loader.close()
        trainer.job.sharding.wait()
        losses = {f"loss {record.iteration:06d}": record.lm_loss for record in records}
        return {**losses, **figures}

    serve(turn)


class _Held:
    """Memory that is held relative to memory that is in use.

    An accelerator's allocator reports both: reserved bytes over the peak of allocated ones. A CPU's does not, so what a
    process holds beyond its need is measured as growth: resident memory at the end over that after the first steps.
    """

    def __init__(self, device: Device) -> None:
        self._module = None if device.type == "cpu" else torch.get_device_module(device.type)
        self._resident = 0
        if self._module is not None:
            self._module.empty_cache()

    def start(self) -> None:
        """Mark the end of the warmup."""
        if self._module is None:
            self._resident = _resident_bytes()
        else:
            self._module.reset_peak_memory_stats()

    def ratio(self) -> Figures:
        """Return the ratio at the end of the run."""
        if self._module is None:
            now, before = _resident_bytes(), self._resident
            return {"held_ratio": now / before, "held_bytes": now}
        reserved, allocated = self._module.memory_reserved(), self._module.max_memory_allocated()
        return {"held_ratio": reserved / allocated, "held_bytes": reserved}


def _resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    main()
