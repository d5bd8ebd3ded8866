"""Jobs of real processes with a fault in them, and what came of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.training import COMMON, SMALL, _last_wins

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 300
FP64 = ("--dtype", "fp64")


@dataclass(frozen=True)
class Fault:
    """See faulty.py."""

    kind: str
    rank: int = 0
    iteration: int = 0
    attempts: tuple[int, ...] = (0,)
    seed: int = 0
    seconds: float = 1.0


@dataclass(frozen=True)
class Ended:
    """How a job ended. losses: by iteration, of the metrics file. strikes: of the fault. starts: first steps after each
    start. output: everything it said.
    """

    status: int
    losses: dict[int, float]
    strikes: list[dict[str, Any]]
    starts: list[dict[str, Any]]
    output: str

    @property
    def lost_steps(self) -> list[int]:
        """Per strike that was followed by a start: steps that were done and had to be done again."""
        return [
            max(0, strike["finished"] - (start["first"] - 1))
            for strike, start in zip(self.strikes, self.starts[1:], strict=False)
        ]

    @property
    def seconds_to_next_step(self) -> list[float]:
        """Per strike: until the first step after it was done."""
        return [start["at"] - strike["at"] for strike, start in zip(self.strikes, self.starts[1:], strict=False)]


def flags_of(folder: Path, *flags: str) -> list[str]:
    """A small model with a checkpoint every second step."""
    metrics = ("--metrics-jsonl", str(folder / "metrics.jsonl"), "--log-interval", "1")
    saves = ("--save", str(folder / "c"), "--load", str(folder / "c"), "--save-interval", "2")
    return _last_wins((*SMALL["moe"], *COMMON), (*FP64, *metrics, *saves, *flags))


def run_job(
    folder: Path, world_size: int, fault: Fault, *flags: str, restarts: int = 0, launcher: Sequence[str] = ()
) -> Ended:
    """Launch, wait, and read what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    notes = folder / "strikes.jsonl"
    line = [sys.executable, "-m", "megapar.tools.main", "launch", "--nproc-per-node", str(world_size)]
    line += ["--max-restarts", str(restarts), "--stop-timeout", "2", *launcher, "tests/faults/faulty.py"]
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    spec = {**fault.__dict__, "notes": str(notes)}
    environ = {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MEGAPAR_TEST_FAULT": json.dumps(spec)}
    done = subprocess.run(
        [*line, *flags_of(folder, *flags)],
        env=environ,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=PATIENCE_SECONDS,
    )
    return Ended(
        done.returncode,
        {record["iteration"]: record["loss"] for record in _lines(folder / "metrics.jsonl")},
        _lines(notes),
        _lines(Path(f"{notes}.starts")),
        done.stdout,
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
