"""Findings about a run: clauses on what a reader may want to change, each with a link to the figure that shows it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from statistics import fmean, median
from typing import Any

from megapar.planning.plan import Plan
from megapar.tools.run_page.curve_sections import values
from megapar.tools.run_page.document import place_of
from megapar.tools.run_page.expert_section import BUSIEST, EACH
from megapar.tools.run_page.plan_comparison import EXPOSED, PIPELINE, WHERE, measured_parts
from megapar.tools.run_page.run_folder import RunFolder

WAITS = 0.1  # of a step: another layout or more overlap could win this much, and less is within the scatter of steps
SLOW = 1.2  # times the median rank's work: what a warm device loses in clock is less
BUSY = 1.5  # times the mean: beyond a capacity factor of 1.25 and the scatter of a balanced router
IDLE = 0.1  # of the mean: such an expert hardly learns
DROPPED = 0.01  # of the pairs; a token then passes a layer by its residual alone
SKIPPED = 0.01  # of the steps: more than a scale of fp16 that is tried once in a while
RISEN = 0.01  # of the lowest evaluation loss: more than evaluations of one model differ from step to step
OFF_PLAN = 1.25  # times the planned step, whose own error is several percent

Finding = tuple[str, str]
"""A clause, and the title of the figure that shows it."""


def sentence(run: RunFolder, plan: Plan | None) -> str:
    """Return the findings as one sentence of HTML; "" without any."""
    found = [
        f'<a href="#{place_of(title)}">{escape(clause)}</a>'
        for part in (_of_a_step(run, plan), _of_experts(run), _of_losses(run))
        for clause, title in part
    ]
    return f'<p class="findings">{"; ".join(found)}.</p>' if found else ""


def _of_a_step(run: RunFolder, plan: Plan | None) -> Iterator[Finding]:
    parts = measured_parts(run)
    seconds = sum(parts.values())
    for part, what in ((EXPOSED, "waits for messages"), (PIPELINE, "is the pipeline's bubble and its messages")):
        if seconds and parts[part] >= WAITS * seconds:
            yield f"{_percent(parts[part] / seconds)} of a step {what}", WHERE
    if plan is not None and plan.kind.kernels != "cpu" and seconds >= OFF_PLAN * plan.speed.step_seconds:
        yield f"a step takes {seconds / plan.speed.step_seconds:.1f} × the planned time", WHERE
    later = _later(run.records)
    most, half = (dict(values(later, f"rank_seconds.{which}")) for which in ("max", "p50"))
    factor = median([most[at] / half[at] for at in half if half[at]] or [1.0])
    if factor >= SLOW:
        yield f"the slowest rank works {factor:.1f} × as long as the median", "Work of the ranks"


def _of_experts(run: RunFolder) -> Iterator[Finding]:
    layers = [record["layers"] for record in _later(run.experts)]
    if layers and (most := fmean(layer["max"] for record in layers for layer in record)) >= BUSY:
        yield f"the busiest expert has {most:.1f} × the mean load", BUSIEST
    loads = [record["loads"] for record in _later([record for record in run.experts if record.get("loads")])]
    if loads:
        of_expert = [fmean(one) for layer in zip(*loads, strict=False) for one in zip(*layer, strict=False)]
        idle = sum(load < IDLE for load in of_expert)
        if idle:
            yield f"{idle:,} of {len(of_expert):,} experts get less than a tenth of the mean load", EACH
    topk = run.facts.get("configuration", {}).get("moe_router_topk", {}).get("value") or 0
    first, last = run.records[0], run.records[-1]
    pairs = (last["consumed_tokens"] - first["consumed_tokens"]) * topk * len(layers[-1]) if layers else 0
    dropped = sum(record.get("dropped_tokens", 0) for record in run.records[1:])
    if pairs and dropped >= DROPPED * pairs:
        yield f"{_percent(dropped / pairs)} of the (token, choice) pairs are dropped", "Dropped (token, choice) pairs"


def _of_losses(run: RunFolder) -> Iterator[Finding]:
    evaluated = values(run.records, "eval_loss")
    if evaluated:
        at, lowest = min(evaluated, key=lambda point: point[1])
        if evaluated[-1][1] >= lowest * (1 + RISEN):
            yield (
                f"the evaluation loss has risen since iteration {at:,} ({lowest:.3g} to {evaluated[-1][1]:.3g})",
                "Loss",
            )
    skipped = sum(bool(record.get("skipped")) for record in run.records)
    if skipped >= SKIPPED * len(run.records) and skipped:
        yield f"{skipped:,} of {len(run.records):,} steps were skipped", "Gradient norm"


def _later(records: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the last quarter, which has left the start of the run behind."""
    return records[-max(1, len(records) // 4) :] if records else ()


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.02 else f"{100 * share:.1f} %"
