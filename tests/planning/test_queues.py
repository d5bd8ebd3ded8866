"""What the plan says of a pipeline's queues: messages that show, and what all communicators keep."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from megapar.arguments import Config, parse
from megapar.core.comm.world import World
from megapar.core.device.base import Device
from megapar.core.device.kinds import COMMUNICATORS
from megapar.core.pipeline.schedule import make_schedule
from megapar.core.pipeline.simulate import RUNNERS, Costs, simulate
from megapar.planning.devices import device_kind
from megapar.planning.plan import Plan
from megapar.planning.planned_run import PlannedRun
from megapar.planning.speed import hops
from megapar.training.reports.opening import model_lines


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


class Gpu(Device):
    """A CPU that keeps what a GPU does."""

    type = "cuda"


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        (1, ()),
        (4, ("--sharding-degree", "4")),
        (3, ("--pp-degree", "3", "--num-layers", "3", "--gradient-merge-acc-step", "3")),
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
