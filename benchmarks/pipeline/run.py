"""Pipeline schedules: the measured share of the bubble against the formula.

    python -m benchmarks.pipeline.run [--stages 4] [--micro-batches 8] [--milliseconds 100] [--rounds N]

Layers sleep, so that a step's time is the schedule's and not the machine's: a stage's forward of a micro-batch takes
``--milliseconds``, the gradient of its input and the gradient of its weights as long again. With chunks each takes its
share of that. Messages are real ones, over gloo.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.support.contest import Contest, Rank, median
from benchmarks.support.table import machine, print_json, print_table
from megapar.core.pipeline.schedule import make_schedule
from megapar.core.pipeline.simulate import bubble_formula, simulate

SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zero_bubble", 2))


def main() -> None:
    """Measure, print the table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--milliseconds", type=float, default=100.0, help="of a stage's forward of one micro-batch")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    stages, micro_batches, unit = options.stages, options.micro_batches, options.milliseconds / 1e3
    entries = {
        f"{name}, {chunks} chunks": ("ranks", f"{name} {chunks} {micro_batches} {unit}") for name, chunks in SCHEDULES
    }
    with tempfile.TemporaryDirectory() as folder:
        meet = f"file://{Path(folder) / 'meet'}"
        argv = [sys.executable, "-m", "benchmarks.pipeline.rank", "--rendezvous", meet, "--world-size", str(stages)]
        ranks = [Rank([*argv, "--rank", str(rank)], {"OMP_NUM_THREADS": "1"}) for rank in range(stages)]
        with Contest({"ranks": ranks}) as contest:
            times = contest.rounds(options.rounds, entries)
    busy = 3 * micro_batches * unit
    rows, results = [], {}
    for (label, figures), (name, chunks) in zip(times.items(), SCHEDULES, strict=True):
        seconds = median(figures)
        measured, waited = 1 - busy / seconds, median(figures, "waited") / seconds
        formula = bubble_formula(name, stages, chunks, micro_batches)
        simulated = simulate(make_schedule(name, stages, chunks, micro_batches)).bubble_share
        expected = "" if formula is None else f"{formula:.1%}"
        rows.append((label, f"{seconds:.3f}", f"{measured:.1%}", f"{waited:.1%}", expected, f"{simulated:.1%}"))
        results[label] = {"seconds": seconds, "measured": measured, "waited": waited, "formula": formula}
        results[label]["simulated"] = simulated
    print(f"{machine('cpu')}; {stages} stages, {micro_batches} micro-batches; medians of {options.rounds}\n")
    print_table(("schedule", "seconds per step", "bubble measured", "waited for", "formula", "simulated"), rows)
    print_json({"benchmark": "pipeline", "machine": machine("cpu"), "bubble": results})


if __name__ == "__main__":
    main()
