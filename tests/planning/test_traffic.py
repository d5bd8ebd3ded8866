"""Traffic: groups on nodes, inputs that recomputed units keep, messages of a pipeline, bytes of communicators."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from megapar.arguments import Config, parse
from megapar.core.comm.world import World
from megapar.core.device.base import Device
from megapar.core.device.kinds import COMMUNICATORS, DeviceKind
from megapar.core.grid import DENSE_AXES, Grid
from megapar.core.pipeline.lookahead import schedule_ahead
from megapar.core.pipeline.schedule import BACKWARD, FORWARD, make_schedule
from megapar.core.pipeline.simulate import RUNNERS, Costs, simulate
from megapar.model.cost.model_cost import CommCost
from megapar.planning.devices import device_kind
from megapar.planning.plan import Plan
from megapar.planning.planned_run import PlannedRun
from megapar.planning.speed import beside_receives, hops
from megapar.planning.traffic import (
    Link,
    _program,
    fetched_share,
    host_traffic,
    link,
    recompute_messages,
    stage_traffic,
)
from megapar.training.reports.opening import model_lines


def groups(grid: Grid) -> dict[str, tuple[int, ...]]:
    """The groups of rank 0, rank by rank."""
    found = {axis: grid.group(axis, 0) for axis in (*DENSE_AXES, "ep", "emp", "edp")}
    for prefix, expert in (("", False), ("expert_", True)):
        found[f"{prefix}shard"] = grid.shard_group(0, expert=expert)
        found[f"{prefix}replica"] = grid.replica_group(0, expert=expert)
    return {**found, "stage": grid.group(("dp", "sharding", "cp", "mp"), 0), "world": tuple(range(grid.world_size))}


def grids(draw: random.Random, count: int) -> list[Grid]:
    found: list[Grid] = []
    while len(found) < count:
        order = tuple(draw.sample(DENSE_AXES, 5)) if draw.random() < 0.5 else DENSE_AXES
        sizes = {axis: draw.choice((1, 2, 3, 4)) for axis in DENSE_AXES}
        try:
            ep, emp = draw.choice((1, 2, 3, 4, 6, 8, 16)), draw.choice((1, sizes["mp"]))
            found.append(Grid(**sizes, ep=ep, emp=emp, order=order))
        except ValueError:
            continue  # no such expert groups on these ranks
    return found


@pytest.mark.parametrize("node", [1, 6, 8])
def test_links_are_those_of_the_groups_ranks(node: int) -> None:
    for grid in grids(random.Random(node), 60):
        for axis, ranks in groups(grid).items():
            nodes = Counter(rank // node for rank in ranks)
            found = link(grid, axis, node)
            assert (found.ranks, found.local, found.nodes) == (len(ranks), max(nodes.values()), len(nodes)), (
                grid,
                axis,
            )


def test_the_hops_of_a_dispatch_by_node_are_on_links_of_their_own() -> None:
    grid = Grid(sharding=32, ep=32)
    assert link(grid, "ep_between", 8) == Link("ep_between", 4, 1, 4)
    assert link(grid, "ep_within", 8) == Link("ep_within", 8, 8, 1)
    assert link(grid, "ep_between", 8).outside("all_to_all") == 1
    assert link(grid, "ep_within", 8).outside("all_to_all") == 0


MODEL = (
    *("--num-experts", "0", "--num-layers", "8", "--hidden-size", "64", "--num-attention-heads", "4"),
    *("--seq-length", "32", "--vocab-size", "128", "--micro-batch-size", "1", "--dtype", "bf16"),
    *("--recompute-interval", "1"),
)
X = 32 * 64 * 2  # bytes of an input: positions, features, bytes


def planned(world_size: int, *flags: str) -> PlannedRun:
    config = parse("moe", [*MODEL, *flags, "--validate-only", "--world-size", str(world_size)], {})
    return PlannedRun(config, device_kind("h100-80g"))


@pytest.mark.parametrize(
    "flags",
    [
        ("--gradient-merge-acc-step", "3"),
        ("--pp-degree", "4", "--gradient-merge-acc-step", "6"),
        ("--pp-degree", "4", "--pp-schedule", "gpipe", "--gradient-merge-acc-step", "3"),
        ("--pp-degree", "2", "--pp-schedule", "interleaved", "--vpp-degree", "2", "--gradient-merge-acc-step", "6"),
        ("--pp-degree", "4", "--pp-schedule", "interleaved", "--vpp-degree", "2", "--gradient-merge-acc-step", "4"),
    ],
)
def test_orders_are_those_of_the_schedules(flags: tuple[str, ...]) -> None:
    run = planned(4, *flags)
    pp, vpp = run.config.grid.pp, run.config.pipeline.vpp_degree
    if pp == 1:
        assert list(_program(run, 0, 1)) == [(True, 0), (False, 0)] * 3
        return
    schedule = make_schedule(run.schedule, pp, vpp, run.micro_batches)
    for stage, program in enumerate(schedule.programs):
        computed = [(one.kind == FORWARD, one.chunk // pp) for one in program if one.kind in (FORWARD, BACKWARD)]
        assert list(_program(run, stage, vpp)) == computed


def test_the_newest_two_units_are_copied_but_not_fetched() -> None:
    run = planned(1, "--recompute-offload", "--gradient-merge-acc-step", "2")
    messages = recompute_messages(run, 0)
    there, back = CommCost("host", "to_host", X, "forward"), CommCost("host", "to_device", X, "backward")
    assert messages == {layer: (there, back) if layer < 6 else (there,) for layer in range(8)}
    assert host_traffic(run, 0) == {"host/to_host": 2 * 8 * X, "host/to_device": 2 * 6 * X}


def test_shards_are_gathered_and_their_copies_are_smaller() -> None:
    partitioned = planned(4, "--mp-degree", "4", "--recompute-partition")
    assert host_traffic(partitioned, 0) == {}
    both = planned(4, "--mp-degree", "4", "--recompute-partition", "--recompute-offload")
    assert host_traffic(both, 0) == {"host/to_host": 8 * X / 4, "host/to_device": 6 * X / 4}
    for run in (partitioned, both):
        assert stage_traffic(run, 0)["mp/all_gather"] == 6 * X * 3 / 4


def test_forwards_of_later_micro_batches_push_units_out() -> None:
    run = planned(2, "--pp-degree", "2", "--recompute-interval", "4", "--gradient-merge-acc-step", "4")
    assert fetched_share(run, 0, 0, 0) == 0.0  # a chunk is one unit, and those of two micro-batches stay
    run = planned(2, "--pp-degree", "2", "--recompute-interval", "2", "--gradient-merge-acc-step", "4")
    assert [fetched_share(run, 0, 0, newer) for newer in (0, 1)] == [0.75, 0.75]  # but for the last micro-batch
    assert [fetched_share(run, 1, 0, newer) for newer in (0, 1)] == [0.0, 0.0]


def test_offloaded_optimizer_state_travels_both_ways_once_per_step() -> None:
    run = planned(2, "--optimizer-offload", "--gradient-merge-acc-step", "2")
    rows = sum(run.row_numel(row) for row in run.rows(0))
    assert host_traffic(run, 0) == {"host/to_host": 12 * rows, "host/to_device": 12 * rows}


def test_nothing_travels_without_the_flags() -> None:
    assert recompute_messages(planned(1), 0) == {}
    sequence = planned(2, "--mp-degree", "2", "--sequence-parallel", "--recompute-partition")
    assert recompute_messages(sequence, 0) == {}


def configured(world_size: int, *flags: str) -> Config:
    return parse("moe", [*flags, "--validate-only", "--world-size", str(world_size)], {})


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("name", "chunks"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), *(("zero_bubble", v) for v in (1, 2, 3, 4))],
)
def test_a_step_has_as_many_bare_messages_as_its_schedule(name: str, chunks: int, stages: int) -> None:
    uneven = (stages + 1, 2 * stages + 1) if name in ("gpipe", "1f1b") else ()
    for micro_batches in (stages, 2 * stages, 4 * stages, *uneven):
        line = ("--pp-degree", str(stages), "--vpp-degree", str(chunks), "--pp-schedule", name)
        size = ("--num-layers", str(stages * chunks), "--gradient-merge-acc-step", str(micro_batches))
        config = configured(stages, *line, *size)
        schedule, part = make_schedule(name, stages, chunks, micro_batches), 1 / chunks
        free, sent = (simulate(schedule, Costs(part, part, part, send), RUNNERS).end for send in (0.0, 0.02))
        assert hops(PlannedRun(config, device_kind("h100"))) == pytest.approx((sent - free) / 0.02), micro_batches


@pytest.mark.parametrize(
    ("name", "chunks", "ahead"), [("gpipe", 1, 1), ("1f1b", 1, 0), ("1f1b", 1, 2), ("zero_bubble", 1, 1)]
)
def test_a_limited_lookahead_has_no_more_bare_messages_than_planned(
    name: str, chunks: int, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = device_kind("h100")
    limited = replace(kind.device_class, receives_ahead=ahead)
    early = planned_pipeline(name, kind)
    assert beside_receives(early, 1) == kind.device_class.beside_queues[2] > beside_receives(early, 0) > 1.0
    monkeypatch.setattr(DeviceKind, "device_class", limited)
    run = planned_pipeline(name, kind)
    schedule = schedule_ahead(name, 4, chunks, 8, ahead)
    free, sent = (simulate(schedule, Costs(send=send), RUNNERS).end for send in (0.0, 0.02))
    assert 0.6 * hops(run) <= (sent - free) / 0.02 <= hops(run) + 0.01
    assert beside_receives(run, 1) == 1.0


def planned_pipeline(name: str, kind: DeviceKind) -> PlannedRun:
    line = ("--pp-degree", "4", "--pp-schedule", name, "--num-layers", "4", "--gradient-merge-acc-step", "8")
    return PlannedRun(configured(4, *line), kind)


class Gpu(Device):
    """A CPU that keeps what a GPU does."""

    type = "cuda"


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        (1, ()),
        (4, ("--sharding-degree", "4")),
        (3, ("--pp-degree", "3", "--num-layers", "3", "--gradient-merge-acc-step", "3")),
        (4, ("--sharding-degree", "2", "--mp-degree", "2", "--optimizer", "muon")),  # of the ranks of the world
        (4, ("--pp-degree", "2", "--optimizer", "muon", "--num-layers", "2", "--gradient-merge-acc-step", "2")),
        (
            8,
            (
                "--pp-degree",
                "2",
                "--mp-degree",
                "2",
                "--optimizer",
                "muon",
                "--num-layers",
                "2",
                "--gradient-merge-acc-step",
                "2",
            ),
        ),
        (8, ("--pp-degree", "4", "--mp-degree", "2", "--num-layers", "4", "--gradient-merge-acc-step", "4")),
        (
            12,
            (
                *("--pp-degree", "3", "--vpp-degree", "2", "--pp-schedule", "interleaved", "--num-layers", "6"),
                *("--gradient-merge-acc-step", "3", "--num-experts", "8", "--ep-degree", "4"),
            ),
        ),
    ],
)
def test_the_plan_counts_the_communicators_that_a_run_makes(world_size: int, flags: tuple[str, ...]) -> None:
    config = configured(world_size, *flags)
    plan = Plan(config, device_kind("h100"))
    with (
        patch.object(dist, "new_group", lambda *_, **__: object()),
        patch.dict("os.environ", LOCAL_WORLD_SIZE=str(plan.kind.node)),
    ):
        for rank in range(world_size):
            world = World(config.grid, rank, Gpu(), None, timedelta(1), range(world_size))
            if config.grid.pp > 1:
                world.make_queues(closed=plan.run.stages.last_sends_to_first)
            if plan.run.with_matrices:
                world.make_stage()
            stage = plan.memory[config.grid.dense(rank)["pp"]]
            if rank < plan.kind.node:  # further ranks of a group may lie otherwise on the nodes
                assert stage.groups == world.group_bytes
            assert stage.reserved > stage.peak + stage.groups
    assert (plan.memory[0].groups > 0) == (world_size > 1)


def test_the_hops_of_a_dispatch_by_node_have_communicators_of_their_own() -> None:
    flags = ("--ep-degree", "4", "--num-experts", "8", "--moe-dispatch")
    plain, by_node, alone = (
        Plan(configured(4, *flags, *more), device_kind("h100")).memory[0].groups
        for more in (("plain",), ("node", "--ranks-per-node", "2"), ("node", "--ranks-per-node", "1"))
    )
    axis, peer = COMMUNICATORS["cuda"].axis, COMMUNICATORS["cuda"].peer
    assert by_node == plain + 2 * axis - 2 * peer  # of four ranks of a node, two are left
    assert alone == plain + axis - 3 * peer


def test_a_run_says_at_its_start_what_its_communicators_keep() -> None:
    config = configured(4, "--sharding-degree", "4")
    for device, said in ((Gpu(), ", 2 communicators (about 0.6 GiB of buffers)"), (Device(), ", 2 communicators")):
        with patch.object(dist, "new_group", lambda *_, **__: object()):
            world = World(config.grid, 0, device, None, timedelta(1), range(4))
        job: Any = SimpleNamespace(world=world)
        assert next(model_lines(config, job, job)) == config.grid.describe() + said
