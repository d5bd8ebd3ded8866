"""Real trainers of one process, at the sizes of a GPU day."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Literal

import numpy as np

from megapar.arguments import Config, parse
from megapar.core.comm.world import World
from megapar.core.device.accelerators import pick
from megapar.data.sampling.samples import Sample, Samples
from megapar.trainer import Trainer
from megapar.training.building.corpus import make_corpus
from megapar.training.building.parallelize import check_device
from scripts.gpu_day.day import Day

_RUN = "--data-path mock --train-iters 100000 --eval-interval 0 --log-interval 100000 --lr 1e-3 --seed 7"
_SIZES = {
    False: "--num-layers 4 --hidden-size 1024 --num-attention-heads 8 --seq-length 2048 --vocab-size 32000 "
    "--micro-batch-size 2",
    True: "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 512 "
    "--micro-batch-size 2",
}
_MODELS = {
    False: {
        "dense": "--num-experts 0 --num-query-groups 4 --ffn-hidden-size 2816",
        "moe": "--num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size 1024 --num-query-groups 4 --first-k-dense 0",
        "ernie": "--ffn-hidden-size 4096 --hidden-dropout 0 --attention-dropout 0",
    },
    True: {
        "dense": "--num-experts 0 --num-query-groups 2 --ffn-hidden-size 96",
        "moe": "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48 --num-query-groups 2 --first-k-dense 0",
        "ernie": "--ffn-hidden-size 128 --hidden-dropout 0 --attention-dropout 0",
    },
}

FIRST, WORDS = 7, 211  # ids in use; a prime, so that the walk below visits all of them
LEAP = 0.25

# Layers as wide, and micro-batches as large, as those of the dense race.
_REAL = (
    "--hidden-size 2048 --num-attention-heads 16 --num-query-groups 16 --ffn-hidden-size 6144 --seq-length 4096 "
    "--micro-batch-size 4 --num-layers"
)


@dataclass(frozen=True)
class Chain:
    """Samples in which each token determines the next one, except for a random quarter: a decoder learns them.

    Attributes:
        like: Samples with the same shapes.
    """

    like: Samples

    def __len__(self) -> int:
        return len(self.like)

    def __getitem__(self, number: int) -> Sample:
        """Return a sample, which depends only on its number."""
        sample = dict(self.like[number])
        length, draws = len(sample["tokens"]), np.random.default_rng(number)
        drawn, leaps = draws.integers(0, WORDS, length + 1), draws.random(length + 1) < LEAP
        walk = drawn.copy()
        for place in range(1, length + 1):
            if not leaps[place]:
                walk[place] = (3 * walk[place - 1] + 1) % WORDS
        sample["tokens"], sample["labels"] = walk[:-1] + FIRST, walk[1:] + FIRST
        return sample


def kind(model: str) -> Literal["moe", "ernie"]:
    """Return the kind of trainer for a model."""
    return "ernie" if model == "ernie" else "moe"


def flags(day: Day, model: str, more: str = "") -> list[str]:
    """Return the command line for one process; later flags take precedence."""
    line = f"{_RUN} --device {day.device} {_SIZES[day.small]} {_MODELS[day.small][model]} {more}"
    return line.split()


def real(day: Day, layers: int) -> str:
    """Return further flags for dense layers of a real size; none for a test."""
    return "" if day.small else f"{_REAL} {layers}"


def parsed(line: list[str], model: str) -> Config:
    """Return the configuration of one process. Raises ConfigError if it is refused."""
    return parse(kind(model), line, {"WORLD_SIZE": "1", "RANK": "0"})


@contextmanager
def trainer(
    config: Config, device: str, slices: int = 1, *, cross_layer: bool = False, learnable: bool = False
) -> Iterator[Trainer]:
    """Yield a trainer that is ready to step; close and free it afterwards.

    Args:
        config: Configuration of one process.
        device: "cuda" or "cpu".
        slices: Slices of AMPipe. The command line refuses them on one process, but its streams work.
        cross_layer: AMPipe overlaps across layers.
        learnable: Use learnable samples (``Chain``) instead of uniform tokens.
    """
    if slices > 1:
        ampipe = replace(config.ampipe, ampipe_degree=slices, ampipe_cross_layer=cross_layer)
        config = replace(config, ampipe=ampipe)
    where = pick(device)
    where.prepare_process()
    check_device(config, where)
    corpus = make_corpus(config)
    if learnable:
        corpus = replace(corpus, train=Chain(corpus.train))
    made = Trainer(config, World.start(config.grid, where, timedelta(minutes=5)), corpus)
    made.start()
    try:
        yield made
    finally:
        made.loader.close()
        del made
        gc.collect()


def losses(made: Trainer, steps: int) -> list[float]:
    """Return the mean loss per token of each step. The host waits once, at the end."""
    for _ in range(steps):
        made.monitor.add(made.step())
    made.stepper.resolve_pending()
    return [record.lm_loss for record in made.monitor.flush()]


def step_seconds(day: Day, made: Trainer, steps: int) -> float:
    """Return the mean seconds per step. A first step, which warms up, is the caller's."""
    day.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        made.monitor.add(made.step())
    day.synchronize()
    return (time.perf_counter() - began) / steps
