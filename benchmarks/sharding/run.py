"""Sharding: bytes per rank, what a slow link costs, and tokens per second on one machine.

    python -m benchmarks.sharding.run [--device cpu|cuda] [--part balance|link|machine] [--dtype bf16|fp32] [--rounds N]

balance: bytes per rank, counted in the real trainer run as each rank with fake tensors.
link: two ranks over a slow link (two network namespaces), against computation alone, DDP and per-layer FSDP2.
machine: two ranks on one machine, no limit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.sharding.balance import measure as measure_balance
from benchmarks.sharding.ideal import Message, shortest
from benchmarks.sharding.shape import OURS, SEQ_LENGTH
from benchmarks.support.contest import Contest, Figures, Rank, median
from benchmarks.support.slow_link import SlowLink, slow_link
from benchmarks.support.table import machine, print_json, print_table

HERE = "benchmarks.sharding"
PEERS = {"DDP": "ddp", "FSDP2 per layer": "fsdp2"}
TOKENS = 2 * SEQ_LENGTH


def main() -> None:
    """Run the parts, print their tables and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--part", choices=("balance", "link", "machine"), action="append", help="default: all")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), action="append", help="default: both")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    parts = options.part or ["balance", "link", "machine"]
    result: dict[str, object] = {"benchmark": "sharding", "machine": machine(options.device)}
    print(f"{result['machine']}; medians of {options.rounds} interleaved rounds\n")
    if "balance" in parts:
        result["balance"] = measure_balance()
    for dtype in options.dtype or ["bf16", "fp32"]:
        with tempfile.TemporaryDirectory() as folder:
            race = Race(options.device, dtype, options.rounds, Path(folder))
            if "link" in parts:
                result[f"link {dtype}"] = race.over_a_slow_link()
            if "machine" in parts:
                result[f"machine {dtype}"] = race.on_one_machine()
    print_json(result)


class Race:
    """Training steps of all contestants, interleaved."""

    def __init__(self, device: str, dtype: str, rounds: int, folder: Path) -> None:
        self._device, self._dtype, self._rounds, self._folder = device, dtype, rounds, folder

    def over_a_slow_link(self) -> dict[str, object]:
        """Measure at the rate at which communication takes about as long as computation."""
        with slow_link() as link:
            link.set_rate("1000mbit")
            with Contest(self._contestants(link)) as contest:
                rate = self._calibrate(contest, link)
                entries = {name: (name, "step") for name in ("alone", *OURS, *PEERS)}
                entries |= {"marks": ("alone", "marks"), "communication": ("stage 1", "communicate")}
                return self._judge(rate, contest.rounds(self._rounds, entries, warmup=2))

    def _calibrate(self, contest: Contest, link: SlowLink) -> int:
        """Return the Mbit/s at which a step's collectives take as long as its computation."""
        rate = 1000
        for _ in range(3):
            times = contest.rounds(2, {"alone": ("alone", "step"), "link": ("stage 1", "communicate")})
            rate = max(50, round(rate * median(times["link"]) / median(times["alone"])))
            link.set_rate(f"{rate}mbit")
        return rate

    def _judge(self, rate: int, times: Mapping[str, Sequence[Figures]]) -> dict[str, object]:
        seconds = {name: median(figures) for name, figures in times.items() if name != "marks"}
        ideal = _ideal(seconds["alone"], times["marks"], times["communication"])
        serial = seconds["alone"] + seconds["communication"]
        rows, judged = [], {}
        for name, value in seconds.items():
            row = [name, f"{value:.3f}", "", "", f"{seconds['FSDP2 per layer'] / value:.2f}"]
            if name in ("stage 1", "stage 2"):
                hidden = (serial - value) / (serial - ideal)
                judged[name] = {"hidden": hidden, "to_ideal": value / ideal, "waits": _waits(times[name])}
                row[2:4] = [f"{hidden:.0%}", f"{value / ideal:.2f}"]
            rows.append(row)
        share = seconds["communication"] / serial
        print(f"{self._dtype}, link {rate} Mbit/s: communication is {share:.0%} of the serial step\n")
        print(f"ideal step: {ideal:.3f} s\n")
        print_table(("", "seconds per step", "hidden of what can be", "to ideal", "speed to FSDP2"), rows)
        return {"rate_mbit": rate, "seconds": seconds, "ideal": ideal, "judged": judged}

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
        command = [sys.executable, "-m", f"{HERE}.{module}", "--rendezvous", f"file://{meet}", *argv]
        world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        if name != "alone":
            world = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        place = {**world, "OMP_NUM_THREADS": "1"}
        if link is None:
            return Rank(command, place, core=rank if self._device == "cpu" else None)
        there = link.rank(rank, command)
        return Rank(there.argv, {**place, **there.env}, there.core)


def _ideal(alone: float, marks: Sequence[Figures], communication: Sequence[Figures]) -> float:
    messages = []
    for key in communication[0]:
        kind, _, units = key.partition(" ")
        if kind == "reduce":
            needed = min(median(marks, f"needed {unit}") for unit in units.split())
            complete = max(median(marks, f"complete {unit}") for unit in units.split())
            times = (median(communication, f"{what} {units}") for what in ("gather", "reduce"))
            messages.append(Message(needed, complete, *times))
    return shortest(alone, median(marks, "backward"), messages)


def _waits(rounds: Sequence[Figures]) -> dict[str, float]:
    return {kind: median(rounds, kind) for kind in rounds[0] if "/" in kind}


if __name__ == "__main__":
    main()
