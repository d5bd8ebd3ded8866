"""Cost of the recompute check: a check and a step in turns, and the check divided by its interval.

    python -m benchmarks.guards.recheck

One process has no neighbour whose micro-batch it could run. If ranks swap them, a check takes 1.5 times as long.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from datetime import timedelta

from megapar.arguments import parse
from megapar.core.comm.world import World
from megapar.core.device.pick import pick
from megapar.health.corruption.recompute_guard import RecomputeGuard
from megapar.trainer import Trainer
from megapar.training.building.corpus import make_corpus

FLAGS = (
    *("--num-layers", "4", "--hidden-size", "256", "--num-attention-heads", "4", "--ffn-hidden-size", "704"),
    *("--seq-length", "256", "--vocab-size", "4096", "--micro-batch-size", "4", "--global-batch-size", "4"),
    *("--num-experts", "0", "--data-path", "mock", "--eval-interval", "0", "--log-interval", "10", "--dtype", "fp32"),
    *("--train-iters", "1000000"),
)
ALWAYS = ("--recompute-check-interval", "1")


def step_seconds(trainer: Trainer) -> float:
    """Return the seconds of one step."""
    start = time.perf_counter()
    trainer.monitor.add(trainer.step())
    trainer.world.device.synchronize()
    return time.perf_counter() - start


def check_seconds(trainer: Trainer) -> float:
    """Return the seconds of one check."""
    start = time.perf_counter()
    trainer.guards.check(trainer.guards.due(trainer.progress.iteration), trainer.progress.iteration)
    trainer.world.device.synchronize()
    return time.perf_counter() - start


def main() -> None:
    """Print the ratio and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    config = parse("moe", [*FLAGS, *ALWAYS, "--replica-check-interval", "0"], {})
    world = World.start(config.grid, pick(options.device), timedelta(seconds=60))
    trainer = Trainer(config, world, make_corpus(config))
    trainer.start()
    for _ in range(3):
        step_seconds(trainer)
        check_seconds(trainer)
    rounds = [(step_seconds(trainer), check_seconds(trainer)) for _ in range(options.rounds)]
    trainer.loader.close()
    step = statistics.median(step for step, _ in rounds)
    low, ratio, high = statistics.quantiles([check / step for step, check in rounds], n=4)
    interval = parse("moe", FLAGS, {}).reliability.recompute_check_interval
    swapped = 1.5 * ratio
    print(f"step                     {step:9.4f} s of one micro-batch")
    print(f"check                    {ratio:9.2f} steps (half of the rounds within {low:.2f} to {high:.2f})")
    print(f"recompute check          {100 * ratio / interval:9.3f} % of a step, every {interval} steps")
    print(f"  with swapped batches   {100 * swapped / interval:9.3f} %")
    print(json.dumps({"step_seconds": step, "check_steps": ratio, "cost": ratio / interval}))
    assert any(isinstance(guard, RecomputeGuard) and guard.enabled for guard in trainer.guards._guards)


if __name__ == "__main__":
    main()
