"""Context parallelism: what sharing a sequence costs and saves in attention, and how much of its messages is hidden.

    python -m benchmarks.context_parallel.run [--device cpu|cuda] [--part speed|hidden] [--length S] [--rounds N]

speed: causal attention, forward and backward, by two ranks against one process with the same cores.
hidden: the same over a slow link (two network namespaces; needs root).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.support.contest import Contest, Rank, median
from benchmarks.support.slow_link import slow_link
from benchmarks.support.table import machine, print_json, print_table

NAMES = {
    "megatron_cp_algo": "ring",
    "allgather_cp_algo": "gathered",
    "ulysses_cp_algo": "ulysses",
    "in_order": "ring without zig-zag",
}
OVER_LINK = {
    **{algorithm: name for algorithm, name in NAMES.items() if algorithm != "in_order"},
    "window": "window of 128 keys",
    "window_all": "window of 128, all keys sent",
}


def main() -> None:
    """Run the parts, print their tables and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--part", choices=("speed", "hidden"), action="append", help="default: both")
    parser.add_argument("--length", type=int, default=4096, help="positions of the sequence")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rates", nargs="+", default=["800mbit"], help="of the slow link, for tc")
    options = parser.parse_args()
    parts = options.part or ["speed", "hidden"]
    result: dict[str, object] = {"benchmark": "context_parallel", "machine": machine(options.device)}
    print(f"{result['machine']}; {options.length} positions; medians of {options.rounds} interleaved rounds\n")
    with tempfile.TemporaryDirectory() as folder:
        if "speed" in parts:
            result["speed"] = measure_speed(options.device, options.length, options.rounds, Path(folder))
        if "hidden" in parts:
            result["hidden"] = measure_hidden(options.rates, options.length, options.rounds, Path(folder))
    print_json(result)


def measure_speed(device: str, length: int, rounds: int, folder: Path) -> dict[str, float]:
    """Return the seconds of every algorithm and of one process, relative to those of one process."""
    cores = 1 if device == "cuda" else 2
    bound = [rank if device == "cpu" else None for rank in range(2)]
    one = {"OMP_NUM_THREADS": "1"}
    ranks = [Rank(_rank(rank, device, length, folder / "speed"), one, bound[rank]) for rank in range(2)]
    alone = [Rank([*_argv(device, length), "--threads", str(cores)], {"OMP_NUM_THREADS": str(cores)})]
    entries = {name: ("ranks", algorithm) for algorithm, name in NAMES.items()}
    with Contest({"ranks": ranks, "one": alone}) as contest:
        times = contest.rounds(rounds, {**entries, "one process": ("one", "whole")}, warmup=2)
    seconds = {name: median(figures) for name, figures in times.items()}
    ratios = {name: value / seconds["one process"] for name, value in seconds.items()}
    print("Two ranks with one core each, against one process with both\n")
    print_table(("", "seconds", "of one process"), [(n, f"{s:.3f}", f"{ratios[n]:.2f}") for n, s in seconds.items()])
    return ratios


def measure_hidden(rates: Sequence[str], length: int, rounds: int, folder: Path) -> list[dict[str, object]]:
    """Return, by rate and algorithm, the time that messages add if nothing hides them, and the hidden share."""
    results: list[dict[str, object]] = []
    entries = {
        f"{algorithm} {way}".strip(): ("ranks", f"{algorithm} {way}".strip())
        for algorithm in OVER_LINK
        for way in ("", "waiting", "alone")
    }
    with slow_link() as link:
        for rate in rates:
            link.set_rate(rate)
            ranks = [link.rank(rank, _rank(rank, "cpu", length, folder / rate)) for rank in range(2)]
            with Contest({"ranks": ranks}) as contest:
                times = contest.rounds(rounds, entries)
            rows = []
            for algorithm, name in OVER_LINK.items():
                flying, waiting, alone = (median(times[f"{algorithm}{way}"]) for way in ("", " waiting", " alone"))
                share, hidden = (waiting - alone) / waiting, (waiting - flying) / (waiting - alone)
                waited = median(times[algorithm], "waited")
                figures = (alone, waiting, flying, waited)
                rows.append((name, *(f"{x:.3f}" for x in figures), f"{share:.0%}", f"{hidden:.0%}"))
                results.append({"link": rate, "algorithm": name, "share": share, "hidden": hidden})
            print(f"Link {rate}, seconds\n")
            header = ("", "computation alone", "waiting at once", "as it is", "of it waited", "messages", "hidden")
            print_table(header, rows)
    return results


def _argv(device: str, length: int) -> list[str]:
    return [sys.executable, "-m", "benchmarks.context_parallel.rank", "--device", device, "--length", str(length)]


def _rank(rank: int, device: str, length: int, meet: Path) -> list[str]:
    return [*_argv(device, length), "--rank", str(rank), "--ranks", "2", "--rendezvous", f"file://{meet}"]


if __name__ == "__main__":
    main()
