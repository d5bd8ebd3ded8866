"""Traffic: groups on nodes, by arithmetic as by counting their ranks, and the inputs that recomputed units keep."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from megapar.arguments import parse
from megapar.core.grid import DENSE_AXES, Grid
from megapar.core.pipeline.schedule import BACKWARD, FORWARD, make_schedule
from megapar.model.cost.model_cost import CommCost
from megapar.planning.devices import device_kind
from megapar.planning.planned_run import PlannedRun
from megapar.planning.traffic import (
    Link,
    _program,
    fetched_share,
    host_traffic,
    link,
    recompute_messages,
    stage_traffic,
)


def groups(grid: Grid) -> dict[str, tuple[int, ...]]:
    """The groups of rank 0, rank by rank."""
    found = {axis: grid.group(axis, 0) for axis in (*DENSE_AXES, "ep", "emp", "edp")}
    for prefix, expert in (("", False), ("expert_", True)):
        found[f"{prefix}shard"] = grid.shard_group(0, expert=expert)
        found[f"{prefix}replica"] = grid.replica_group(0, expert=expert)
    return {**found, "world": tuple(range(grid.world_size))}


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
