"""Tokens per second at mp 2 against one process with the same cores, and against DTensor's ``parallelize_module``.

python -m benchmarks.tensor_parallel.run [--device cpu|cuda] [--rounds N]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.support.contest import Contest, Rank, median, place
from benchmarks.support.table import machine, print_json, print_table
from benchmarks.tensor_parallel.shape import SHAPES


def main() -> None:
    """Race, print the table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--part", choices=("speed",), help="for revisions that have another part, too")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    result: dict[str, object] = {"benchmark": "tensor_parallel", "machine": machine(options.device)}
    print(f"{result['machine']}; medians of {options.rounds} interleaved rounds\n")
    with tempfile.TemporaryDirectory() as folder:
        result["speed"] = measure_speed(options.device, options.rounds, Path(folder))
    print_json(result)


def measure_speed(device: str, rounds: int, folder: Path) -> dict[str, object]:
    """Return the tokens per second of whole training steps."""
    cores = 1 if device == "cuda" else 2
    alone = _python("ours_rank", "--device", device, "--threads", str(cores))
    contestants = {
        "megapar mp 2": _ours(device, folder, "mp", ["--mp-degree", "2"]),
        "megapar mp 2, sequence parallel": _ours(device, folder, "sp", ["--mp-degree", "2", "--sequence-parallel"]),
        "megapar, one process": [Rank(alone, place(0, 1, cores))],
        "DTensor mp 2": _peer(device, folder, "dtensor"),
        "DTensor mp 2, sequence parallel": _peer(device, folder, "dtensor-sp", "--sequence-parallel"),
    }
    with Contest(contestants) as contest:
        times = contest.rounds(rounds, {name: (name, "step") for name in contestants}, warmup=2)
    tokens = SHAPES[device].seq_length
    rates = {name: tokens / median(figures) for name, figures in times.items()}
    print(f"Whole training steps of {tokens} tokens\n")
    print_table(("", "tokens/s"), [(name, f"{rate:.0f}") for name, rate in rates.items()])
    ours = max(rate for name, rate in rates.items() if name.startswith("megapar mp"))
    peer = max(rate for name, rate in rates.items() if name.startswith("DTensor"))
    one = rates["megapar, one process"]
    print(f"mp 2 against the peer: {ours / peer:.2f}; against one process: {ours / one:.2f}\n")
    return {"tokens_per_second": rates, "to_peer": ours / peer, "to_one_process": ours / one}


def _ours(device: str, folder: Path, name: str, flags: Sequence[str]) -> list[Rank]:
    argv = _python("ours_rank", "--device", device, "--threads", "1", "--rendezvous", f"file://{folder / name}", "--")
    return [Rank([*argv, *flags], place(rank, 2)) for rank in range(2)]


def _peer(device: str, folder: Path, name: str, *flags: str) -> list[Rank]:
    argv = _python("peer_rank", "--device", device, "--rendezvous", f"file://{folder / name}", *flags)
    return [Rank(argv, place(rank, 2)) for rank in range(2)]


def _python(module: str, *argv: str) -> list[str]:
    return [sys.executable, "-m", f"benchmarks.tensor_parallel.{module}", *argv]


if __name__ == "__main__":
    main()
