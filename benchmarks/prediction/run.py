"""Predictions of ``megapar plan`` for published runs, next to what was published: one calibration for all."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from megapar.arguments import SCRIPTS, parse
from megapar.config.read import about
from megapar.planning.assume import assumed
from megapar.planning.calibration import MEGATRON
from megapar.planning.devices import device_kind
from megapar.planning.plan import Plan
from megapar.planning.planned_run import PlannedRun
from megapar.planning.speed import of_all_layers
from megapar.tools.plan import DEFAULT_KIND

ROOT = Path(__file__).parents[2]
ROWS = Path(__file__).with_name("published.yaml")


@dataclass(frozen=True)
class Row:
    """One published run.

    Attributes:
        name: Name of its file in configs/, with more flags.
        device: Kind of its devices.
        published: Published MFU in percent, on the publication's basis.
        predicted: The predicted MFU on the same basis.
        fits: It fits into the memory of its devices.
        assumed: It assumes techniques that megapar does not implement.
        why: What the publication does not state, for which it is not scored; "" if it is.
        source: The publication.
    """

    name: str
    device: str
    published: float
    predicted: float
    fits: bool
    assumed: bool
    why: str
    source: str

    @property
    def error(self) -> float:
        """Error of the prediction relative to the published figure."""
        return self.predicted / self.published - 1


def plan_of(name: str, *flags: str, ranks: int | None = None, software: str = MEGATRON, assume: str = "") -> Plan:
    """Return the plan of a file in configs/, on its device. assume: techniques that only a plan supports."""
    path = ROOT / "configs" / f"{name}.yaml"
    said = about([str(path)])
    kind = {script: kind for kind, script in SCRIPTS.items()}[said.script]
    line = ["--config", str(path), *flags, "--validate-only"]
    line += ["--world-size", str(ranks)] if ranks else []
    device = device_kind(said.device_kind or DEFAULT_KIND)
    return Plan(parse(kind, line, {}, planning=True), device, replace(assumed(assume.split()), software=software))


def published_plan(entry: Mapping[str, Any]) -> Plan:
    """Return the plan of an entry of ``published.yaml``."""
    flags = f"{entry.get('published', '')} {entry.get('flags', '')}".split()
    software = entry.get("software", MEGATRON)
    return plan_of(entry["config"], *flags, software=software, assume=entry.get("assume", ""))


def attention_flops(run: PlannedRun) -> float:
    """Return the FLOPs of attention's core in a step, forward and backward; of causal attention only the lower half."""
    return 3 * of_all_layers(run, sum(operator.scores for operator in run.costs.attention))


def mfu(plan: Plan, basis: str) -> float:
    """Return the MFU in percent, on a publication's basis."""
    share = attention_flops(plan.run) / plan.speed.flops if basis == "full" else 0.0
    return 100 * plan.speed.mfu * (1 + share)


def rows() -> list[Row]:
    """Return all published runs."""
    found = []
    for entry in yaml.safe_load(ROWS.read_text(encoding="utf-8")):
        flags = entry.get("flags", "")
        plan = published_plan(entry)
        predicted = mfu(plan, entry["basis"])
        unstated, techniques = entry.get("unstated", ""), bool(plan.run.assumed.words)
        name = f"{entry['config']} {flags}".strip()
        found.append(
            Row(name, plan.kind.name, entry["mfu"], predicted, plan.fits, techniques, unstated, entry["source"])
        )
    return found


def main() -> None:
    """Print the table and one JSON line."""
    table = rows()
    print("| run | published MFU | predicted | error | fits | scored |")
    print("|---|---|---|---|---|---|")
    for row in table:
        fits = ("yes" if row.fits else "no") + (" (with plan-only techniques)" if row.assumed else "")
        scored = f"no: {row.why}" if row.why else "yes"
        print(f"| {row.name} | {row.published:.1f} % | {row.predicted:.1f} % | {row.error:+.1%} | {fits} | {scored} |")
    errors = [abs(row.error) for row in table if not row.why]
    print(json.dumps({"median_error": statistics.median(errors), "largest_error": max(errors), "rows": len(errors)}))


if __name__ == "__main__":
    main()
