"""MindSpeed's comparison of Ampipe, pipe-experts and both, with the flags it used, as whole steps of the trainer.

    python -m benchmarks.ampipe_rows.run [--rounds N] [--rates 200mbit ...] [--inside 2gbit]

Four ranks on two nodes (network namespaces with ``tc tbf``, which need root): mp 2 inside a node, ep 2 between them.
At each rate, in one run: every row in turn, then the base without limits.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence

from benchmarks.ampipe_rows.rows import PUBLISHED, ROWS
from benchmarks.support.contest import Contest, Figures, median, paired, paired_interval
from benchmarks.support.slow_link import SlowLink, slow_link
from benchmarks.support.table import machine, print_json, print_table
from benchmarks.support.trainer_rank import command

RANKS, NODE = 4, 2
FREE = "100gbit"
AGREE = 1e-3  # fp32; slices add up in another order


def main() -> None:
    """Measure every rate, print tables and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rates", nargs="+", default=["300mbit", "150mbit"], help="between the nodes, as tc has it")
    parser.add_argument("--inside", default="1gbit", help="inside a node")
    options = parser.parse_args()
    result: dict[str, object] = {"benchmark": "ampipe_rows", "machine": machine("cpu"), "inside": options.inside}
    print(f"{result['machine']}; medians of {options.rounds} interleaved rounds; {options.inside} inside a node\n")
    with slow_link() as link:
        result["rates"] = [_one(link, rate, options.inside, options.rounds) for rate in options.rates]
    print_json(result)


def _one(link: SlowLink, rate: str, inside: str, rounds: int) -> dict[str, object]:
    """Measure one rate with new trainers: at the end of a rate the base is some steps ahead of the others."""
    link.set_rate(rate)
    link.set_rate_inside(inside)
    with tempfile.TemporaryDirectory() as name:
        meet, rows = f"file://{name}/meet", "benchmarks.ampipe_rows.rows:ROWS"
        argv = command(rows, RANKS, meet, node=NODE, axes=("ep", "mp"))
        ranks = [link.rank(rank // NODE, [*argv, str(rank)]) for rank in range(RANKS)]
        with Contest({"ranks": ranks}) as contest:
            found = contest.rounds(rounds, {row: ("ranks", row) for row in ROWS})
            link.set_rate(FREE)
            link.set_rate_inside(FREE)
            alone = contest.rounds(max(3, rounds // 2), {"base": ("ranks", "base")})["base"]
    return _table(rate, found, median(alone))


def _table(rate: str, rounds: dict[str, Sequence[Figures]], alone: float) -> dict[str, object]:
    """Print the table of one rate, and return its figures.

    Hidden is the share of the time that the limits add to the base which a row saves.
    """
    base = rounds["base"]
    added = median(base) - alone
    print(f"{rate} between the nodes: communication is {added / median(base):.0%} of the base's step\n")
    rows, figures = [], {}
    for name, turns in rounds.items():
        for mine, theirs in zip(turns, base, strict=True):
            assert abs(mine["norm"] - theirs["norm"]) <= AGREE * theirs["norm"], f"{name} computes something else"
        low, high = paired_interval(turns, base) if name != "base" else (1.0, 1.0)
        ratio, hidden = paired(turns, base), (median(base) - median(turns)) / added
        published = PUBLISHED[name] / PUBLISHED["base"] - 1 if name in PUBLISHED else None
        rows.append(
            [
                *(name, f"{median(turns):.3f}", f"{ratio:.3f} [{low:.3f}, {high:.3f}]", f"{1 / ratio - 1:+.1%}"),
                *(f"{hidden:.0%}", f"{median(turns, 'ep'):.3f}", f"{median(turns, 'mp'):.3f}"),
                "" if published is None else f"{published:+.1%}",
            ]
        )
        figures[name] = {"seconds": median(turns), "to_base": ratio, "interval": [low, high], "hidden": hidden}
    print_table(["", "seconds", "to base", "speed", "hidden", "waits ep", "waits mp", "published"], rows)
    return {"between": rate, "seconds_without_limits": alone, "rows": figures}


if __name__ == "__main__":
    main()
