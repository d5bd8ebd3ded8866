"""One rank of megapar's own trainer; a turn is one optimizer step of one sample."""

from __future__ import annotations

import argparse
import os

import torch

from benchmarks.support.contest import serve
from benchmarks.support.steps import make_trainer, timed
from benchmarks.tensor_parallel.shape import SHAPES
from megapar.arguments import parse


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
    serve(timed(make_trainer(config, options.rendezvous)))


if __name__ == "__main__":
    main()
