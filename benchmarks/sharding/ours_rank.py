"""One rank of megapar's own trainer; a turn is a few optimizer steps."""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist

from benchmarks.sharding.shape import DECODER, TIMED_STEPS, TRAINING
from benchmarks.support.contest import Figures, serve
from benchmarks.support.steps import make_trainer, timed
from megapar.arguments import parse


def main() -> None:
    """Build the trainer from the model's flags and those behind ``--``, and serve turns."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rendezvous")
    parser.add_argument("--device")
    parser.add_argument("flags", nargs="*")
    options = parser.parse_args()
    torch.set_num_threads(1)
    flags = [*DECODER, *TRAINING, "--device", options.device, *options.flags]
    trainer = make_trainer(parse("moe", flags, dict(os.environ)), options.rendezvous)
    step = timed(trainer)

    def turn(request: str) -> Figures:
        if trainer.world.grid.world_size > 1:
            dist.barrier()
        trainer.step()
        return {"seconds": sum(step(request)["seconds"] for _ in range(TIMED_STEPS)) / TIMED_STEPS}

    serve(turn)


if __name__ == "__main__":
    main()
