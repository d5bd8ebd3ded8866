"""Host time of one layer in a training step: megapar's against that of the published class in transformers.

    python -m benchmarks.host_time.run [--model dense,moe] [--rounds 201] [--steps 6]

The models are so small that computing takes no time: hidden size 64, one sample of 16 positions, fp32, one thread. The
figure is the processor time in user mode of forward, backward and AdamW, which does not depend on the load of the
machine. That of a layer is the difference between models of 6 and of 2 layers, divided by 4, in each round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.host_time.contestant import FLAGS, OPTIMIZERS, OWN, PEER
from benchmarks.support.contest import Contest, Figures, Rank, paired, paired_interval, place
from benchmarks.support.table import machine, print_json, print_table
from benchmarks.throughput.prepare import write
from benchmarks.throughput.shape import shallow

DEPTHS = (2, 6)
MODELS = ("dense", "moe")
KEYS = ("user", "processor", "seconds")
MICRO = 1e6


def layers(rounds: Mapping[str, Sequence[Figures]], name: str) -> list[Figures]:
    """Return the figures of one layer in each round."""
    few, many = DEPTHS
    pairs = zip(rounds[f"{name} {few}"], rounds[f"{name} {many}"], strict=True)
    return [{key: (deep[key] - flat[key]) / (many - few) for key in KEYS} for flat, deep in pairs]


def compete(model: str, options: argparse.Namespace) -> dict[str, list[Figures]]:
    """Return the figures of every entry, "NAME LAYERS", in each round."""
    with tempfile.TemporaryDirectory() as folder:
        contestants, entries = {}, {}
        for depth in DEPTHS:
            own = Path(folder) / str(depth)
            write(shallow(model, depth), "cpu", own)
            for side in (*FLAGS, PEER):
                argv = [sys.executable, "-m", "benchmarks.host_time.contestant", "--side", side, "--model", model]
                argv += ["--layers", str(depth), "--experts", options.experts, str(own)]
                contestants[f"{side} {depth}"] = [Rank(argv, place(0, 1))]
            entries |= {f"{side} {depth}": (f"{side} {depth}", f"{options.steps} {OWN}") for side in FLAGS}
            entries |= {f"{way} {depth}": (f"{PEER} {depth}", f"{options.steps} {way}") for way in OPTIMIZERS}
        with Contest(contestants) as contest:
            return contest.rounds(options.rounds, entries, warmup=2)


def compare(model: str, rounds: Mapping[str, Sequence[Figures]]) -> dict[str, object]:
    """Print the times of a layer, and return them with the ratios and their intervals."""
    own = {name: layers(rounds, name) for name in FLAGS}
    found: dict[str, object] = {name: _medians(figures) for name, figures in own.items()}
    rows = [_row(name, figures) for name, figures in own.items()]
    for way in OPTIMIZERS:
        peer, name = layers(rounds, way), f"{PEER}, {way} AdamW"
        ratios = {
            side: {
                key: {"ratio": paired(ours, peer, key), "interval": paired_interval(ours, peer, key)} for key in KEYS
            }
            for side, ours in own.items()
        }
        found[name] = {**_medians(peer), "ratio_to_it": ratios}
        rows.append(_row(name, peer, *(_ratio(ours, peer) for ours in own.values())))
    print(f"{model}: microseconds of a layer and optimizer step; ratios of user time with 95 % intervals")
    print_table(("", *KEYS, *(f"{side} to it" for side in FLAGS)), rows)
    steps = {name: statistics.median(figures["user"] for figures in turns) for name, turns in rounds.items()}
    return {**found, "user_seconds_of_a_step": steps}


def _row(name: str, figures: Sequence[Figures], *ratios: str) -> tuple[str, ...]:
    times = (f"{MICRO * value:.0f}" for value in _medians(figures).values())
    return name, *times, *(ratios or ("",) * len(FLAGS))


def _ratio(ours: Sequence[Figures], peer: Sequence[Figures]) -> str:
    low, high = paired_interval(ours, peer, KEYS[0])
    return f"{paired(ours, peer, KEYS[0]):.2f} ({low:.2f} to {high:.2f})"


def _medians(figures: Sequence[Figures]) -> dict[str, float]:
    return {key: statistics.median(one[key] for one in figures) for key in KEYS}


def main() -> None:
    """Measure, print a table per model and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=",".join(MODELS), help="dense, moe, or both")
    parser.add_argument("--rounds", type=int, default=201)
    parser.add_argument("--steps", type=int, default=6, help="of a turn")
    parser.add_argument("--experts", default="grouped_mm", help="transformers' experts: grouped_mm, batched_mm, eager")
    options = parser.parse_args()
    results = {model: compare(model, compete(model, options)) for model in options.model.split(",")}
    shape = {"hidden": 64, "positions": 16, "samples": 1, "depths": DEPTHS, "experts": options.experts}
    setting = {"rounds": options.rounds, "steps": options.steps, **shape}
    print_json({"benchmark": "host_time", "machine": machine("cpu"), **setting, "layers": results})


if __name__ == "__main__":
    main()
