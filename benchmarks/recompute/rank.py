"""One rank of GPT-117M that recomputes in any of the table's ways; a turn is one optimizer step."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch

from benchmarks.support.contest import Figures, serve
from benchmarks.support.steps import make_trainer
from megapar.arguments import parse
from megapar.core.device.base import Device
from megapar.core.device.memory_tracker import MemoryTracker
from megapar.trainer import Trainer
from megapar.training.building.parallelize import make_recompute

CONFIG = Path(__file__).parents[2] / "configs" / "gpt-117m.yaml"
UNIT = ("--recompute-interval", "1")
WAYS = {
    "none": (),
    "recompute": UNIT,
    "+ offload": (*UNIT, "--recompute-offload"),
    "+ partition": (*UNIT, "--recompute-partition"),
    "+ both": (*UNIT, "--recompute-offload", "--recompute-partition"),
}


def main() -> None:
    """Build the trainer, and serve ``time WAY`` and ``memory WAY``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rendezvous")
    parser.add_argument("--device")
    parser.add_argument("--ways", nargs="+")
    parser.add_argument("flags", nargs="*")
    options = parser.parse_args()
    torch.set_num_threads(1)
    flags = ["--config", str(CONFIG), "--data-path", "mock", "--device", options.device, *options.flags]
    flags += ["--world-size", os.environ["WORLD_SIZE"]]
    configs = {way: parse("moe", [*flags, *WAYS[way]], dict(os.environ)) for way in options.ways}
    config = configs["none"]
    trainer = make_trainer(config, options.rendezvous)
    job, world, device = trainer.job, trainer.world, trainer.world.device
    recomputes = {way: make_recompute(configs[way], world, job.comm) for way in configs}

    def turn(request: str) -> Figures:
        what, _, way = request.partition(" ")
        job.model.recompute = recomputes[way]
        if what == "time":
            device.synchronize()
            start, busy = time.perf_counter(), time.process_time()
            trainer.step()
            device.synchronize()
            return {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - busy}
        saved_inputs = None if job.model.recompute is None else job.model.recompute.saved_inputs
        return {"device": _peak(trainer, device), "host": 0 if saved_inputs is None else saved_inputs.host_bytes}

    serve(turn)


def _peak(trainer: Trainer, device: Device) -> float:
    """Return the most bytes that a step holds in addition to what is held between steps.

    On a CPU these are bytes of storages made in the step, gradients among them; host memory exists from earlier ones.
    """
    if device.type == "cpu":
        with MemoryTracker() as tracker:
            trainer.step()
        return tracker.peak_bytes
    module = torch.get_device_module(device.type)
    trainer.job.sharding.begin_step()  # frees the last step's gradients
    module.reset_peak_memory_stats()
    before = module.memory_allocated()
    trainer.step()
    device.synchronize()
    return float(module.max_memory_allocated() - before)


if __name__ == "__main__":
    main()
