"""One law: no step is shorter than the busy time of a link, or of the compute units.

``MEGAPAR_LAW_CASES`` sets the number of drawn runs; ``.ci/run`` draws an eighth of 500, besides those of the suite.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from megapar.model.cost.model_cost import CommCost, UnitCost
from megapar.planning.kept_inputs import TO_DEVICE, TO_HOST, host_traffic, recompute_messages
from megapar.planning.operator_time import OperatorTime
from megapar.planning.plan import Plan
from megapar.planning.planned_run import PlannedRun, units_of
from megapar.planning.timeline import BETWEEN, INSIDE
from megapar.planning.traffic import stage_traffic
from tests.planning.drawn_layouts import drawn_runs
from tests.support.shares import is_drawn

OF_THE_SUITE, SEED = 50, 28
CASES = int(os.environ.get("MEGAPAR_LAW_CASES", OF_THE_SUITE))
RESOURCES = ("compute", INSIDE, BETWEEN, TO_HOST, TO_DEVICE)


def busy_seconds(run: PlannedRun, stage: int) -> Counter[str]:
    """Seconds in which each resource of a rank must be busy in a step, summed without the timeline."""
    time, busy = OperatorTime(run), Counter[str]()
    for name, size in stage_traffic(run, stage).items():
        axis, kind = name.split("/")
        seconds = time.message(CommCost(axis, kind, size, "forward"))
        busy.update({INSIDE: seconds.inside, BETWEEN: seconds.between})
    for name, size in host_traffic(run, stage).items():
        busy[name.split("/")[1]] += size / run.kind.host / time.calibration.inside
    for message in (one for sent in recompute_messages(run, stage).values() for one in sent if one.axis == "mp"):
        busy[INSIDE] += time.message(message).inside * run.micro_batches
    for chunk in run.stages.on(stage):
        for unit in units_of(run.costs, chunk):
            busy["compute"] += 3 * forward_seconds(time, unit) * run.micro_batches
        layers = [run.costs.layer(number) for number in chunk.layers]
        for span in run.recompute_spans(len(layers)):
            for unit in layers[span.start : span.stop] if span.recomputed else ():
                busy["compute"] += forward_seconds(time, unit) * run.micro_batches
                again = [time.message(one) for one in sent_again(unit)]
                for link in (INSIDE, BETWEEN):
                    busy[link] += sum(getattr(one, link) for one in again) * run.micro_batches
    return busy


def sent_again(unit: UnitCost) -> list[CommCost]:
    """What a recomputation repeats at least: a forward's messages, except counts and combines."""
    again: list[CommCost] = []
    for operator in unit.operators:
        forward, backward = ([one for one in operator.sent if one.phase == phase] for phase in ("forward", "backward"))
        hops = sum(one.axis.startswith("ep") for one in backward) if operator.name != "combine" else 0
        again += [one for one in forward if not one.axis.startswith("ep")]
        again += [one for one in forward if one.axis.startswith("ep")][:hops]
    return again


def forward_seconds(time: OperatorTime, unit: UnitCost) -> float:
    return sum(time.products(one.products) + time.scores(one.scores) + time.rest(one) for one in unit.operators)


@pytest.fixture(scope="module")
def broken() -> dict[str, list[str]]:
    """Each resource that some step is shorter than, with those runs."""
    found: dict[str, list[str]] = {resource: [] for resource in RESOURCES}
    for number, run in enumerate(drawn_runs(SEED, CASES)):
        if number >= OF_THE_SUITE and not is_drawn(f"law {number}"):
            continue
        step = Plan(run.config, run.kind).speed.step_seconds
        for stage in range(run.config.grid.pp):
            for resource, seconds in busy_seconds(run, stage).items():
                if step < seconds * (1 - 1e-9):
                    found[resource].append(f"{run.kind.name} {run.config.grid.describe()}: {step} < {seconds}")
    return found


@pytest.mark.parametrize("resource", RESOURCES)
def test_no_step_is_shorter_than_the_busy_time_of(resource: str, broken: dict[str, list[str]]) -> None:
    assert not broken[resource]
