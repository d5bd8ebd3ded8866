"""A run against its plan: where a step's time went, and where the memory is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from megapar.arguments import parse
from megapar.config.draft import is_given
from megapar.core.device.kinds import kind_called
from megapar.errors import ConfigError
from megapar.planning.devices import device_kind
from megapar.planning.knobs import WITHOUT_EFFECT
from megapar.planning.plan import Plan
from megapar.planning.speed import Speed
from megapar.planning.variation import command_line
from megapar.tools.run_page.curve_sections import values
from megapar.tools.run_page.figures import COLORS, Curve, Figure, StackedBar, bars, curves
from megapar.tools.run_page.run_folder import RunFolder

COMPUTATION, EXPOSED, PIPELINE = "computation and optimizer", "exposed communication", "pipeline bubble and messages"
TIME_COLORS = {COMPUTATION: "#2563eb", EXPOSED: "#ea580c", PIPELINE: "#9333ea"}
MEMORY_COLORS = {
    **{"parameters": "#2563eb", "gradients": "#0891b2", "optimizer": "#059669", "activations": "#ea580c"},
    **{"buffers": "#9333ea", "measured peak": "#475569"},
}
WHERE = "Where the time of a step went"
PARTS = "The plan has the tensors of stage 0. The sum of its parts, each at its highest moment, bounds their peak."
_OF_A_RESUME = ("override_data", "override_opt_param_scheduler")
LAPTOP = "The plan's speed of a CPU is that of a laptop, as an order of magnitude."
PROCESS = "On a CPU, the measured peak is that of the whole process, with the interpreter and its libraries."


def plan_of(facts: Mapping[str, Any]) -> Plan | None:
    """Return the plan of ``megapar plan`` for the run; None if the device or the configuration is unknown to it."""
    plan = _plan_or_reason(facts)
    return plan if isinstance(plan, Plan) else None


def _plan_or_reason(facts: Mapping[str, Any]) -> Plan | str:
    """Return the plan, or why there is none. Flags without an effect on a step, such as those of a resume, are out."""
    if not facts:
        return "the folder has no run.json."
    given = {
        name: tuple(entry["value"]) if isinstance(entry["value"], list) else entry["value"]
        for name, entry in facts["configuration"].items()
        if is_given(entry["origin"])
        and name not in (*WITHOUT_EFFECT, *_OF_A_RESUME, "world_size")
        and entry["value"] is not None
    }
    line = [*command_line(given), "--rules-only", "--world-size", str(facts["world_size"])]
    device = facts["device"]
    kind = device_kind("cpu") if device["type"] == "cpu" else kind_called(device["name"])
    if kind is None:
        return f"the planner does not know the device {device['name']}."
    try:
        return Plan(parse(facts["kind"], line, {}), kind)
    except ConfigError as error:
        return error.complaints[0].message


def step_time(runs: Sequence[RunFolder], plans: Sequence[Plan | None]) -> Figure | None:
    """Return a bar of the measured step, and one of the planned step, of each run."""
    measured = [measured_parts(run) for run in runs]
    planned = [{} if plan is None else planned_parts(plan.speed) for plan in plans]
    rows = _beside(runs, measured, planned)
    reasons = dict.fromkeys(why for run in runs if isinstance(why := _plan_or_reason(run.facts), str))
    note = (
        "Measured: median step since the last start, on the reporting rank; what it did not wait for counts as "
        "computation. Waits for slower ranks are in exposed communication."
    )
    if any(plan is not None and plan.kind.kernels == "cpu" for plan in plans):
        note = f"{note} {LAPTOP}"
    note = " ".join((note, *(f"No plan: {why}" for why in reasons)))
    return bars(WHERE, rows, TIME_COLORS, "seconds", note)


def measured_parts(run: RunFolder) -> dict[str, float]:
    """Return the seconds of the step whose duration is the median of the last start's later half; empty without any."""
    first = run.restarts[-1].iteration if run.restarts else 0
    records = [r for r in run.records if r["iteration"] >= first and r.get("iteration_seconds")]
    records = records[len(records) // 2 :]
    if not records:
        return {}
    record = sorted(records, key=lambda r: float(r["iteration_seconds"]))[len(records) // 2]
    exposed = record.get("exposed_seconds") or {}
    pipeline = sum(seconds for name, seconds in exposed.items() if name.split("/")[0] == "pp")
    other = sum(exposed.values()) - pipeline
    rest = max(0.0, record["iteration_seconds"] - pipeline - other)
    return {COMPUTATION: rest, EXPOSED: other, PIPELINE: pipeline}


def planned_parts(speed: Speed) -> dict[str, float]:
    """Return the same parts of the plan."""
    pipeline = speed.fill_seconds + speed.hop_seconds
    exposed = speed.exposed_seconds - speed.hop_seconds + speed.jitter_seconds
    return {COMPUTATION: speed.step_seconds - pipeline - exposed, EXPOSED: exposed, PIPELINE: pipeline}


def memory(runs: Sequence[RunFolder], plans: Sequence[Plan | None]) -> list[Figure]:
    """Return the peak memory over the iterations, and the plan's parts of it."""
    drawn = [
        Curve("measured" if len(runs) == 1 else run.name, values(run.records, "peak_memory_bytes"), color, steps=True)
        for run, color in zip(runs, COLORS * (1 + len(runs) // len(COLORS)), strict=False)
    ]
    drawn += [
        Curve("held without a tensor", values(run.records, "reserved_unused_bytes"), COLORS[1], steps=True)
        for run in runs
        if len(runs) == 1
    ]
    levels = {}
    if len(runs) == 1 and plans[0] is not None:
        levels["plan"] = float(plans[0].memory[0].peak)
    over_time = curves("Peak memory so far", drawn, quantity="bytes", levels=levels, from_zero=True)
    return [figure for figure in (over_time, _memory_parts(runs, plans)) if figure]


def _memory_parts(runs: Sequence[RunFolder], plans: Sequence[Plan | None]) -> Figure | None:
    if not any(plans):
        return None
    peaks = [max((record.get("peak_memory_bytes") or 0 for record in run.records), default=0) for run in runs]
    measured = [{"measured peak": float(peak)} if peak else {} for peak in peaks]
    parts = ("parameters", "gradients", "optimizer", "activations", "buffers")
    planned = [{} if plan is None else {part: getattr(plan.memory[0], part) for part in parts} for plan in plans]
    note = f"{PARTS} {PROCESS}" if any(plan is not None and plan.kind.kernels == "cpu" for plan in plans) else PARTS
    return bars("Memory of a rank", _beside(runs, measured, planned), MEMORY_COLORS, "bytes", note, wide=len(runs) > 1)


def _beside(
    runs: Sequence[RunFolder], measured: Sequence[Mapping[str, float]], planned: Sequence[Mapping[str, float]]
) -> list[StackedBar]:
    """Return the measured bar of each run, above its planned one, or all above one plan that they share."""
    shared = all(parts == planned[0] for parts in planned)
    rows = []
    for number, run in enumerate(runs):
        of = "" if len(runs) == 1 else f", {run.name}"
        rows += [StackedBar(f"measured{of}", measured[number])] if measured[number] else []
        if planned[number] and (not shared or run is runs[-1]):
            rows.append(StackedBar("plan" if shared else f"plan{of}", planned[number]))
    return rows


def median_of(run: RunFolder, metric: str) -> float | None:
    """Return the median of a metric over the later half of a run; None if it has none."""
    found = [y for _, y in values(run.records[len(run.records) // 2 :], metric)]
    return median(found) if found else None
