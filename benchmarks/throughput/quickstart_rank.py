"""One rank of the quickstart; a turn is one optimizer step. It uses only what every revision has."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import megapar
from benchmarks.support.contest import Figures, serve
from megapar.arguments import parse
from megapar.core.device.pick import pick
from megapar.core.world import World
from megapar.trainer import Trainer
from megapar.training import build


def main() -> None:
    """Build the trainer and serve turns."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rendezvous")
    parser.add_argument("--config")
    parser.add_argument("--expect", type=Path, help="the tree that megapar must be from")
    options = parser.parse_args()
    found = Path(megapar.__file__).resolve().parents[1]
    if found != options.expect:
        raise SystemExit(f"megapar is {found}, not {options.expect}")
    # Enough steps that it never ends by itself, and no files.
    flags = ["--config", options.config, "--train-iters", "100000", "--log-interval", "100000", "--eval-interval", "0"]
    config = parse("moe", flags, dict(os.environ))
    corpus = build.make_corpus(config)
    device = pick(config.runtime.device, int(os.environ["LOCAL_RANK"]))
    if hasattr(device, "prepare_process"):
        device.prepare_process()
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
