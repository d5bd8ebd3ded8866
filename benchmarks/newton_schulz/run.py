"""The share of a step that Muon's iterations take, and of the link that its messages take: run, traced and planned.

    python -m benchmarks.newton_schulz.run [--steps 6]

Two ranks on a CPU train a dense decoder at sharding stage 1. The trace runs the same step on fake tensors, as rank 0.
Seconds are medians of the steps after the first; iterations are those of the busier rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.support.table import machine, print_json, print_table
from megapar.arguments import parse
from megapar.planning.devices import device_kind
from megapar.planning.plan import Plan
from megapar.tools.tracing.trace import trace

ROOT = Path(__file__).parents[2]
RANKS = 2
SHAPE = (
    *("--num-layers", "4", "--hidden-size", "256", "--num-attention-heads", "4", "--ffn-hidden-size", "768"),
    *("--num-experts", "0", "--seq-length", "128", "--vocab-size", "1024", "--dtype", "fp32"),
)
RUN = ("--micro-batch-size", "4", "--global-batch-size", "64", "--eval-interval", "0", "--log-interval", "1")
MUON = ("--optimizer", "muon", "--muon-extra-scale-factor", "0.2", "--data-path", "mock")
PUBLISHED = {
    "Moonlight, planned": ("configs/moonlight-16b-a3b.yaml", "h800-80g"),
    "GLM-4.5-Air, planned": ("configs/glm-4.5-air.yaml", "h800-80g"),
    "Kimi K2, planned": ("configs/kimi-k2.yaml", "h800-80g"),
}
MESSAGES = "stage/all_to_all"
Row = Mapping[str, float]


def measure(flags: Sequence[str], steps: int) -> Row:
    """Run so many steps on two ranks. Returns seconds of a step and of its iterations and waits, and bytes."""
    with tempfile.TemporaryDirectory() as name:
        metrics, noted = Path(name, "metrics.jsonl"), Path(name, "iterations.jsonl")
        line = [sys.executable, "-m", "megapar.tools.main", "launch", "--nproc-per-node", str(RANKS)]
        line += ["benchmarks/newton_schulz/rank.py", *flags, "--train-iters", str(steps), "--device", "cpu"]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "BENCHMARK_ITERATIONS": str(noted)}
        line += ["--metrics-jsonl", str(metrics)]
        subprocess.run(line, cwd=ROOT, env=environ, stdout=subprocess.DEVNULL, check=True)
        records = [json.loads(text) for text in metrics.read_text().splitlines()][1:]
        lines = [json.loads(text) for text in noted.read_text().splitlines()]
    ranks = [[one["seconds"] for one in lines if one["rank"] == rank and one["iteration"] > 1] for rank in range(RANKS)]
    return {
        "step": statistics.median(record["iteration_seconds"] for record in records),
        "iterations": max(map(statistics.median, ranks)),
        "waited": statistics.median(record["exposed_seconds"].get(MESSAGES, 0.0) for record in records),
        **sent(records[-1]["sent_bytes"]),
    }


def sent(traffic: Mapping[str, float]) -> Row:
    """Return the bytes of matrices, and those of all collectives of a step but for sums of scalars over the world."""
    counted = {name: size for name, size in traffic.items() if not name.startswith(("world/", "data/"))}
    return {"matrices": counted.get(MESSAGES, 0.0), "all": sum(counted.values())}


def planned(plan: Plan) -> Row:
    """Return a plan's figures, without waits. Bytes are the first stage's."""
    seconds = {"step": plan.speed.step_seconds, "iterations": plan.speed.newton_schulz_seconds}
    return {**seconds, "link": plan.speed.matrix_seconds, **sent(plan.traffic[0])}


def figures(shape: Sequence[str], steps: int) -> dict[str, Row]:
    """Return the figures of a run on two ranks, of its trace and of its plan."""
    flags = (*shape, *RUN, *MUON)
    config = parse("moe", [*flags, "--validate-only", "--world-size", str(RANKS)], {})
    return {
        "run": measure(flags, steps),
        "trace": sent(trace(config, 0).sent_bytes),
        "plan": planned(Plan(config, device_kind("cpu"))),
    }


def main() -> None:
    """Measure, print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    found = figures(SHAPE, options.steps)
    for name, (path, kind) in PUBLISHED.items():
        line = ["--config", str(ROOT / path), "--data-path", "mock", "--validate-only"]
        found[name] = planned(Plan(parse("moe", line, {}), device_kind(kind)))
    rows = []
    for name, row in found.items():
        step = row.get("step", 0.0)
        shares = [f"{row[part] / step:.2%}" if part in row else "" for part in ("iterations", "waited", "link")]
        size = [f"{row['matrices'] / 2**20:,.2f}", f"{row['matrices'] / row['all']:.2%}"]
        rows.append([name, f"{step:.3f}" if step else "", *shares, *size])
    print_table(["", "s/step", "iterations", "waits", "link", "MiB of matrices", "of all bytes"], rows)
    print_json({"benchmark": "newton_schulz", "machine": machine("cpu"), "figures": found})


if __name__ == "__main__":
    main()
