"""Queues of a pipeline: what goes on which communicator, in which order, launched from where."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import permutations
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megapar.core.comm.accounts import FlightRecorder, WaitMeter
from megapar.core.comm.axis import Axis
from megapar.core.comm.rounds import queue_rounds
from megapar.core.device.base import Device
from megapar.core.pipeline.lookahead import schedule_ahead
from megapar.core.pipeline.runner import Queues, Runner, run_forward
from megapar.core.pipeline.schedule import make_schedule
from megapar.core.pipeline.stages import Stages
from tests.core.pipeline.test_simulate import KINDS
from tests.support.ranks import run_ranks

T = TypeVar("T")
WIDTH = 3


@pytest.mark.parametrize(("name", "chunks"), KINDS)
def test_both_ends_of_a_queue_have_its_messages_in_one_order(name: str, chunks: int) -> None:
    for ranks in (2, 3, 4, 5, 8):
        schedule = make_schedule(name, ranks, chunks, 2 * ranks)
        sent: defaultdict[tuple[int, int], list[object]] = defaultdict(list)
        received: defaultdict[tuple[int, int], list[object]] = defaultdict(list)
        for rank, program in enumerate(schedule.programs):
            for chunk, kind, micro_batch in program:
                step = 1 if kind.endswith("_F") else -1
                if kind.startswith("SEND"):
                    sent[rank, schedule.rank_of(chunk + step)].append((chunk + step, kind[-1], micro_batch))
                elif kind.startswith("RECV"):
                    received[schedule.rank_of(chunk - step), rank].append((chunk, kind[-1], micro_batch))
        assert sent == received
        stages = Stages.of(range(schedule.num_chunks), schedule.num_chunks, ranks, schedule.style)
        made = {group for groups in queue_rounds(ranks, closed=stages.last_sends_to_first) for group in groups}
        assert set(sent) <= made, "a queue is missing"


@pytest.mark.parametrize("stages", range(2, 9))
@pytest.mark.parametrize("closed", [False, True])
def test_a_round_has_every_stage_once_and_all_rounds_every_queue_once(stages: int, closed: bool) -> None:
    rounds = queue_rounds(stages, closed=closed)
    assert all(sorted(stage for group in groups for stage in group) == list(range(stages)) for groups in rounds)
    queues = [group for groups in rounds for group in groups if len(group) == 2]
    neighbours = {(stage, stage + 1) for stage in range(stages - 1)} | ({(stages - 1, 0)} if closed else set())
    assert sorted(queues) == sorted(neighbours | {(b, a) for a, b in neighbours})
    assert len(rounds) == (2 if stages == 2 else 6 if closed and stages % 2 else 4)


class RecordingDevice(Device):
    """A CPU that notes what is launched on a stream of its own, behind which event, and what is adopted."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = ""
        self.launched: list[tuple[str, object]] = []
        self.adopted: set[int] = set()
        self.events = 0

    def new_stream(self) -> str:
        return "receipts"

    def event(self) -> str:
        self.events += 1
        return f"event {self.events}"

    def launch(self, op: Callable[[], T], stream: Any = None, after: Any = None) -> T:
        self.launched.append((stream, after))
        self.inside = stream
        try:
            return op()
        finally:
            self.inside = ""

    def adopt(self, x: Tensor) -> None:
        self.adopted.add(x.data_ptr())


class Scales:
    """Chunks that multiply by their weight; the loss is the sum."""

    def __init__(self, device: RecordingDevice, num_chunks: int) -> None:
        self.device = device
        self.last = num_chunks - 1
        self.weights = [nn.Parameter(torch.full((WIDTH,), 1.0 + chunk)) for chunk in range(num_chunks)]
        self.made_on: list[str] = []
        self.given: set[int] = set()
        self.results: list[float] = []

    def empty(self, micro_batch: int, chunk: int) -> Tensor:
        self.made_on.append(self.device.inside)
        return torch.empty(WIDTH)

    def forward(self, chunk: int, micro_batch: int, x: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        if x is not None:
            self.given.add(x.data_ptr())
        y = (torch.full((WIDTH,), 1.0 + micro_batch) if x is None else x) * self.weights[chunk]
        if chunk == self.last:
            self.results.append(float(y.detach()[0]))
            return None, y.sum()
        return y, None

    def before_backward(self, chunk: int, micro_batch: int) -> None:
        assert self.weights[chunk].requires_grad


def run_schedule(rank: int, world_size: int, name: str, chunks: int, ahead: int | None) -> dict[str, Any]:
    device, recorder, axes = RecordingDevice(), FlightRecorder(), {}
    for ends in permutations(range(world_size), 2):
        group = dist.new_group(list(ends))
        if rank in ends:
            axes[ends] = Axis("pp", 2, ends.index(rank), group, ends, recorder=recorder, queue="{}>{}".format(*ends))
    schedule = schedule_ahead(name, world_size, chunks, 2 * world_size, ahead)
    queues, work = Queues(rank, axes, device), Scales(device, schedule.num_chunks)
    Runner(schedule, queues, work, None, WaitMeter()).run()
    receipts = sum(action.kind.startswith("RECV") for action in schedule.programs[rank])
    behind = "event 1" if ahead is None else None  # what was there when they were made, or what is launched
    assert device.launched == [("receipts", behind)] * receipts
    assert work.made_on == ["receipts"] * receipts
    stages = Stages.of(range(schedule.num_chunks), schedule.num_chunks, world_size, schedule.style)
    with torch.no_grad():
        run_forward(stages, queues, work)
    hops = [chunk.index for chunk in stages.on(rank) if not chunk.first]
    assert len(device.launched) == receipts + len(hops)
    assert work.given <= device.adopted
    launched = [(one.axis, one.kind) for one in recorder.recent]
    assert len(launched) < (recorder.recent.maxlen or 0), "all of them"
    gradients = [None if weight.grad is None else float(weight.grad[0]) for weight in work.weights]
    return {"launched": launched, "results": work.results, "gradients": gradients}


@pytest.mark.parametrize(
    ("name", "chunks", "ranks", "ahead"),
    [
        *(("1f1b", 1, 3, None), ("gpipe", 1, 2, None), ("interleaved", 2, 2, None)),
        *(("1f1b", 1, 3, 0), ("1f1b", 1, 3, 1), ("interleaved", 2, 2, 1)),
    ],
)
def test_receipts_are_launched_aside_and_a_queue_goes_one_way(
    name: str, chunks: int, ranks: int, ahead: int | None
) -> None:
    found = run_ranks(ranks, run_schedule, name, chunks, ahead, backend="late")
    on: defaultdict[str, dict[int, list[str]]] = defaultdict(dict)
    for rank, result in enumerate(found):
        for axis, kind in result["launched"]:
            on[axis].setdefault(rank, []).append(kind)
    assert on
    for axis, kinds in on.items():
        sender, receiver = map(int, axis.removeprefix("pp ").split(">"))
        assert set(kinds[sender]) == {"send"}
        assert set(kinds[receiver]) == {"receive"}
        assert len(kinds[sender]) == len(kinds[receiver])
    weights, total = [1.0 + chunk for chunk in range(ranks * chunks)], 1.0
    for weight in weights:
        total *= weight
    batches = [1.0 + number for number in range(2 * ranks)]
    assert sorted(found[-1]["results"]) == sorted([*(total * batch for batch in batches), total])
    for chunk, weight in enumerate(weights):
        (gradient,) = [result["gradients"][chunk] for result in found if result["gradients"][chunk] is not None]
        assert gradient == pytest.approx(sum(batches) * total / weight)
