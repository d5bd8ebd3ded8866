"""Curves over the iterations of one run, or of several: losses, speed, memory, communication, and the router.

In the page of one run a figure has the curves of one kind, in that of several runs the same curve of each run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megapar.tools.run_page.figures import COLORS, Curve, Figure, Points, curves
from megapar.tools.run_page.run_folder import RunFolder

# One color per axis, in every figure that tells axes apart.
AXIS_COLORS = {
    **{"mp": "#2563eb", "ep": "#ea580c", "shard": "#059669", "sharding": "#059669", "pp": "#9333ea", "cp": "#0891b2"},
    **{"dp": "#db2777", "replica": "#db2777", "data": "#65a30d", "emp": "#b45309", "edp": "#dc2626"},
    **{"expert_shard": "#4d7c0f", "expert_replica": "#be185d", "world": "#475569"},
}
LINES = ("solid", "dashed", "dotted")


@dataclass(frozen=True)
class Panel:
    """Metrics that are drawn in one figure.

    Attributes:
        names: Metric -> its name in the key. One that ends in ``.`` is an object with a curve per entry.
        quantity: ``bytes``, ``seconds``, ``share``, or the unit.
        noisy: Its values scatter from step to step, so that a mean helps.
        dots: Each value is marked.
        steps: A value holds until the next one.
        from_zero: The axis begins at 0.
        entries: Expression that finds the entries of an object; all by default.
        least: It is left out if fewer of its metrics have values.
    """

    title: str
    names: Mapping[str, str]
    quantity: str = ""
    noisy: bool = False
    dots: bool = False
    steps: bool = False
    from_zero: bool = False
    note: str = ""
    entries: str = ""
    least: int = 1


LOSSES = (
    Panel("Loss", {"loss": "training", "eval_loss": "evaluation"}, "nats per token", noisy=True),
    Panel("Loss of each evaluation set", {"eval_sets.": ""}, "nats per token"),
    Panel("Bits per byte", {"eval_bits_per_byte": "evaluation", "eval_sets_bits_per_byte.": ""}, "bits"),
    Panel("Scores of tasks", {"eval_scores.": ""}, "share", from_zero=True, entries="(?<!/perplexity)$"),
    Panel("Perplexity of completions", {"eval_scores.": ""}, entries="/perplexity$"),
    Panel(
        "Terms of the loss",
        {"lm_loss": "next token", "mtp_loss": "multi-token prediction", "sop_loss": "sentence order"},
        "nats per prediction",
        noisy=True,
        least=2,
    ),
    Panel("Losses of tasks", {"tasks.": ""}, noisy=True, entries=r"(?<!_accuracy)$"),
    Panel("Accuracy of tasks", {"tasks.": ""}, "share", noisy=True, from_zero=True, entries="_accuracy$"),
    Panel("Gradient norm", {"grad_norm": "before clipping"}, noisy=True),
    Panel("Norm of an update, by class of tensors", {"update_norms.": ""}, note="Of the change of all its weights."),
    Panel("Norm of the weights, by class of tensors", {"weight_norms.": ""}),
    Panel("Largest score of a head, for QK-clip", {"qk_clip_largest": "all heads"}, noisy=True),
    Panel("Heads that QK-clip scaled", {"qk_clipped_heads": "all layers"}, from_zero=True),
    Panel("Learning rate", {"lr": "learning rate", "decoupled_lr": "word embedding and head"}),
    Panel("Weight decay", {"weight_decay": "weight decay"}),
    Panel("Loss scale", {"loss_scale": "loss scale"}, steps=True),
)
SPEED = (
    Panel("Throughput", {"tokens_per_second": "all ranks"}, "tokens per second", noisy=True, from_zero=True),
    Panel("Model FLOPs utilization", {"mfu": "share of the peak"}, "share", noisy=True, from_zero=True),
    Panel("Time per step", {"iteration_seconds": "step"}, "seconds", noisy=True, from_zero=True),
    Panel(
        "Work of the ranks",
        {"rank_seconds.p50": "median rank", "rank_seconds.max": "slowest rank"},
        "seconds",
        noisy=True,
        from_zero=True,
        note="Time per step without waits for other ranks, in the median step between two reports.",
    ),
)
COMMUNICATION = (
    Panel(
        "Exposed communication",
        {"exposed_communication_seconds": "total"},
        "seconds",
        noisy=True,
        from_zero=True,
        note="Time per step in which the reporting rank waited for messages.",
    ),
    Panel(
        "Exposed communication by axis and collective", {"exposed_seconds.": ""}, "seconds", noisy=True, from_zero=True
    ),
    Panel("Sent by the reporting rank in a step", {"sent_bytes.": ""}, "bytes", from_zero=True),
)
ROUTER = (
    Panel("Load balancing loss", {"aux_loss": "auxiliary loss"}, noisy=True),
    Panel("Router z-loss", {"z_loss": "z-loss"}, noisy=True),
    Panel("Sequence balancing loss", {"sequence_loss": "per sample"}, noisy=True),
    Panel("Orthogonality loss", {"orthogonal_loss": "router weight"}, noisy=True),
    Panel("Dropped (token, choice) pairs", {"dropped_tokens": "per step"}, from_zero=True),
)


def panels(runs: Sequence[RunFolder], wanted: Sequence[Panel]) -> list[Figure]:
    """Return the figures of the panels that have values."""
    return [figure for panel in wanted for figure in _figures(runs, panel)]


def _figures(runs: Sequence[RunFolder], panel: Panel) -> list[Figure]:
    metrics = {
        metric: name
        for metric, name in _metrics(runs, panel).items()
        if any(values(run.records, metric) for run in runs)
    }
    if len(metrics) < panel.least:
        return []
    if len(runs) == 1:
        drawn = [_draw(panel, panel.title, _one_run(runs[0], panel, metrics))]
        return [figure for figure in drawn if figure]
    figures = []
    for metric, name in metrics.items():
        alone = len(panel.names) == 1 and name in panel.names.values()
        title = panel.title if alone or name == panel.title.lower() else f"{panel.title}: {name}"
        found = [
            _curve(panel, metric, run.name, points, COLORS[number % len(COLORS)])
            for number, run in enumerate(runs)
            if (points := values(run.records, metric))
        ]
        figures.append(_draw(panel, title, found))
    return [figure for figure in figures if figure]


def _one_run(run: RunFolder, panel: Panel, metrics: Mapping[str, str]) -> list[Curve]:
    """Return the curves of a run. Those of one axis have its color, and a kind of line for each collective."""
    drawn: list[Curve] = []
    for metric, name in metrics.items():
        points = values(run.records, metric)
        of_axis = "/" in name and not metric.startswith("eval_")
        color = AXIS_COLORS.get(name.split("/")[0], "") if of_axis else COLORS[len(drawn) % len(COLORS)]
        color = color or COLORS[-1]
        alike = sum(curve.color == color for curve in drawn)
        curve = _curve(panel, metric, name, points, color)
        drawn.append(replace(curve, line=LINES[alike % len(LINES)]))
    return drawn


def _curve(panel: Panel, metric: str, name: str, points: Points, color: str) -> Curve:
    rare = metric.startswith("eval_")
    return Curve(name, points, color, noisy=panel.noisy and not rare, dots=panel.dots or rare, steps=panel.steps)


def _draw(panel: Panel, title: str, drawn: Sequence[Curve]) -> Figure | None:
    constant = {y for curve in drawn for _, y in curve.points}
    if panel.title == "Loss scale" and constant == {1.0}:  # of other dtypes than fp16
        return None
    return curves(title, drawn, quantity=panel.quantity, from_zero=panel.from_zero, note=panel.note)


def _metrics(runs: Sequence[RunFolder], panel: Panel) -> dict[str, str]:
    """Return metric -> name in the key, with those of the entries of objects."""
    found = {}
    for metric, name in panel.names.items():
        if not metric.endswith("."):
            found[metric] = name
            continue
        entries = {entry for run in runs for record in run.records for entry in record.get(metric[:-1]) or {}}
        found |= {f"{metric}{entry}": entry for entry in sorted(entries) if re.search(panel.entries, entry)}
    return found


def values(records: Sequence[Mapping[str, Any]], metric: str) -> list[tuple[float, float]]:
    """Return (iteration, value) where a metric, or ``object.entry``, has one; none if it is always 0."""
    outer, _, entry = metric.partition(".")
    points = []
    for record in records:
        value = record.get(outer)
        if entry:
            value = (value or {}).get(entry)
        if value is not None:
            points.append((record["iteration"], float(value)))
    return points if any(y for _, y in points) else []
