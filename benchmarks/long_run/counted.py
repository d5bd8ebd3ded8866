"""``pretrain_moe.py`` that notes how many bytes of Python objects it holds, at the steps of BENCHMARK_COUNT_AT.

BENCHMARK_COUNT_AT='{"at": [600, 2000], "file": "objects.jsonl"}' ... benchmarks/long_run/counted.py FLAGS
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.support.objects import object_bytes
from megapar.arguments import parse_or_exit
from megapar.trainer import Trainer, main

WANTED = json.loads(os.environ["BENCHMARK_COUNT_AT"])


def count() -> None:
    """Make the trainer count its objects after the wanted steps, on rank 0."""
    kept = Trainer.step

    def step(self: Trainer) -> Any:
        done = kept(self)
        if self.progress.iteration in WANTED["at"]:
            with Path(WANTED["file"]).open("a") as file:
                line = {"iteration": self.progress.iteration, "bytes": object_bytes()}
                file.write(json.dumps(line) + "\n")
        return done

    Trainer.step = step  # type: ignore[method-assign]


if __name__ == "__main__":
    if os.environ.get("RANK", "0") == "0":
        count()
    main(parse_or_exit("moe", sys.argv[1:]))
