"""Predictions against publications: the table of ``benchmarks/prediction``."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks.prediction.rows import published_rows
from benchmarks.prediction.run import mfu, plan_of, rows
from benchmarks.prediction.tokens import result, summary
from megapar.planning.speed import model_flops

PREDICTION = Path(__file__).parents[2] / "benchmarks" / "prediction"
RESIDUALS = PREDICTION / "results" / "fit.jsonl"
PLANNED = [row for row in published_rows() if not row.left_out]


def test_one_calibration_serves_every_scored_run() -> None:
    scored = [row for row in rows() if not row.why]
    errors = {row.name: abs(row.error) for row in scored}
    assert len(scored) >= 6
    assert statistics.median(errors.values()) <= 0.15, errors
    assert max(errors.values()) <= 0.25, errors


def test_published_layouts_without_plan_only_techniques_fit() -> None:
    plain = [row for row in rows() if not row.assumed]
    assert len(plain) >= 7
    assert all(row.fits for row in plain), [row.name for row in plain if not row.fits]


def test_ernie_4_5_fits_as_it_was_published() -> None:
    """300B: with its recomputed operators, without which it would not; 21B: with its optimizer on the host."""
    assert next(row for row in rows() if row.name == "ernie-4.5-300b-a47b").fits
    assert not plan_of("ernie-4.5-300b-a47b", "--recompute-interval", "0").fits
    assert plan_of("ernie-4.5-21b-a3b").fits
    assert not plan_of("ernie-4.5-21b-a3b", "--no-optimizer-offload").fits


@pytest.mark.parametrize(
    ("name", "better", "worse"),
    [
        (
            "mixtral-8x7b",
            ("--global-batch-size", "512"),
            ("--ep-degree", "4", "--mp-degree", "2", "--sequence-parallel"),
        ),
        ("gpt-117m", (), ("--recompute-interval", "1")),
        ("gpt3-175b", (), ("--recompute-interval", "1", "--recompute-granularity", "full")),
        ("megatron-h100-314b", (), ("--mp-degree", "16", "--global-batch-size", "768")),
        ("megatron-h100-119b", ("--global-batch-size", "1536"), ()),
        ("mindspeed-ampipe", (), ("--ampipe-degree", "1", "--no-ampipe-tp-sp-comm-overlap")),
    ],
)
def test_layouts_come_in_the_published_order(name: str, better: tuple[str, ...], worse: tuple[str, ...]) -> None:
    """Mixtral: ep 8 tp 1 over ep 4 tp 2; the recompute table; tensor parallelism inside a node; batch over bubble.

    Where mp changes, the batch does too, so that both layouts have as many micro-batches.
    """
    assert mfu(plan_of(name, *better), "full") > mfu(plan_of(name, *worse), "full")


def test_strong_scaling_loses_what_was_published() -> None:
    """177 B at one batch from 96 to 4,608 GPUs: 47 % to 42 %."""
    few, many = (mfu(plan_of("megatron-h100-177b", ranks=ranks), "full") for ranks in (96, 4608))
    assert few > many


def test_a_published_row_is_the_run_that_it_says() -> None:
    """Its model has the published FLOPs per token, and its batch the published accumulation, or a note says why not."""
    flops: dict[tuple[str, ...], float] = {}
    for row in PLANNED:
        columns, model = row.columns, (row.columns["model"], str(row.columns["seq"]), row.more.get("without", ""))
        if columns["tflops"]:
            if model not in flops:
                flops[model] = model_flops(row.plan.run) / row.plan.tokens_per_step
            assert flops[model] * row.tokens / 1e12 == pytest.approx(columns["tflops"], rel=0.01), row.name
        steps = columns["gbs"] / columns["mbs"] / row.data_parallel
        assert steps == columns["ga"] or "note" in row.more, row.name


def test_every_published_row_says_how_it_is_used() -> None:
    found = list(published_rows())
    assert len(found) > 100
    assert {row.use for row in found} == {"fit", "unfitted"}
    for key in ("device", "model", "precision"):
        fitted, held = ({row.columns[key] for row in PLANNED if row.use == use} for use in ("fit", "unfitted"))
        assert fitted < held, key
    assert all(row.left_out or row.tokens > 0 for row in found)


def test_rows_that_nothing_was_fitted_to_are_predicted() -> None:
    """Half of them within 8 %; a row above 20 % says why, on either side. The constants are those of the last fit."""
    scored = [row for row in PLANNED if not row.unscored]
    errors = {(row.use, row.table, row.name): row.predicted() / row.tokens - 1 for row in scored}
    unfitted = [abs(error) for (use, _, _), error in errors.items() if use == "unfitted"]
    assert len(unfitted) >= 35
    assert statistics.median(unfitted) <= 0.08
    unexplained = [row.name for row in scored if "explained" not in row.more]
    above = {name: error for (_, _, name), error in errors.items() if abs(error) > 0.2 and name in unexplained}
    assert not above
    written = [json.loads(line) for line in RESIDUALS.read_text(encoding="utf-8").splitlines()]
    residuals = {("fit", line["table"], line["row"]): line["residual"] for line in written if "bridge" in line["table"]}
    assert residuals == {key: pytest.approx(errors[key], abs=0.01) for key in errors if key[0] == "fit"}


@pytest.mark.parametrize("file", ["blind-2026.yaml", "blind-2026-second.yaml"])
def test_a_frozen_row_is_the_run_that_it_says(file: str) -> None:
    """By the published FLOPs, to the rounding of tables, unless a note says how they are counted."""
    for row in published_rows(file):
        flops = model_flops(row.plan.run) / row.plan.tokens_per_step * row.tokens / 1e12
        assert "FLOP/s" in row.more.get("note", "") or flops == pytest.approx(row.columns["tflops"], rel=0.0125)
        assert row.columns["gbs"] == row.columns["mbs"] * row.data_parallel * row.columns["ga"], row.name


@pytest.mark.parametrize(("name", "at_most"), [("blind-2026", 0.09), ("blind-2026-second", 0.2)])
def test_a_forecast_is_told_as_it_came_and_as_it_is_today(name: str, at_most: float) -> None:
    """The results are of the frozen rows, the README has both errors of each, and the second is that of today."""

    def read(part: str) -> list[dict[str, Any]]:
        text = (PREDICTION / "results" / f"{name}{part}.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]

    first, again = read(""), read("-again")
    frozen = [(row.table, row.name, row.tokens) for row in published_rows(f"{name}.yaml")]
    assert [(line["table"], line["row"], line["published"]) for line in first] == frozen
    told = (PREDICTION / "README.md").read_text(encoding="utf-8")
    for came, today, row in zip(first, again, published_rows(f"{name}.yaml", again=True), strict=True):
        assert came["error"] == pytest.approx(came["predicted"] / came["published"] - 1, abs=5e-4)
        assert result(row)["error"] == pytest.approx(today["error"], abs=0.01), row.name
        now = "not scored" if "unscored" in today else f"{today['error']:+.1%}"
        cells = (came["row"], came["table"], f"{came['published']:.0f}", f"{came['predicted']:.0f}")
        assert f"| {' | '.join(cells)} | {came['error']:+.1%} | {now} |" in told
    for lines in (first, again):
        found = summary(lines, "blind")
        numbers = f"{found['median_error']:.1%} | {found['largest_error']:.0%} | {found['above_20_percent']}"
        assert f"| {found['rows']} | {numbers} |" in told
    assert summary(again, "blind")["median_error"] <= at_most
