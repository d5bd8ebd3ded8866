"""Predictions of ``megapar plan`` for the races, next to the measurements."""

from __future__ import annotations

from functools import partial
from typing import Any

from scripts.gpu_day.day import Answer, Day

RACES = "throughput"


def run(day: Day) -> None:
    """Compare each plan with the contestant that ran its flags."""
    lines = {what: line for (part, what), line in day.findings.read().items() if part == RACES}
    plans = [what for what in lines if what.startswith("plan of ")]
    if not plans:
        day.attempt("plans", lambda: Answer(None, {"not_to_be_had": "no race has been planned: run throughput first"}))
    for what in plans:
        model, _, way = what.removeprefix("plan of ").partition(" ")
        day.attempt(f"{model} {way}".strip(), partial(_beside, lines[what], _measured(lines, model, way)))


def _measured(lines: dict[str, dict[str, Any]], model: str, way: str) -> dict[str, Any] | None:
    """Return the contestant with these flags; megapar's first contestant has no flags in its name."""
    named = lines.get(f"{model}: megapar {way or 'plain'}")
    return named or lines.get(f"{model}: megapar")


def _beside(plan: dict[str, Any], measured: dict[str, Any] | None) -> Answer:
    if measured is None or "seconds" not in plan.keys() & measured.keys():
        return Answer(None, {"not_to_be_had": plan.get("not_to_be_had", "the race has no figures")})
    return Answer(
        None,
        {
            "seconds": {"predicted": plan["seconds"], "measured": measured["seconds"]},
            "predicted_to_measured_seconds": plan["seconds"] / measured["seconds"],
            "peak_bytes": {"predicted": plan["peak_bytes"], "measured": measured["peak_bytes"]},
            "predicted_to_measured_bytes": plan["peak_bytes"] / measured["peak_bytes"],
        },
    )
