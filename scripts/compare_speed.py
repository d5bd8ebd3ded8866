"""What ``scripts/compare_speed.sh`` runs: two trees train the quickstart in turns.

Each round runs both, first one and then the other, in changing order, so that both meet the same weather. A tree's
figure is the median over rounds of the median step, without the first steps of a run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WARM = 3  # steps in which buffers are made and kernels chosen


def main() -> int:
    """0 as fast, 1 slower than the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("here", type=Path)
    parser.add_argument("there", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iters", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--limit", type=float, default=1.10)
    parser.add_argument("flags", nargs="*", help="of the trainer")
    asked = parser.parse_args()
    trees = {"here": asked.here, "there": asked.there}
    steps: dict[str, list[float]] = {name: [] for name in trees}
    starts: dict[str, list[float]] = {name: [] for name in trees}
    for number in range(asked.rounds):
        for name in sorted(trees, reverse=bool(number % 2)):
            step, start = measure(trees[name], asked.here, asked.ranks, asked.iters, asked.flags)
            steps[name].append(step)
            starts[name].append(start)
        print(f"round {number + 1}: here {steps['here'][-1]:.4f} s, there {steps['there'][-1]:.4f} s", flush=True)
    here, there = (statistics.median(steps[name]) for name in trees)
    ratio = here / there
    first = {name: statistics.median(values) for name, values in starts.items()}
    print(f"step: here {here:.4f} s, there {there:.4f} s: here takes {ratio:.3f} x as long (limit {asked.limit:g})")
    print(f"launch to the end of the first step: here {first['here']:.1f} s, there {first['there']:.1f} s")
    result = {"step_seconds": {"here": here, "there": there}, "ratio": ratio, "first_step_seconds": first}
    print(json.dumps({**result, "rounds": asked.rounds, "slower": ratio > asked.limit}))
    return int(ratio > asked.limit)


def measure(tree: Path, config_of: Path, ranks: int, iters: int, flags: list[str]) -> tuple[float, float]:
    """(median seconds of a warm step, seconds from launch to the end of the first step) of one run of a tree."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        command = [sys.executable, "-m", "megapar.tools.main", "launch", "--nproc-per-node", str(ranks)]
        command += ["pretrain_moe.py", "--config", str(config_of / "configs" / "quickstart.yaml")]
        command += ["--train-iters", str(iters), "--eval-interval", "0", "--log-interval", "1"]
        command += ["--metrics-jsonl", str(metrics), *flags]
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        begun = time.time()
        run = subprocess.Popen(
            command, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert run.stdout is not None
        lines, first = [], float("nan")
        for line in run.stdout:
            lines.append(line)
            if first != first and line.startswith("iteration 1/"):
                first = time.time() - begun
        if run.wait():
            sys.exit(f"compare_speed: the run in {tree} failed:\n{''.join(lines[-20:])}")
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return statistics.median(record["iteration_seconds"] for record in records[WARM:]), first


if __name__ == "__main__":
    sys.exit(main())
