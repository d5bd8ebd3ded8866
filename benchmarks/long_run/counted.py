"""``pretrain_moe.py`` that notes what rank 0 has in use, every few steps.

BENCHMARK_COUNTED='{"every": 40, "file": "counted.jsonl"}' ... benchmarks/long_run/counted.py FLAGS

A line of the file has the iteration, and what the functions of ``benchmarks/support/heap.py`` return. It is written
before a step that is saved, when nothing of the last save is left.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.support.heap import bytes_outside_heap, live_bytes, python_blocks
from megapar.arguments import parse_or_exit
from megapar.trainer import Trainer, main

WANTED = json.loads(os.environ["BENCHMARK_COUNTED"])


def count() -> None:
    """Make the trainer note what is in use, on rank 0."""
    kept = Trainer.step

    def step(self: Trainer) -> Any:
        done = kept(self)
        iteration = self.progress.iteration
        if iteration % WANTED["every"] == WANTED["every"] - 1:
            line = {"iteration": iteration, "python_blocks": python_blocks()}
            line |= {"live_bytes": live_bytes(), "bytes_outside_heap": bytes_outside_heap()}
            with Path(WANTED["file"]).open("a") as file:
                file.write(json.dumps(line) + "\n")
        return done

    Trainer.step = step  # type: ignore[method-assign]


if __name__ == "__main__":
    if os.environ.get("RANK", "0") == "0":
        count()
    main(parse_or_exit("moe", sys.argv[1:]))
