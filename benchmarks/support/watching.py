"""Shared parts of the benchmarks of guards and of watching: the watched model, and the time spent in calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from megapar.core.sharding.replicas import replica_digest
from megapar.trainer import Trainer

SMALL = (
    *("--num-layers", "4", "--hidden-size", "256", "--num-attention-heads", "4", "--ffn-hidden-size", "704"),
    *("--vocab-size", "4096", "--num-experts", "0", "--data-path", "mock", "--eval-interval", "0", "--dtype", "fp32"),
)


@contextmanager
def timed(calls: Iterable[tuple[object, str]]) -> Iterator[list[float]]:
    """Collect the seconds spent in these calls, including the cost of timing them, in a list of one."""
    spent = [0.0]

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **more: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **more)
            finally:
                spent[0] += time.perf_counter() - start

        return run

    with ExitStack() as stack:
        for owner, name in calls:
            stack.enter_context(patch.object(owner, name, watched(getattr(owner, name))))
        yield spent


def look_seconds(trainer: Trainer) -> float:
    """Return the seconds of one look at all parameters and master weights, as the replica guard takes it."""
    start = time.perf_counter()
    held = (*trainer.job.model.parameters(), *(shard.master for shard in trainer.job.sharding.master_shards))
    torch.stack([replica_digest(tensor) for tensor in held])
    trainer.world.device.synchronize()
    return time.perf_counter() - start
