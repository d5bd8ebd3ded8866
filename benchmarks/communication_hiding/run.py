"""Communication hiding: how much of the experts' all-to-alls travels under computation, and what a step costs.

    python -m benchmarks.communication_hiding.run [--device cpu|cuda] [--rounds N] [--rates 300mbit 600mbit ...]
                                                  [--ways "ampipe 2" ...] [--results FOLDER]

Two ranks over a slow link (two network namespaces and ``tc tbf``, which need root; on cuda two GPUs and their link).
At each rate, in one run: the serial step, every way of slicing, the degree that ``auto`` chooses, the computation alone
of each way, and the serial step's messages alone; and the most memory that each way holds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.communication_hiding.picture import draw_shares, draw_step
from benchmarks.communication_hiding.shape import AUTO, WAYS
from benchmarks.support.contest import Contest, Figures, Rank, median, paired
from benchmarks.support.slow_link import slow_link
from benchmarks.support.table import machine, print_json, print_table


def main() -> None:
    """Measure every rate, print tables, pictures and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rates", nargs="+", default=["800mbit", "400mbit", "200mbit"], help="as tc writes them")
    parser.add_argument("--ways", nargs="+", choices=[*WAYS, AUTO], default=[*WAYS, AUTO])
    parser.add_argument("--results", type=Path, help="folder for the pictures")
    options = parser.parse_args()
    ways = ["serial", *(way for way in options.ways if way != "serial")]
    result: dict[str, Any] = {"benchmark": "communication_hiding", "machine": machine(options.device)}
    print(f"{result['machine']}; medians of {options.rounds} interleaved rounds\n")
    with tempfile.TemporaryDirectory() as name:
        result["rates"] = measure(options.device, options.rates, ways, options.rounds, Path(name), options.results)
    print_json(result)


def measure(
    device: str, rates: Sequence[str], ways: Sequence[str], rounds: int, folder: Path, results: Path | None
) -> list[dict[str, Any]]:
    """Print a table for each rate, and draw the steps of the last one. Returns the figures of each rate."""
    found = []
    if device == "cuda":
        ranks = [Rank(_python(rank, device, folder / "cuda")) for rank in range(2)]
        with Contest({"ranks": ranks}) as contest:
            found.append(_one(contest, "as it is", ways, rounds, folder, results))
    else:
        with slow_link() as link:
            for rate in rates:
                link.set_rate(rate)
                ranks = [link.rank(rank, _python(rank, device, folder / rate)) for rank in range(2)]
                with Contest({"ranks": ranks}) as contest:
                    found.append(_one(contest, rate, ways, rounds, folder, results))
    if results is not None:
        hidden = {way: [float(entry["hidden"][way]) for entry in found] for way in ways[1:]}
        draw_shares([str(entry["link"]) for entry in found], hidden, results / "hidden.svg")
    return found


def _one(
    contest: Contest, link: str, ways: Sequence[str], rounds: int, folder: Path, results: Path | None
) -> dict[str, Any]:
    sliced = [way for way in ways if way != AUTO]
    entries = {way: ("ranks", way) for way in ways}
    entries |= {f"alone {way}": ("ranks", f"alone {way}") for way in sliced}
    entries["talk"] = ("ranks", "talk")
    memory = {way: contest.turn("ranks", f"memory {way}")["bytes"] for way in sliced}
    measured = _table(link, ways, contest.rounds(rounds, entries), memory)
    if results is not None:
        results.mkdir(parents=True, exist_ok=True)
        for way in [*sliced, *(f"mp {way}" for way in sliced if WAYS[way].cross_layer)]:
            file = folder / "events.json"
            contest.turn("ranks", f"draw {way} {file}")
            drawn = json.loads(file.read_text())
            name = way.replace(", ", "-").replace(" ", "-")
            draw_step(drawn["began"], drawn["events"], f"{way}, {link}", results / f"step-{name}.svg")
    return measured


def _table(
    link: str, ways: Sequence[str], rounds: Mapping[str, Sequence[Figures]], memory: Mapping[str, float]
) -> dict[str, Any]:
    """Print the table of one rate, and return its figures.

    Hidden is the share of the time that communication adds to the serial step which a way saves. Ideal is the longer of
    the computation (of this way, because slices cost a little) and the messages, for forward and backward separately: a
    forward has half of the messages and a third of the computation, and covers none of the backward's messages.
    """
    seconds = {name: median(figures) for name, figures in rounds.items()}
    exposed = {way: median(rounds[way], "exposed") for way in ways}
    added = seconds["serial"] - seconds["alone serial"]
    share = added / seconds["serial"]
    hidden = {way: (seconds["serial"] - seconds[way]) / added for way in ways}
    to_serial = {way: paired(rounds[way], rounds["serial"]) for way in ways}
    ideal = {}
    for way in memory:
        forward = median(rounds[f"alone {way}"], "forward")
        half = seconds["talk"] / 2
        ideal[way] = max(forward, half) + max(seconds[f"alone {way}"] - forward, half)
    reach = (seconds["serial"] - ideal["serial"]) / added
    more = {way: held / memory["serial"] for way, held in memory.items()}
    print(
        f"Link {link}: communication is {share:.0%} of the serial step; its messages alone {seconds['talk']:.3f} s; "
        f"with forward and backward each covered as far as the longer one allows {reach:.0%} would be hidden\n"
    )
    rows = []
    for way in ways:
        row = [f"{seconds[way]:.3f}", f"{to_serial[way]:.2f}", f"{exposed[way]:.3f}", f"{hidden[way]:.0%}"]
        if way == AUTO:
            rows.append((f"{AUTO}: {rounds[AUTO][0]['degree']}", *row, *[""] * 4))
        else:
            alone = seconds[f"alone {way}"]
            figures = (f"{alone:.3f}", f"{ideal[way]:.3f}", f"{seconds[way] / ideal[way]:.2f}", f"{more[way]:.3f}")
            rows.append((way, *row, *figures))
    header = ("", "seconds", "to serial", "exposed", "hidden", "computation", "ideal", "to ideal", "memory")
    print_table(header, rows)
    found: dict[str, Any] = {
        "link": link,
        "share": share,
        "reach": reach,
        "hidden": hidden,
        "seconds": seconds,
        "exposed": exposed,
    }
    return {**found, "to_serial": to_serial, "ideal": ideal, "memory_bytes": dict(memory), "memory": more}


def _python(rank: int, device: str, meet: Path) -> list[str]:
    module = "benchmarks.communication_hiding.rank"
    place = ["--rank", str(rank), "--device", device, "--rendezvous", f"file://{meet}"]
    return [sys.executable, "-m", module, *place]


if __name__ == "__main__":
    main()
