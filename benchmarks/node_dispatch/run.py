"""Dispatch by node against plain dispatch: bytes between two nodes, and whole steps of the trainer.

    python -m benchmarks.node_dispatch.run [--rounds N] [--shares 0.5 0.1] [--shapes "top-8 of 16" ...]

Four ranks on two nodes (network namespaces with ``tc tbf``, which need root), ep 4. For each shape: the bytes of a step
by the counters, by its recorded routing and by formula; then the steps without limits; then, for each share, the link
is limited so that the plain step's messages between nodes take that share of it, and both ways take turns.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence

from benchmarks.node_dispatch.shape import RANKS, SHAPES, WAYS, Shape, ideal, rate_for
from benchmarks.support.contest import Contest, Figures, median, paired, paired_interval
from benchmarks.support.slow_link import SlowLink, slow_link
from benchmarks.support.table import machine, print_json, print_table

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
    with slow_link() as link:
        result["shapes"] = [_one(link, name, options.shares, options.rounds) for name in options.shapes]
    print_json(result)


def _one(link: SlowLink, name: str, shares: Sequence[float], rounds: int) -> dict[str, object]:
    link.set_rate(FREE)
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, "-m", "benchmarks.node_dispatch.rank", "--rendezvous", f"file://{folder}/meet"]
        argv += ["--shape", name, "--rank"]
        ranks = [link.rank(rank // 2, [*argv, str(rank)]) for rank in range(RANKS)]
        with Contest({"ranks": ranks}) as contest:
            sent = {way: contest.turn("ranks", f"bytes {way}") for way in WAYS}
            entries = {way: ("ranks", way) for way in WAYS}
            alone = contest.rounds(max(3, rounds // 2), entries)
            found = []
            for share in shares:
                rate = rate_for(share, median(alone["plain"]), sent["plain"]["sent_between"] / 2)
                link.set_rate(f"{rate}bit")
                found.append(_table(name, share, rate, contest.rounds(rounds, entries), alone, sent))
    return {"shape": name, "bytes": print_bytes(name, SHAPES[name], sent), "shares": found}


def print_bytes(name: str, shape: Shape, sent: Mapping[str, Figures]) -> dict[str, object]:
    """Print the bytes of a step between nodes. Raises AssertionError if counters and routing differ."""
    rows, found = [], {}
    for way, figures in sent.items():
        assert figures["sent"] == figures["needed"], f"{way}: the counters have not the bytes of the routing"
        assert figures["sent_between"] == figures["between"], f"{way}: the counters have not the bytes of the routing"
        formula = expected_between(shape, way, figures["tokens"])
        rows.append([way, *(f"{size / 1e6:.2f}" for size in (figures["sent_between"], figures["between"], formula))])
        found[way] = {"counters": figures["sent_between"], "routing": figures["between"], "formula": formula}
    print(f"{name}: megabytes between the nodes in a step, four passes of all layers\n")
    print_table(["", "counters", "recorded routing", "formula (balanced)"], rows)
    return found


def expected_between(shape: Shape, way: str, tokens: float) -> float:
    """Return the bytes between nodes of ``tokens`` tokens by the formula, of all ranks and layers together."""
    passes = shape.layer.by_node(tokens) if way == "node" else shape.layer.plain(tokens)
    return sum(one.between for one in passes.values())


def _table(
    name: str,
    share: float,
    rate: int,
    rounds: Mapping[str, Sequence[Figures]],
    alone: Mapping[str, Sequence[Figures]],
    sent: Mapping[str, Figures],
) -> dict[str, object]:
    """Print the table of one share, and return its figures.

    Gain is the time of the plain step relative to that of the step by node in the same round.
    """
    for mine, theirs in zip(rounds["node"], rounds["plain"], strict=True):
        assert abs(mine["norm"] - theirs["norm"]) <= AGREE * theirs["norm"], "by node computes something else"
    plain, by_node = rounds["plain"], rounds["node"]
    gain = paired(plain, by_node)
    interval = paired_interval(plain, by_node) if len(plain) > 5 else (gain, gain)
    measured = sent["plain"]["sent_between"] / 2 * 8 / rate / median(plain)
    best = ideal(measured, sent["plain"]["sent_between"], sent["node"]["sent_between"])
    print(f"{name}, {rate / 1e6:.0f} Mbit/s: messages take {measured:.0%} of the plain step (wanted {share:.0%})\n")
    rows = [
        [way, *(f"{value:.3f}" for value in (median(rounds[way]), median(alone[way]), median(rounds[way], "waited")))]
        for way in WAYS
    ]
    print_table(["", "seconds", "without limits", "waits ep"], rows)
    low, high = interval
    print(f"by node {gain:.2f} [{low:.2f}, {high:.2f}] times as fast; ideal {best:.2f}\n")
    return {"share": measured, "rate": rate, "gain": gain, "interval": list(interval), "ideal": best}


if __name__ == "__main__":
    main()
