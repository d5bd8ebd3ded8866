"""``pretrain_moe.py`` that notes how long Muon's iterations take in each step.

BENCHMARK_ITERATIONS=FILE ... benchmarks/newton_schulz/rank.py FLAGS

Each rank adds a line per step to FILE: rank, step and seconds in ``orthogonalize``.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any
from unittest.mock import patch

from torch import Tensor

from megapar.arguments import parse_or_exit
from megapar.core.optimizer.muon import orthogonalize
from megapar.trainer import main
from megapar.training.loop.callbacks import TrainerCallback


class Iterations(TrainerCallback):
    """Adds up the seconds of a step's iterations, on a device whose calls return when they are done."""

    def __init__(self, path: str) -> None:
        self._path, self._seconds = path, 0.0

    def orthogonalize(self, *args: Any) -> Tensor:
        """Call the function of this name, and count its time."""
        start = time.perf_counter()
        made = orthogonalize(*args)
        self._seconds += time.perf_counter() - start
        return made

    def after_step(self, iteration: int) -> None:
        """Write a line, and begin again."""
        line = {"rank": int(os.environ["RANK"]), "iteration": iteration, "seconds": self._seconds}
        with open(self._path, "a", encoding="ascii") as file:
            file.write(json.dumps(line) + "\n")
        self._seconds = 0.0


if __name__ == "__main__":
    iterations = Iterations(os.environ["BENCHMARK_ITERATIONS"])
    with patch("megapar.core.optimizer.muon.orthogonalize", iterations.orthogonalize):
        main(parse_or_exit("moe"), callbacks=[iterations])
