"""Tensor parallelism: how much of its communication is hidden, and how fast it is.

    python -m benchmarks.tensor_parallel.run [--device cpu|cuda] [--part hidden|speed] [--rounds N] [--rates ...]

hidden: two ranks over a slow link (two network namespaces; on cuda two GPUs and the link they have).
speed: tokens per second at mp 2 against one process with the same cores, and against DTensor's ``parallelize_module``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.support.contest import Contest, Figures, Rank, median
from benchmarks.support.slow_link import slow_link
from benchmarks.support.table import machine, print_json, print_table
from benchmarks.tensor_parallel.shape import SHAPES

WAYS = ("alone", "blocking", "whole", "pieces")
HERE = "benchmarks.tensor_parallel"


def main() -> None:
    """Run the parts, print their tables and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--part", choices=("hidden", "speed"), action="append", help="default: both")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--rates", nargs="+", default=["400mbit", "800mbit"], help="of the slow link, as tc writes them"
    )
    options = parser.parse_args()
    parts = options.part or ["hidden", "speed"]
    result: dict[str, object] = {"benchmark": "tensor_parallel", "machine": machine(options.device)}
    print(f"{result['machine']}; medians of {options.rounds} interleaved rounds\n")
    with tempfile.TemporaryDirectory() as folder:
        if "hidden" in parts:
            result["hidden"] = measure_hidden(options.device, options.rates, options.rounds, Path(folder))
        if "speed" in parts:
            result["speed"] = measure_speed(options.device, options.rounds, Path(folder))
    print_json(result)


def measure_hidden(device: str, rates: Sequence[str], rounds: int, folder: Path) -> list[dict[str, object]]:
    """Return, for each rate, the shares of mp communication that are hidden with sequence parallelism."""
    entries = {way: ("ranks", way) for way in WAYS}
    results = []
    if device == "cuda":
        ranks = [_python("hidden_rank", *_hidden(rank, device, folder / "cuda")) for rank in range(2)]
        with Contest({"ranks": [Rank(argv) for argv in ranks]}) as contest:
            return [_shares("as it is", contest.rounds(rounds, entries))]
    with slow_link() as link:
        for rate in rates:
            link.set_rate(rate)
            meet = folder / f"hidden-{rate}"
            ranks = [link.rank(rank, _python("hidden_rank", *_hidden(rank, device, meet))) for rank in range(2)]
            with Contest({"ranks": ranks}) as contest:
                results.append(_shares(rate, contest.rounds(rounds, entries)))
    return results


def measure_speed(device: str, rounds: int, folder: Path) -> dict[str, object]:
    """Return the tokens per second of whole training steps."""
    cores = 1 if device == "cuda" else 2
    alone = _python("ours_rank", "--device", device, "--threads", str(cores))
    contestants = {
        "megapar mp 2": _ours(device, folder, "mp", ["--mp-degree", "2"]),
        "megapar mp 2, sequence parallel": _ours(device, folder, "sp", ["--mp-degree", "2", "--sequence-parallel"]),
        "megapar, one process": [Rank(alone, _alone(cores))],
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


def _shares(link: str, times: Mapping[str, Sequence[Figures]]) -> dict[str, object]:
    """Print what communication adds to the blocking step, and the share that each way saves. Returns the figures."""
    seconds = {way: median(figures) for way, figures in times.items()}
    communication = seconds["blocking"] - seconds["alone"]
    hidden = {way: (seconds["blocking"] - seconds[way]) / communication for way in ("whole", "pieces")}
    share = communication / seconds["blocking"]
    print(f"Link {link}: communication is {share:.0%} of the blocking step\n")
    rows = [("computation alone", f"{seconds['alone']:.3f}", ""), ("blocking", f"{seconds['blocking']:.3f}", "0 %")]
    rows += [
        (f"under products, {name}", f"{seconds[way]:.3f}", f"{hidden[way]:.0%}")
        for way, name in (("whole", "uncut"), ("pieces", "in pieces"))
    ]
    print_table(("", "seconds per step", "hidden"), rows)
    return {"link": link, "communication_share": share, "hidden": hidden, "seconds": seconds}


def _hidden(rank: int, device: str, meet: Path) -> list[str]:
    return ["--rank", str(rank), "--device", device, "--rendezvous", f"file://{meet}"]


def _ours(device: str, folder: Path, name: str, flags: Sequence[str]) -> list[Rank]:
    argv = _python("ours_rank", "--device", device, "--threads", "1", "--rendezvous", f"file://{folder / name}", "--")
    return [Rank([*argv, *flags], _place(rank)) for rank in range(2)]


def _peer(device: str, folder: Path, name: str, *flags: str) -> list[Rank]:
    argv = _python("peer_rank", "--device", device, "--rendezvous", f"file://{folder / name}", *flags)
    return [Rank(argv, _place(rank)) for rank in range(2)]


def _python(module: str, *argv: str) -> list[str]:
    return [sys.executable, "-m", f"{HERE}.{module}", *argv]


def _place(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}


def _alone(threads: int) -> dict[str, str]:
    return {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": str(threads)}


if __name__ == "__main__":
    main()
