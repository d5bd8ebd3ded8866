"""Share of the time that a slow link adds to whole steps of the trainer which slicing hides.

    python -m benchmarks.step_hiding.run [--rounds N] [--rates 300mbit ...] [--ways "cross-layer 2" ...]

Two ranks in two network namespaces with ``tc tbf`` between them (root). A round: every way in turn on the slow link,
then every way without a limit.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence

from benchmarks.step_hiding.ways import SERIAL, WAYS
from benchmarks.support.contest import Contest, Figures, median, paired
from benchmarks.support.slow_link import SlowLink, slow_link
from benchmarks.support.table import machine, print_json, print_table
from benchmarks.support.trainer_rank import command

RANKS = 2
FREE = "100gbit"
AGREE = 1e-3  # fp32; slices add up in another order
Rounds = dict[str, list[Figures]]


def main() -> None:
    """Measure every rate, print tables and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rates", nargs="+", default=["300mbit"], help="between the ranks, as tc has it")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    options = parser.parse_args()
    ways = list(dict.fromkeys([SERIAL, *options.ways]))
    result: dict[str, object] = {"benchmark": "step_hiding", "machine": machine("cpu")}
    print(f"{result['machine']}; medians of {options.rounds} interleaved rounds\n")
    with slow_link() as link:
        result["rates"] = [_one(link, rate, ways, options.rounds) for rate in options.rates]
    print_json(result)


def _one(link: SlowLink, rate: str, ways: Sequence[str], rounds: int) -> dict[str, object]:
    slow: Rounds = {way: [] for way in ways}
    free: Rounds = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as name:
        argv = command("step_hiding.ways:WAYS", RANKS, f"file://{name}/meet")
        link.set_rate(FREE)
        with Contest({"ranks": [link.rank(rank, [*argv, str(rank)]) for rank in range(RANKS)]}) as contest:
            entries = {way: ("ranks", way) for way in ways}
            contest.rounds(1, entries)  # start-up: the first steps allocate
            for _ in range(rounds):
                for into, limit in ((slow, rate), (free, FREE)):
                    link.set_rate(limit)
                    for way, turns in contest.rounds(1, entries, warmup=0).items():
                        into[way] += turns
    return _table(rate, slow, free)


def hidden(serial: float, this: float, alone: float) -> float:
    """Return the hidden share of the time that a link adds to the serial step, ``serial`` − ``alone``."""
    return (serial - this) / (serial - alone)


def _table(rate: str, slow: Rounds, free: Rounds) -> dict[str, object]:
    serial, alone = median(slow[SERIAL]), median(free[SERIAL])
    print(f"{rate}: communication is {1 - alone / serial:.0%} of the serial step, {alone:.3f} s without a limit\n")
    kinds = sorted({key for turns in slow.values() for one in turns for key in one if "/" in key})
    rows, figures = [], {}
    for way, turns in slow.items():
        for mine, theirs in zip(turns, slow[SERIAL], strict=True):
            assert abs(mine["norm"] - theirs["norm"]) <= AGREE * theirs["norm"], f"{way} computes something else"
        waits = {kind: median([{kind: one.get(kind, 0.0)} for one in turns], kind) for kind in kinds}
        share = hidden(serial, median(turns), alone)
        strict = 1 - (median(turns) - median(free[way])) / (serial - alone)
        rows.append(
            [
                *(way, f"{median(turns):.3f}", f"{paired(turns, slow[SERIAL]):.3f}", f"{share:.0%}", f"{strict:.0%}"),
                *(f"{median(free[way]):.3f}", *(f"{waits[kind]:.3f}" for kind in kinds)),
            ]
        )
        figures[way] = {
            **{"seconds": median(turns), "hidden": share, "hidden_strictly": strict},
            **{"without_limit": median(free[way]), "waits": waits},
        }
    print_table(["", "seconds", "to serial", "hidden", "strictly", "without limit", *kinds], rows)
    return {"rate": rate, "ways": figures}


if __name__ == "__main__":
    main()
