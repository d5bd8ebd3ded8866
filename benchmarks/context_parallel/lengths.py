"""Time and memory of a step of a decoder by the length of its sequence: with a window in every layer, and without.

    python -m benchmarks.context_parallel.lengths [--lengths S ..] [--full S ..] [--steps N]

One process with one thread for each length, one after another; bytes are those above what the process holds before its
first step. Prints the exponents of the length in both, by least squares, and one line of JSON, which
``scripts/docs_pictures.py`` draws.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence

from benchmarks.support.contest import Contest, Figures, Rank, serve
from benchmarks.support.memory import PeakMemory
from benchmarks.support.steps import make_trainer, timed
from benchmarks.support.table import machine, print_json, print_table
from megapar.arguments import parse

WINDOW = 128
MODEL = "--num-experts 0 --num-layers 4 --hidden-size 128 --num-attention-heads 2 --ffn-hidden-size 256"
RUN = "--vocab-size 512 --device cpu --dtype fp32 --data-path mock --micro-batch-size 1 --global-batch-size 1"


class Steps:
    """Steps of one model."""

    def __init__(self, length: int, window: str) -> None:
        flags = [*MODEL.split(), *RUN.split(), "--seq-length", str(length), "--window-size", window]
        trainer = make_trainer(parse("moe", flags, {}), None)
        self._step, self._before = timed(trainer), PeakMemory("cpu").read()

    def __call__(self, request: str) -> Figures:
        """Return the seconds of a step, and its most bytes."""
        peak = PeakMemory("cpu")
        return {**self._step(request), "bytes": peak.read() - self._before}


def exponent(figures: Mapping[int, float]) -> float:
    """Return the slope of the logarithm of figures over that of the length."""
    points = [(math.log(length), math.log(figure)) for length, figure in figures.items()]
    x, y = (sum(values) / len(points) for values in zip(*points, strict=True))
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)


def measure(lengths: Sequence[int], window: str, steps: int) -> dict[str, dict[int, float]]:
    """Return the least seconds of a step and its most bytes by length, after one step that allocates."""
    found: dict[str, dict[int, float]] = {"seconds": {}, "bytes": {}}
    for length in lengths:
        argv = [sys.executable, "-m", __spec__.name, "--length", str(length), "--window", window]
        with Contest({window: [Rank(argv, {"OMP_NUM_THREADS": "1"})]}) as contest:
            rounds = contest.rounds(steps, {window: (window, "")})[window]
        found["seconds"][length] = min(one["seconds"] for one in rounds)
        found["bytes"][length] = max(one["bytes"] for one in rounds)
    return found


def main() -> None:
    """Measure both, or be the process of one length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048 << n for n in range(5)])
    parser.add_argument("--full", type=int, nargs="+", default=[2048, 4096, 8192], help="lengths without a window")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--length", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--window", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.length:
        serve(Steps(options.length, options.window))
        return
    found = {
        f"window {WINDOW}": measure(options.lengths, str(WINDOW), options.steps),
        "all keys": measure(options.full, "none", options.steps),
    }
    rows = [
        (name, f"{length:,}", f"{both['seconds'][length]:.2f}", f"{both['bytes'][length] / 2**20:,.0f}")
        for name, both in found.items()
        for length in both["seconds"]
    ]
    print_table(("", "positions", "seconds", "MiB"), rows)
    exponents = {name: {kind: exponent(figures) for kind, figures in both.items()} for name, both in found.items()}
    print_table(
        ("", "seconds", "bytes"), [(name, *(f"{one:.2f}" for one in both.values())) for name, both in exponents.items()]
    )
    print_json({"benchmark": "lengths", "machine": machine("cpu"), "measured": found, "exponents": exponents})


if __name__ == "__main__":
    main()
