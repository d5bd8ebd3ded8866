"""Two trees of megapar, in turns: seconds of a step of the quickstart on two ranks. See scripts/compare_speed.sh."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.support.contest import SLOWER, Contest, Rank, median, paired, paired_interval
from benchmarks.support.table import print_json, print_table

HERE = Path(__file__).resolve().parents[2]
RANKS = 2


def main() -> None:
    """Compare both trees. Exits with 1 if this tree is slower by more than 3 %, and not by chance."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path, help="a checkout of another revision")
    parser.add_argument("--rounds", type=int, default=21)
    options = parser.parse_args()
    if options.rounds < 6:
        parser.error(f"--rounds {options.rounds}: an interval takes at least 6")
    with tempfile.TemporaryDirectory() as folder:
        trees = {"this tree": HERE, "the other": options.other.resolve()}
        ranks = {
            name: _ranks(tree, Path(folder) / name.replace(" ", "-"), trees["the other"])
            for name, tree in trees.items()
        }
        with Contest(ranks) as contest:
            times = contest.rounds(options.rounds, {name: (name, "step") for name in trees}, warmup=3)
    ratio = paired(times["this tree"], times["the other"])
    low, high = paired_interval(times["this tree"], times["the other"])
    slower = low > 1.0 and ratio > SLOWER
    print_table(("", "seconds per step"), [(name, f"{median(rounds):.4f}") for name, rounds in times.items()])
    print(
        f"this tree takes {ratio:.3f} of the other's time (median of {options.rounds} pairs, "
        f"95 % interval {low:.3f} to {high:.3f}): {'slower' if slower else 'not slower'}"
    )
    seconds = {name: median(rounds) for name, rounds in times.items()}
    print_json({"ratio": ratio, "interval": [low, high], "slower": slower, "seconds": seconds})
    sys.exit(slower)


def _ranks(tree: Path, folder: Path, other: Path) -> list[Rank]:
    """Return the ranks of a tree, which run its own package and benchmark, because module names differ.

    Both read the quickstart of the other tree, as it is usually older and would refuse a key that came later.
    """
    folder.mkdir()
    for name in ("megapar", "benchmarks"):
        (folder / name).symlink_to(tree / name)
    script = ["-m", "benchmarks.throughput.quickstart_rank", "--rendezvous", f"file://{folder / 'meet'}"]
    config = str(other / "configs/quickstart.yaml")
    path = {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
    return [
        Rank(
            [sys.executable, *script, "--expect", str(tree), "--config", config],
            {**path, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)},
        )
        for rank in range(RANKS)
    ]


if __name__ == "__main__":
    main()
