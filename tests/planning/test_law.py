"""One law: no step is shorter than the busy time of a link, or of the compute units.

``MEGAPAR_LAW_CASES`` sets the number of drawn runs; ``.ci/run`` draws an eighth of 500, besides those of the suite.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from megapar.arguments import parse
from megapar.core.device.kinds import kinds
from megapar.errors import ConfigError
from megapar.model.cost.model_cost import CommCost, UnitCost
from megapar.planning.operator_time import OperatorTime
from megapar.planning.plan import Plan
from megapar.planning.planned_run import PlannedRun, units_of
from megapar.planning.timeline import BETWEEN, INSIDE, TO_DEVICE, TO_HOST
from megapar.planning.traffic import host_traffic, recompute_messages, stage_traffic
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


CONFIGS = Path(__file__).parents[2] / "configs"
MOE = ("qwen3-30b-a3b", "mixtral-8x7b", "moonlight-16b-a3b", "deepseek-v3", "ernie-4.5-21b-a3b", "olmoe-1b-7b", "tiny")
DENSE = ("llama-3-8b", "qwen3-8b", "ernie-4.5-0.3b")
ALGORITHMS = ("megatron_cp_algo", "ulysses_cp_algo", "allgather_cp_algo")


def drawn_runs(seed: int, count: int) -> Iterator[PlannedRun]:
    """Yield so many runs. What the rules or the plan refuse is drawn again."""
    random, found = Random(seed), 0
    while found < count:
        name = random.choice(MOE * 3 + DENSE)
        kind = kinds()[random.choice(sorted(kinds()))]
        flags = [*_layout(random), *(_experts(random) if name in MOE else ()), *_options(random)]
        try:
            line = ["--config", str(CONFIGS / f"{name}.yaml"), "--rules-only", "--dtype", "auto", *flags]
            run = Plan(parse("moe", line, {}, planning=True), kind).run
        except ConfigError:
            continue
        yield run
        found += 1


def _layout(random: Random) -> list[str]:
    mp, cp, pp = (random.choice(values) for values in ((1, 1, 2, 4, 8), (1, 1, 1, 2, 4), (1, 1, 2, 4)))
    world = mp * cp * pp * random.choice((1, 2, 4, 8, 16, 32))
    flags = ["--world-size", str(world), "--mp-degree", str(mp), "--cp-degree", str(cp), "--pp-degree", str(pp)]
    flags += ["--global-batch-size", str(world * 8), "--sharding-stage", random.choice("113")]
    flags += [f"--sequence-parallel={str(mp > 1 and random.random() < 0.7).lower()}"]
    flags += ["--context-parallel-algo", random.choice(ALGORITHMS)] if cp > 1 else []
    schedules = (("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zero_bubble", 1), ("zero_bubble", 2))
    schedule, chunks = random.choice(schedules) if pp > 1 else ("1f1b", 1)
    return flags + (["--pp-schedule", schedule, "--vpp-degree", str(chunks)] if pp > 1 else [])


def _experts(random: Random) -> list[str]:
    flags = ["--ep-degree", random.choice(("2", "4", "8", "8", "16", "16", "32"))]
    degree = random.choice((1, 2, 2, 4, 4, 16))
    flags += ["--ampipe-degree", str(degree)]
    if degree > 1:
        flags += ["--ampipe-cross-layer"] if random.random() < 0.5 else []
        flags += ["--ampipe-tp-sp-comm-overlap"] if random.random() < 0.5 else []
    if random.random() < 0.3:
        flags += ["--use-pipe-experts", "--pipe-experts-multi-data", str(degree * random.choice((1, 2)))]
    return flags


def _options(random: Random) -> list[str]:
    flags = list(random.choice(((), (), ("--recompute-interval", "1"), ("--recompute-granularity", "selective"))))
    if "--recompute-interval" in flags:
        flags += random.choice(([], ["--recompute-offload"], ["--recompute-partition"]))
    flags += ["--tp-comm-overlap", random.choice(("on", "off"))] if random.random() < 0.5 else []
    flags += ["--overlap-grad-reduce", random.choice(("on", "off"))] if random.random() < 0.5 else []
    return [*flags, *random.choice(([], [], ["--optimizer", "muon"], ["--optimizer-offload"]))]
