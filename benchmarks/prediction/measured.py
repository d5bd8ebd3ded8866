"""Predictions of the planner for each benchmark of this repository, next to what was measured.

    python -m benchmarks.prediction.measured

Each benchmark's ``predicted.py`` says which rates its plan gets from measured rows (*given* in the table). Nothing is
fitted to the others. Errors are shares of the measured figure; of a time of waiting, shares of the messages' own time.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import NamedTuple

from benchmarks.support.prediction import COLUMNS, Row
from benchmarks.support.table import print_table

PREDICTED = (
    "ampipe_rows",
    "communication_hiding",
    "context_parallel",
    "node_dispatch",
    "pipeline",
    "recompute",
    "sharding",
    "step_hiding",
    "tensor_parallel",
    "throughput",
)
# Benchmarks whose figure the planner does not predict, with the reason.
UNPREDICTED: Mapping[str, str] = {
    "agreement": "time of the store and of comparing text before a run; no step",
    "checkpoint": "time of disks, hashes and copies; no step",
    "convert": "memory of reading and writing files; no step",
    "data": "time and memory of reading text; a plan takes batches as given",
    "ernie_tasks": "losses and accuracies; a plan has no values",
    "gpu_model": "a model of layers with messages from traced kernels; one GPU has run no such layer",
    "guards": "a hundredth of a step, below the error of a plan",
    "host_time": "the host's time for a layer too small to compute; a plan has the launches of a GPU",
    "long_run": "growth of times and memory over 600 steps; a plan has one step",
    "prediction": "published runs, in this folder's own tables",
    "reliability": "a thousandth of a step, and the start of processes",
    "revisions": "ratios of two trees of megapar, which have the same plan",
}
ALLOWED = 0.2  # error of the others than the following


class Miss(NamedTuple):
    """Rows whose error is larger.

    Attributes:
        benchmark: Their benchmark.
        rows: Their names.
        reason: The reason.
    """

    benchmark: str
    rows: tuple[str, ...]
    reason: str


_SHORT_MESSAGES = ("ampipe 2", "ampipe 4", "cross-layer 2", "cross-layer 4", "pipe-experts", "ampipe 2, pipe-experts")
MISSES = (
    Miss(
        "communication_hiding",
        tuple(f"400mbit, {way}" for way in _SHORT_MESSAGES),
        "not known; messages of 5 to 22 ms wait longer than by the timeline, and the README lists what is excluded",
    ),
    Miss(
        "sharding",
        ("link, bf16, stage 3", "link, fp32, stage 3"),
        "FSDP2's collectives by gloo use one direction of the link at a time, so that messages take twice as long",
    ),
    Miss(
        "tensor_parallel",
        ("800mbit, pieces",),
        "sending takes the time of the core that computes (0.3 s for the 80 MB of a step, by the README of sharding), "
        "which shows where products are the longer part",
    ),
    Miss(
        "throughput",
        ("moe, two processes, sharded",),
        "parameters and gradients pass through the cores that compute, and a plan hides them; the race that gives the "
        "rate was at another time",
    ),
)


def rows() -> dict[str, list[Row]]:
    """Return the rows of each benchmark that is predicted."""
    return {name: importlib.import_module(f"benchmarks.{name}.predicted").rows() for name in PREDICTED}


def main() -> None:
    """Print the table, the reasons of the known misses, and what is not predicted."""
    found = rows()
    print_table(("benchmark", *COLUMNS), [(name, *row.cells) for name, all_ in found.items() for row in all_])
    print_table(("benchmark", "rows", "reason of an error above 20 %"), [_cells(miss) for miss in MISSES])
    print_table(("benchmark", "why nothing is predicted"), list(UNPREDICTED.items()))


def _cells(miss: Miss) -> tuple[str, ...]:
    return miss.benchmark, "; ".join(miss.rows), miss.reason


if __name__ == "__main__":
    main()
