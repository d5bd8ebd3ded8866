"""Cost of each guard per step: the same small decoder trained without guards and with one, side by side.

    python -m benchmarks.guards.run

One process builds a trainer for each row of ``GUARDS`` and one without guards. In each round all of them run --steps
steps, in a new random order, so that other work of the machine affects all equally. A row is the median over the
rounds of its time relative to that without guards, with the quartiles, and the share of its steps that the guards'
own calls took. The share is visible even if steps differ by more than a guard costs; if the host runs ahead of its
device, it is the host's share. One process has no replicas: the cost of ``replicas`` is a digest of all parameters and
master weights, timed separately and divided by its interval.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch

from megapar.arguments import parse
from megapar.core.comm.world import World
from megapar.core.device.accelerators import pick
from megapar.core.sharding.replicas import replica_digest
from megapar.trainer import Trainer
from megapar.training.building.corpus import make_corpus

FLAGS = (
    *("--num-layers", "4", "--hidden-size", "256", "--num-attention-heads", "4", "--ffn-hidden-size", "704"),
    *("--vocab-size", "4096", "--num-experts", "0", "--data-path", "mock", "--eval-interval", "0", "--dtype", "fp32"),
    *("--seq-length", "256", "--micro-batch-size", "4", "--global-batch-size", "8"),
    *("--log-interval", "1000000", "--train-iters", "1000000"),
)
OFF = {"--state-digest-steps": "0", "--replica-check-interval": "0", "--recompute-check-interval": "0"}
NONE = "none"
# Beside the flags of ``OFF``, which a row's own replace.
GUARDS: dict[str, dict[str, str]] = {
    NONE: {},
    "state, auto": {"--state-digest-steps": "auto"},
    "state, all in every step": {"--state-digest-steps": "1"},
    "recompute, every 500 steps": {"--recompute-check-interval": "500"},
    "all, as by default": {"--state-digest-steps": "auto", "--recompute-check-interval": "500"},
}
WARM_UP = 6  # steps before the measured ones


def make(world: World, guard: dict[str, str]) -> Trainer:
    """Return a trainer after its warmup."""
    flags = [text for pair in {**OFF, **guard}.items() for text in pair]
    config = parse("moe", [*FLAGS, *flags], {})
    trainer = Trainer(config, world, make_corpus(config))
    trainer.start()
    print(f"{' '.join(flags)}:")
    steps(trainer, WARM_UP)  # says what the guard covers
    return trainer


def steps(trainer: Trainer, count: int) -> float:
    """Return the seconds of this many steps, with everything that follows them."""
    trainer.world.device.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        trainer.monitor.add(trainer.step())
        trainer._after_step()
    trainer.world.device.synchronize()
    return time.perf_counter() - start


def calls(trainer: Trainer, count: int) -> float:
    """Return the share of the time of this many steps that the guards' calls took."""
    names = ("votes", "apply_votes", "before_update", "after_update", "due", "check")
    spent = 0.0

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **more: Any) -> Any:
            nonlocal spent
            start = time.perf_counter()
            try:
                return call(*args, **more)
            finally:
                spent += time.perf_counter() - start

        return run

    with ExitStack() as stack:
        for name in names:
            stack.enter_context(patch.object(trainer.guards, name, watched(getattr(trainer.guards, name))))
        whole = steps(trainer, count)
    return spent / whole


def digest_seconds(trainer: Trainer) -> float:
    """Return the seconds of one digest of all parameters and master weights, as the replica guard computes it."""
    start = time.perf_counter()
    tensors = (*trainer.job.model.parameters(), *(shard.master for shard in trainer.job.sharding.master_shards))
    torch.stack([replica_digest(tensor) for tensor in tensors])
    trainer.world.device.synchronize()
    return time.perf_counter() - start


def main() -> None:
    """Print the table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    world = World.start(parse("moe", FLAGS, {}).grid, pick(options.device), timedelta(seconds=60))
    trainers = {name: make(world, guard) for name, guard in GUARDS.items()}
    draw, taken = random.Random(1), {name: list[float]() for name in trainers}
    for _ in range(options.rounds):
        for name in draw.sample(list(trainers), len(trainers)):
            taken[name].append(steps(trainers[name], options.steps))
    base = statistics.median(taken[NONE]) / options.steps
    digest = statistics.median(digest_seconds(trainers[NONE]) for _ in range(9))
    interval = parse("moe", FLAGS, {}).reliability.replica_check_interval
    found: dict[str, Any] = {"replicas": digest / interval / base}
    print(f"step without guards        {base:9.4f} s")
    print(f"{'replicas':26} {100 * found['replicas']:+9.2f} % ({digest:.4f} s every {interval} steps)")
    for name, seconds in taken.items():
        if name != NONE:
            low, middle, high = statistics.quantiles([a / b for a, b in zip(seconds, taken[NONE], strict=True)], n=4)
            own = calls(trainers[name], options.rounds)
            found[name] = {"steps": middle - 1, "calls": own}
            quartiles = f"{100 * low - 100:+.2f} to {100 * high - 100:+.2f}"
            print(f"{name:26} {100 * middle - 100:+9.2f} % ({quartiles}); its calls {100 * own:.2f} %")
    for trainer in trainers.values():
        trainer.loader.close()
    print(json.dumps({"step_seconds": base, "cost": found, "rounds": options.rounds}))


if __name__ == "__main__":
    main()
