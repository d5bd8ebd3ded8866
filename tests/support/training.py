"""Whole runs of the trainer for tests: flags in, what the run reported out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from megapar.arguments import parse
from megapar.core.comm.world import World
from megapar.core.device.base import Device
from megapar.trainer import Outcome, Trainer, train
from megapar.training.building.corpus import make_corpus
from tests.support.ranks import run_ranks

SMALL = {
    "moe": (
        *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--num-query-groups", "2"),
        *("--ffn-hidden-size", "48", "--seq-length", "16", "--vocab-size", "101", "--num-experts", "4"),
        *("--moe-ffn-hidden-size", "24", "--moe-router-topk", "2", "--first-k-dense", "1"),
        *("--moe-router-bias-update-rate", "0.01", "--init-std", "0.1"),
    ),
    "ernie": (
        *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--ffn-hidden-size", "64"),
        *("--seq-length", "32", "--vocab-size", "101", "--init-std", "0.1"),
    ),
}
COMMON = (
    *("--data-path", "mock", "--micro-batch-size", "1", "--global-batch-size", "8", "--lr", "1e-2"),
    *("--train-iters", "6", "--eval-interval", "0", "--log-interval", "100"),
)


def run(world_size: int, kind: str, *flags: str) -> Outcome:
    """Train a small model and return the outcome of rank 0. ``flags`` override those of the small model."""
    outcome = run_ranks(world_size, train_rank, kind, last_wins((*SMALL[kind], *COMMON), flags), group=False)[0]
    assert isinstance(outcome, Outcome)
    return outcome


def train_rank(rank: int, world_size: int, rendezvous: str, kind: str, flags: Sequence[str]) -> Outcome:
    """Train in a worker of run_ranks, which has set the variables of a rank."""
    return train(parse(kind, flags, dict(os.environ)), f"file://{rendezvous}", keep_records=True)


def make_trainer(kind: str, flags: Sequence[str], rendezvous: str | None = None, **options: Any) -> Trainer:
    """Return the trainer of this process, of run_ranks or alone, ready to step. ``options`` are the trainer's."""
    config = parse(kind, flags, {} if rendezvous is None else dict(os.environ))
    url = None if rendezvous is None else f"file://{rendezvous}"
    world = World.start(config.grid, Device(), timedelta(seconds=60), url)
    trainer = Trainer(config, world, make_corpus(config), **options)
    trainer.start()
    return trainer


def last_wins(base: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Return ``base`` (pairs of name and value) without the names in ``flags``, then ``flags``."""
    pairs = zip(base[::2], base[1::2], strict=True)
    return [token for name, value in pairs if name not in flags for token in (name, value)] + list(flags)
