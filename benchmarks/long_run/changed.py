"""A run in fp64 whose layout changes half-way, against one process that does all steps.

    python -m benchmarks.long_run.changed [--steps 40] [--results FOLDER]

One process; experts over two processes until half of the steps; then tensors over two processes, which load that
checkpoint. Losses and gradient norms may differ by 1e-10 of their value, and every parameter at the end by 1e-9 of its
largest element. Status 1 if one differs by more.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.long_run.shape import EXPERTS, SHAPE, TENSORS
from benchmarks.support.table import machine, print_json, print_table
from megapar.checkpoints.export.to_hf import Saved
from megapar.checkpoints.save_load.folder import find
from megapar.core.box import Box
from megapar.model.spec import table_of

ROOT = Path(__file__).parents[2]
NAMES = ("loss", "lm_loss", "grad_norm")
SERIES, PARAMETERS = 1e-10, 1e-9  # of the tolerances of tests/equivalence


def train(folder: Path, processes: int, steps: int, *flags: str) -> dict[int, dict[str, float]]:
    """Train to the last step, or until --exit-interval, and return the metrics by iteration."""
    metrics = folder / "metrics.jsonl"
    line = [sys.executable, "-m", "megapar.tools.main", "launch", "--nproc-per-node", str(processes), "pretrain_moe.py"]
    line += [*SHAPE, "--dtype", "fp64", "--micro-batch-size", "1", "--global-batch-size", "2", "--eval-interval", "0"]
    line += ["--train-iters", str(steps), "--log-interval", "1", "--metrics-jsonl", str(metrics)]
    line += ["--save", str(folder), "--async-save", *flags]
    subprocess.run(line, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, stdout=subprocess.DEVNULL)
    return {record["iteration"]: record for record in map(json.loads, metrics.read_text().splitlines())}


def farthest(got: Mapping[int, Mapping[str, float]], want: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """Return the largest relative difference of each series."""
    return {
        name: max(abs(got[step][name] - want[step][name]) / abs(want[step][name]) for step in want) for name in NAMES
    }


def farthest_parameter(got: Path, want: Path) -> tuple[str, float]:
    """Return the parameter that differs most between two checkpoints, relative to its largest element."""
    mine, theirs = (Saved(find(root)) for root in (got, want))
    differences = {}
    for spec in table_of(theirs.sizes):
        a, b = (saved.read(spec, Box.whole(spec.shape)) for saved in (mine, theirs))
        differences[spec.name] = float((a - b).abs().max() / b.abs().max().clamp_min(1e-300))
    name = max(differences, key=differences.__getitem__)
    return name, differences[name]


def main() -> int:
    """Train three times, compare, print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    half = str(options.steps // 2)
    with tempfile.TemporaryDirectory() as base:
        alone, first, rest = (Path(base) / name for name in ("alone", "first", "rest"))
        want = train(alone, 1, options.steps, "--ep-degree", "1")
        got = train(first, 2, options.steps, *EXPERTS, "--exit-interval", half)
        got |= train(rest, 2, options.steps, *TENSORS, "--load", str(first))
        found = farthest(got, want)
        name, parameter = farthest_parameter(rest, alone)
    rows = [(what, f"{value:.1e}", f"{SERIES:g}") for what, value in found.items()]
    print_table(
        ("relative difference", "largest", "allowed"),
        [*rows, (f"parameters ({name})", f"{parameter:.1e}", f"{PARAMETERS:g}")],
    )
    bad = max(found.values()) > SERIES or parameter > PARAMETERS or len(got) != options.steps
    result = {
        "benchmark": "long run, layout changed",
        "machine": machine("cpu"),
        "steps": options.steps,
        "differences": {**found, "parameters": parameter},
    }
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "changed.json").write_text(json.dumps(result, indent=1) + "\n")
    print_json(result)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
