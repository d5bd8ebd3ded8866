"""Seconds from kill -9 of a rank to the next step, with ranks forked from a warm process and started one by one.

    python -m benchmarks.reliability.restart

A job of two ranks on one node trains a small decoder with a checkpoint every second step. --kills times, a random rank
is killed at a random time after a step. The time ends when the log has the next step. It includes the launcher's
detection, the end of the other rank, the rendezvous, the process groups, the load of the checkpoint and the step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from megapar.tools.launcher.stopper import children

ROOT = Path(__file__).parents[2]
STEP = re.compile(r" iteration \d+/")
FLAGS = (
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--ffn-hidden-size", "128"),
    *("--seq-length", "32", "--vocab-size", "256", "--micro-batch-size", "1", "--global-batch-size", "4"),
    *("--num-experts", "0", "--data-path", "mock", "--eval-interval", "0", "--log-interval", "1", "--dtype", "fp32"),
    *("--sharding-degree", "2", "--train-iters", "1000000", "--save-interval", "2", "--keep", "2"),
)


def seconds_to_next_step(kills: int, seed: int, *launcher: str) -> list[float]:
    """Return, for each kill, the seconds to the next step."""
    draw = random.Random(seed)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "megapar.tools.main", "launch", "--nproc-per-node", "2", "--stop-timeout", "5"]
    line += ["--max-restarts", str(kills), *launcher, "pretrain_moe.py", *FLAGS]
    with tempfile.TemporaryDirectory() as folder:
        line += ["--save", folder, "--load", folder]
        pipe, merged = subprocess.PIPE, subprocess.STDOUT
        with subprocess.Popen(line, cwd=ROOT, env=environ, stdout=pipe, stderr=merged, text=True) as job:
            try:
                return list(_kills(job, kills, draw))
            finally:
                job.send_signal(signal.SIGTERM)
                job.communicate()


def _kills(job: subprocess.Popen[str], kills: int, draw: random.Random) -> Iterator[float]:
    assert job.stdout is not None
    _read_to_step(job.stdout)
    for _ in range(kills):
        for _ in range(draw.randint(3, 8)):
            _read_to_step(job.stdout)
        ranks = sorted(pid for pid in children(job.pid) if os.getsid(pid) == pid)
        begun = time.perf_counter()
        os.kill(draw.choice(ranks), signal.SIGKILL)
        for line in job.stdout:
            if "; restarting, " in line:
                break
        _read_to_step(job.stdout)
        yield time.perf_counter() - begun


def _read_to_step(said: IO[str]) -> None:
    for line in said:
        if STEP.search(line):
            return
    raise RuntimeError("the job has ended")


def main() -> None:
    """Print a line for each way and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=20)
    options = parser.parse_args()
    found = {}
    for name, flag in (("warm", "--warm-start"), ("one by one", "--no-warm-start")):
        found[name] = seconds_to_next_step(options.kills, options.seed, flag)
        low, median, high = min(found[name]), statistics.median(found[name]), max(found[name])
        print(f"{name:<11} median {median:5.2f} s of {options.kills} kills, {low:.2f} to {high:.2f} s", flush=True)
    print(json.dumps({"load": os.getloadavg()[0], "seconds": found}))


if __name__ == "__main__":
    main()
