"""The trace on fake CUDA: its budgets as a table, and some runs of it where this machine can build the stand-in."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from scripts.trace_cuda import READ, compare, complaints
from scripts.trace_cuda_budgets import BUDGETS, COPIES, FP64, LAYERS, RUNS, WAITS, Row, Run
from scripts.tracing.tally import MatrixProduct, Sums

ROOT = Path(__file__).parents[2]


def test_every_row_bounds_a_layer_that_is_traced_and_says_why():
    names = {layer.name for layer in LAYERS}
    assert {row.layer.removesuffix(", beside") for row in BUDGETS} == names
    assert {row.figure for row in BUDGETS} == {"kernels", "products", "rows", "megabytes", "waits"}
    assert all(row.reason for row in BUDGETS)
    assert all(why for why in (*COPIES.values(), *FP64.values(), *(why for _, why in WAITS.values())))
    assert len({run.name for run in RUNS}) == len(RUNS)


def counted():
    sums = Sums()
    sums.kernels.update({("sort", "by_expert"): 10, ("mul", "weigh"): 2, ("mul", "backward"): 1})
    sums.bytes.update({("mul", "weigh"): 3_000_000, ("mul", "backward"): 1_000_000})
    sums.products.update({(MatrixProduct(64, 8, 8), "linear"): 2, (MatrixProduct(64, 8, 8), "backward"): 4})
    sums.waits.update({READ: 2, "somewhere": 1})
    return sums


@pytest.mark.parametrize(
    ("operator", "label", "figure", "found"),
    [
        ("*", "*", "kernels", 13),
        ("mul", "*", "kernels", 3),
        ("*", "weigh", "megabytes", 3),
        ("*", "*", "products", 6),
        ("*", "lin*", "products", 2),
        ("*", "*", "rows", 64),
        ("*", "*", "waits", 3),
    ],
)
def test_a_figure_above_its_row_fails_and_stands_beside_it(operator, label, figure, found):
    worse = found + 1 if figure == "rows" else found - 1
    said, ok = compare(Row("layer", operator, label, figure, found, "because"), counted())
    assert ok
    assert f"{found:,} {figure}, at {'least' if figure == 'rows' else 'most'} {found:,} (because)" in said
    said, ok = compare(Row("layer", operator, label, figure, worse, "because"), counted())
    assert not ok
    assert said.endswith("EXCEEDED")


def test_waits_and_copies_that_no_row_allows_are_named():
    sums = counted()
    sums.copies.update({("to device", "MicroBatch.to"): 3, ("to host", "elsewhere"): 1})
    sums.unaligned.update({"rows of 132 bytes": 2})
    assert list(complaints(Run("a run", "moe", 1, "", counts=2), sums)) == [
        "the host waits 1 times in somewhere, 0 allowed",
        "1 copies to host in elsewhere, which no row allows",
        "rows of 132 bytes: a part is not aligned to 16 bytes (2 times)",
    ]
    assert "the host waits 2 times in Dispatcher.read, 1 allowed" in list(
        complaints(Run("a run", "moe", 1, "", counts=1), sums)
    )


@pytest.mark.table  # as is the whole of it, by scripts/trace_cuda.sh
def test_runs_are_traced_where_a_compiler_is_there():
    runs = ["dense, documents", "pipeline, 1f1b"]
    command = [str(ROOT / "scripts" / "trace_cuda.sh"), *runs]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if "skipped:" in done.stdout:
        pytest.skip(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all right" in done.stdout
    assert all(f"trace_cuda: {run}: " in done.stdout for run in runs)
