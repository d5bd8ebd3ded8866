"""One contestant: megapar's own trainer, or the published class with torch's AdamW, at one depth on one thread.

Both read the same folder of weights and samples (``benchmarks/throughput/prepare.py``).
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path

import torch

from benchmarks.support.contest import Figures, serve
from benchmarks.support.steps import make_trainer
from benchmarks.throughput.ours_rank import RoundAndRound, flags
from benchmarks.throughput.peer_rank import batches, make_model, quiet
from benchmarks.throughput.shape import Shape, shallow
from megapar.arguments import parse
from megapar.trainer import Trainer

OURS, BARE, PEER = "megapar", "megapar without guards", "transformers"
OWN = "own"
# Flags of megapar's contestants. The guard of parameters and optimizer state has no counterpart in transformers.
FLAGS: Mapping[str, Sequence[str]] = {OURS: (), BARE: ("--state-digest-steps", "0")}
# Forms of AdamW of the published class. On a CPU torch's default is a loop over parameters; on a GPU it is foreach.
OPTIMIZERS: Mapping[str, Mapping[str, bool]] = {"fused": {"fused": True}, "foreach": {"foreach": True}, "default": {}}


def make_ours(shape: Shape, folder: Path, more: Sequence[str] = ()) -> Trainer:
    """Return megapar's trainer, with the samples of the folder. more: Additional flags."""
    config = parse("moe", [*flags(shape, folder, "cpu", "fp32", 1), *more], dict(os.environ))
    trainer = make_trainer(config, None)
    trainer.loader = RoundAndRound(trainer, shape, folder)
    return trainer


def make_peer(shape: Shape, folder: Path, experts: str) -> dict[str, Callable[[], object]]:
    """Return a training step of the published class for each optimizer. experts: its implementation, if it has any."""
    quiet()
    model = make_model(shape, folder, "cpu", experts if "moe_k" in shape.config else "")
    settings = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    data = cycle(batches(shape, folder, "cpu"))

    def step(optimizer: torch.optim.Optimizer) -> None:
        model(**next(data)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return {
        name: partial(step, torch.optim.AdamW(model.parameters(), **settings, **form))
        for name, form in OPTIMIZERS.items()
    }


def serve_steps(ways: Mapping[str, Callable[[], object]]) -> None:
    """Answer requests, "STEPS WAY", with the user, processor and wall time of one of that many steps."""

    def turn(request: str) -> Figures:
        number, way = request.split()
        steps, step = int(number), ways[way]
        start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
        for _ in range(steps):
            step()
        after, seconds = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter() - start
        user, system = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
        return {"user": user / steps, "processor": (user + system) / steps, "seconds": seconds / steps}

    serve(turn)


def main() -> None:
    """Build the model and serve turns."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--side", choices=(*FLAGS, PEER), required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--experts", default="")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    shape = shallow(options.model, options.layers)
    if options.side in FLAGS:
        serve_steps({OWN: make_ours(shape, options.folder, FLAGS[options.side]).step})
    serve_steps(make_peer(shape, options.folder, options.experts))


if __name__ == "__main__":
    main()
