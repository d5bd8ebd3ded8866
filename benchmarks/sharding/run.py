"""Sharding: what a slow link costs, and tokens per second on one machine.

    python -m benchmarks.sharding.run [--device cpu|cuda] [--part link|machine] [--dtype bf16|fp32] [--rounds N]

link: two ranks over a slow link (two network namespaces), against computation alone, DDP and per-layer FSDP2.
machine: two ranks on one machine, no limit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.sharding.shape import OURS, SEQ_LENGTH
from benchmarks.support.contest import Contest, Rank, median, place
from benchmarks.support.slow_link import SlowLink, slow_link
from benchmarks.support.table import machine, print_json, print_table

PEERS = {"DDP": "ddp", "FSDP2 per layer": "fsdp2"}
TOKENS = 2 * SEQ_LENGTH


def main() -> None:
    """Run the parts, print their tables and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--part", choices=("link", "machine"), action="append", help="default: both")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), action="append", help="default: both")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rate", default="258mbit", help="of the link, as tc writes it")
    options = parser.parse_args()
    parts = options.part or ["link", "machine"]
    result: dict[str, object] = {"benchmark": "sharding", "machine": machine(options.device)}
    print(f"{result['machine']}; medians of {options.rounds} interleaved rounds\n")
    for dtype in options.dtype or ["bf16", "fp32"]:
        with tempfile.TemporaryDirectory() as folder:
            race = Race(options.device, dtype, options.rounds, Path(folder))
            if "link" in parts:
                result[f"link {dtype}"] = race.over_a_slow_link(options.rate)
            if "machine" in parts:
                result[f"machine {dtype}"] = race.on_one_machine()
    print_json(result)


class Race:
    """Training steps of all contestants, interleaved."""

    def __init__(self, device: str, dtype: str, rounds: int, folder: Path) -> None:
        self._device, self._dtype, self._rounds, self._folder = device, dtype, rounds, folder

    def over_a_slow_link(self, rate: str) -> dict[str, object]:
        """Measure the seconds of a step, and of one process that sends nothing."""
        with slow_link() as link:
            link.set_rate(rate)
            with Contest(self._contestants(link)) as contest:
                times = contest.rounds(self._rounds, {name: (name, "step") for name in ("alone", *OURS, *PEERS)}, 2)
        seconds = {name: median(figures) for name, figures in times.items()}
        print(f"{self._dtype}, link {rate}\n")
        rows = [(name, f"{one:.3f}", f"{seconds['FSDP2 per layer'] / one:.2f}") for name, one in seconds.items()]
        print_table(("", "seconds per step", "speed to FSDP2"), rows)
        return {"rate": rate, "seconds": seconds}

    def on_one_machine(self) -> dict[str, object]:
        """Measure the tokens per second of both ranks together."""
        contestants = {
            n: r for n, r in self._contestants(None).items() if n not in ("alone", "stage 1, nothing overlapped")
        }
        with Contest(contestants) as contest:
            times = contest.rounds(self._rounds, {name: (name, "step") for name in contestants}, warmup=2)
        rates = {name: TOKENS / median(figures) for name, figures in times.items()}
        print(f"{self._dtype}, one machine\n")
        rows = [(name, f"{rate:.0f}", *(f"{rate / rates[peer]:.2f}" for peer in PEERS)) for name, rate in rates.items()]
        print_table(("", "tokens/s", *(f"to {peer}" for peer in PEERS)), rows)
        return {"tokens_per_second": rates}

    def _contestants(self, link: SlowLink | None) -> dict[str, list[Rank]]:
        common = ["--device", self._device]
        dtype = ["--dtype", self._dtype]
        found = {"alone": [self._rank(link, rank, "ours_rank", [*common, "--", *dtype], "alone") for rank in range(2)]}
        for name, flags in OURS.items():
            found[name] = self._pair(
                link, name, "ours_rank", [*common, "--", *dtype, "--global-batch-size", "2", *flags]
            )
        for name, kind in PEERS.items():
            found[name] = self._pair(link, name, "peer_rank", [*common, *dtype, "--kind", kind])
        return found

    def _pair(self, link: SlowLink | None, name: str, module: str, argv: Sequence[str]) -> list[Rank]:
        return [self._rank(link, rank, module, argv, name) for rank in range(2)]

    def _rank(self, link: SlowLink | None, rank: int, module: str, argv: Sequence[str], name: str) -> Rank:
        meet = self._folder / f"{name.replace(' ', '-')}{'-link' if link else ''}"
        command = [sys.executable, "-m", f"benchmarks.sharding.{module}", "--rendezvous", f"file://{meet}", *argv]
        env = place(0, 1) if name == "alone" else place(rank, 2)
        if link is None:
            return Rank(command, env, core=rank if self._device == "cpu" else None)
        there = link.rank(rank, command)
        return Rank(there.argv, {**env, **there.env}, there.core)


if __name__ == "__main__":
    main()
