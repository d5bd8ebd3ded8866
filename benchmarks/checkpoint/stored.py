"""Seconds that a checkpoint takes to S3 and back, relative to ``rclone copyto`` of the same bytes to the same server.

    python -m benchmarks.checkpoint.stored --megabytes 1024 --rounds 3

The server is ``rclone serve s3`` on this machine, with its files on a disk. A load verifies sizes alone.
Also reported are how much the memory of this process grew in a save, above the state, and the stall of a background
save under a second of compute (``benchmarks.checkpoint.run``).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.checkpoint.run import LAYOUT, compute, make_state, seconds
from megapar.checkpoints.format.shards import Shard
from megapar.checkpoints.save_load import collective_io
from megapar.checkpoints.save_load.background import Background
from megapar.core.device.accelerators import pick
from megapar.files.location import Location
from tests.support.buckets import asked_at, environ_of, new_bucket, rclone

MEBIBYTE = 1 << 20


def client(endpoint: str) -> dict[str, str]:
    """Return the variables by which rclone, as a client, finds the server as ``there:``."""
    named = {"TYPE": "s3", "PROVIDER": "Rclone", "ENV_AUTH": "true", "ENDPOINT": endpoint, "FORCE_PATH_STYLE": "true"}
    return {
        **os.environ,
        **environ_of(endpoint),
        **{f"RCLONE_CONFIG_THERE_{name}": each for name, each in named.items()},
    }


def peak_bytes() -> int:
    """Return the most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def stall_of(checkpoint: Location, state: dict[str, Shard]) -> float:
    """Return the seconds by which a background save delays the update after a second of compute."""
    background, stall = Background(pick("cpu")), 0.0
    for number in range(2):  # the first one takes the memory for the copy
        place = checkpoint.with_name(f"{checkpoint.name}-{number}")
        background.begin(
            state,
            lambda copies: collective_io.save(place, copies, {}, layout=LAYOUT, group=None),  # noqa: B023
        )
        compute(1.0, torch.device("cpu"))
        background.wait_for_copy()
        stall = background.written.stall_seconds
        written = background.join()
        assert written is not None
        assert written.error is None
    return stall


def main() -> None:
    """Measure and print the medians as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    state = make_state(options.megabytes, torch.device("cpu"))
    program = str(Path(sys.executable).with_name("rclone"))
    times: dict[str, list[float]] = {"save": [], "load": [], "rclone up": [], "rclone down": []}
    with tempfile.TemporaryDirectory() as folder, rclone(Path(folder)) as endpoint, asked_at(endpoint):
        there, local, back = new_bucket(), Path(folder, "local"), Path(folder, "back")
        with local.open("wb") as file:
            for _ in range(options.megabytes):
                file.write(os.urandom(MEBIBYTE))
        before, grown = peak_bytes(), 0
        for number in range(options.rounds):
            checkpoint = there / f"iter_{number:07d}"
            remote = f"there:{there.path}/{number}.bin"
            times["save"].append(seconds(lambda: collective_io.save(checkpoint, state, {}, layout=LAYOUT, group=None)))  # noqa: B023
            grown = max(grown, peak_bytes() - before)
            times["load"].append(
                seconds(lambda: collective_io.load(checkpoint, state, expect_model=None, verify="size", group=None))  # noqa: B023
            )
            for name, line in (("rclone up", (str(local), remote)), ("rclone down", (remote, str(back)))):
                times[name].append(
                    seconds(lambda: subprocess.run([program, "copyto", *line], env=client(endpoint), check=True))  # noqa: B023
                )
            back.unlink()
            checkpoint.remove()
        stall = stall_of(there / "behind", state)
    medians = {name: statistics.median(values) for name, values in times.items()}
    ratios = {"up": medians["save"] / medians["rclone up"], "down": medians["load"] / medians["rclone down"]}
    ratios["stall / save"] = stall / medians["save"]
    print(json.dumps({"medians": medians, "ratios": ratios, "grown MiB": grown / MEBIBYTE, **vars(options)}, indent=1))


if __name__ == "__main__":
    main()
