"""Messages of the inputs that recomputed units keep: which units are fetched, and how many bytes."""

from __future__ import annotations

import pytest

from megapar.arguments import parse
from megapar.core.pipeline.schedule import BACKWARD, FORWARD, make_schedule
from megapar.model.cost.model_cost import CommCost
from megapar.planning.devices import device_kind
from megapar.planning.kept_inputs import _program, fetched_share, host_traffic, recompute_messages
from megapar.planning.planned_run import PlannedRun
from megapar.planning.traffic import stage_traffic

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
    rows = sum(run.row_numel(row) for row in run.held(0))
    assert host_traffic(run, 0) == {"host/to_host": 12 * rows, "host/to_device": 12 * rows}


def test_nothing_travels_without_the_flags() -> None:
    assert recompute_messages(planned(1), 0) == {}
    sequence = planned(2, "--mp-degree", "2", "--sequence-parallel", "--recompute-partition")
    assert recompute_messages(sequence, 0) == {}
