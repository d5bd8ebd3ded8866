"""One rank of megapar's own trainer; a turn is one optimizer step of one sample."""

from __future__ import annotations

import argparse
import os
import time

import torch

from benchmarks.support.contest import Figures, serve
from benchmarks.tensor_parallel.shape import SHAPES
from megapar.arguments import parse
from megapar.core.device.pick import pick
from megapar.core.world import World
from megapar.trainer import Trainer
from megapar.training import build


def main() -> None:
    """Build the trainer from the shape's flags and those behind ``--``, and serve turns."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rendezvous")
    parser.add_argument("--device")
    parser.add_argument("--threads", type=int)
    parser.add_argument("flags", nargs="*")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    flags = [*SHAPES[options.device].flags(), "--device", options.device, "--data-path", "mock"]
    flags += ["--micro-batch-size", "1", "--global-batch-size", "1", "--train-iters", "1000", "--clip-grad", "0"]
    config = parse("moe", [*flags, "--log-interval", "1000", *options.flags], dict(os.environ))
    corpus = build.make_corpus(config)
    device = pick(options.device, int(os.environ.get("LOCAL_RANK", "0")))
    trainer = Trainer(config, World.start(config.grid, device, build.timeout(config), options.rendezvous), corpus)

    def step(request: str) -> Figures:
        device.synchronize()
        start = time.perf_counter()
        trainer.step()
        device.synchronize()
        return {"seconds": time.perf_counter() - start}

    serve(step)


if __name__ == "__main__":
    main()
