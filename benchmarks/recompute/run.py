"""The table of PaddlePaddle's recompute for pipelines: memory and speed without it, with it, and with its places.

    python -m benchmarks.recompute.run [--device cpu|cuda] [--mp 4] [--pp 2] [--rounds N]

GPT-117M (configs/gpt-117m.yaml) at mp 4, pp 2; on a CPU with short sequences and one micro-batch per stage.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.recompute.rank import WAYS
from benchmarks.support.contest import Contest, Rank, paired, place
from benchmarks.support.table import machine, print_json, print_table

MEGABYTE = 1e6
REDUCED = ("--seq-length", "128", "--max-position-embeddings", "128", "--vocab-size", "4096")
SIZES = {"cpu": REDUCED, "cuda": ()}
MICRO_BATCH = 2
MICRO_BATCHES_PER_STAGE = {"cpu": 1, "cuda": 8}


def main() -> None:
    """Measure, print the table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--mp", type=int, default=4)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    ways = [way for way in WAYS if options.mp > 1 or way in ("none", "recompute", "+ offload")]
    batch = MICRO_BATCH * MICRO_BATCHES_PER_STAGE[options.device] * options.pp
    flags = [*SIZES[options.device], "--micro-batch-size", str(MICRO_BATCH), "--global-batch-size", str(batch)]
    flags += ["--mp-degree", str(options.mp), "--pp-degree", str(options.pp)]
    world_size = options.mp * options.pp
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, "-m", "benchmarks.recompute.rank", "--device", options.device]
        argv += ["--rendezvous", f"file://{Path(folder) / 'meet'}", "--ways", *ways, "--", *flags]
        bound = options.device == "cpu"
        ranks = [Rank(argv, place(rank, world_size), rank if bound else None) for rank in range(world_size)]
        with Contest({"ranks": ranks}) as contest:
            times = contest.rounds(options.rounds, {way: ("ranks", f"time {way}") for way in ways})
            memory = {way: contest.turn("ranks", f"memory {way}") for way in ways}
    print(f"{machine(options.device)}; mp {options.mp}, pp {options.pp}; medians of {options.rounds} rounds\n")
    rows = [
        (
            way,
            f"{memory[way]['device'] / MEGABYTE:.1f}",
            f"{memory[way]['device'] / memory['none']['device']:.2f}",
            f"{memory[way]['host'] / MEGABYTE:.1f}",
            f"{paired(times[way], times['none']):.2f}",
            f"{paired(times[way], times['recompute']):.2f}",
            f"{paired(times[way], times['none'], 'cpu_seconds'):.2f}",
        )
        for way in ways
    ]
    print_table(("", "device MB", "of none", "host MB", "time of none", "of recompute", "CPU time of none"), rows)
    result: dict[str, object] = {"benchmark": "recompute", "machine": machine(options.device)}
    result |= {"mp": options.mp, "pp": options.pp, "rounds": times, "memory_bytes": memory}
    print_json(result)


if __name__ == "__main__":
    main()
