"""Dispatch by node against plain dispatch, in whole steps of the trainer.

    python -m benchmarks.node_dispatch.run [--rounds N] [--shares 0.5 0.1] [--shapes "top-8 of 16" ...]

Four ranks on two nodes (network namespaces with ``tc tbf``, which need root), ep 4. For each shape: the steps without
limits; then, for each share, the link is limited so that the plain step's messages between nodes take that share of it,
and both ways take turns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence

from benchmarks.node_dispatch.shape import NODE, RANKS, SHAPES, WAYS, ideal, rate_for
from benchmarks.support.contest import Contest, Figures, median, paired, paired_interval
from benchmarks.support.slow_link import SlowLink, slow_link
from benchmarks.support.table import machine, print_json, print_table
from benchmarks.support.trainer_rank import command

FREE = "100gbit"
AGREE = 1e-3  # fp32; the rows of a token are summed in another order


def main() -> None:
    """Measure every shape, print tables and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--shares", nargs="+", type=float, default=[0.5, 0.1], help="of the plain step")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    options = parser.parse_args()
    result: dict[str, object] = {"benchmark": "node_dispatch", "machine": machine("cpu")}
    print(f"{result['machine']}; medians of {options.rounds} interleaved rounds\n")
    with tempfile.TemporaryDirectory() as folder, slow_link() as link:
        argv = command("node_dispatch.shape:ROWS", RANKS, f"file://{folder}/meet", node=NODE)
        with Contest({"ranks": [link.rank(rank // NODE, [*argv, str(rank)]) for rank in range(RANKS)]}) as contest:
            result["shapes"] = [_one(link, contest, name, options.shares, options.rounds) for name in options.shapes]
    print_json(result)


def _one(link: SlowLink, contest: Contest, name: str, shares: Sequence[float], rounds: int) -> dict[str, object]:
    entries = {way: ("ranks", f"{name}, {way}") for way in WAYS}
    link.set_rate(FREE)
    alone = contest.rounds(max(3, rounds // 2), entries)
    found = []
    for share in shares:
        rate = rate_for(share, median(alone["plain"]), SHAPES[name].between("plain") / 2)
        link.set_rate(f"{rate}bit")
        found.append(_table(name, share, rate, contest.rounds(rounds, entries), alone))
    return {"shape": name, "shares": found}


def _table(
    name: str, share: float, rate: int, rounds: Mapping[str, Sequence[Figures]], alone: Mapping[str, Sequence[Figures]]
) -> dict[str, object]:
    """Print the table of one share, and return its figures.

    Gain is the time of the plain step relative to that of the step by node in the same round.
    """
    for mine, theirs in zip(rounds["node"], rounds["plain"], strict=True):
        assert abs(mine["norm"] - theirs["norm"]) <= AGREE * theirs["norm"], "by node computes something else"
    plain, by_node = rounds["plain"], rounds["node"]
    gain = paired(plain, by_node)
    interval = paired_interval(plain, by_node) if len(plain) > 5 else (gain, gain)
    sent = {way: SHAPES[name].between(way) for way in WAYS}
    measured = sent["plain"] / 2 * 8 / rate / median(plain)
    best = ideal(measured, sent["plain"], sent["node"])
    print(f"{name}, {rate / 1e6:.0f} Mbit/s: messages take {measured:.0%} of the plain step (wanted {share:.0%})\n")
    rows = [
        [way, *(f"{value:.3f}" for value in (median(rounds[way]), median(alone[way]), _waited(rounds[way])))]
        for way in WAYS
    ]
    print_table(["", "seconds", "without limits", "waits ep"], rows)
    low, high = interval
    print(f"by node {gain:.2f} [{low:.2f}, {high:.2f}] times as fast; ideal {best:.2f}\n")
    return {"share": measured, "rate": rate, "gain": gain, "interval": list(interval), "ideal": best}


def _waited(rounds: Sequence[Figures]) -> float:
    """Return the median of the seconds that a rank waited for experts' messages."""
    return statistics.median(sum(one[key] for key in one if key.startswith(("ep/", "ep_"))) for one in rounds)


if __name__ == "__main__":
    main()
