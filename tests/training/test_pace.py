"""What a device that its host runs ahead of times of its waits, and the pace of ranks that comes of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from unittest.mock import patch

import pytest
import torch

from megapar import trainer
from megapar.core.device.base import Device, NoEvent
from megapar.training.reports.record import Record
from tests.support.ranks import run_ranks
from tests.support.training import COMMON, SMALL, last_wins, train_rank


class Mark:
    """A timed event of a device that has done everything by the time the host asks."""

    count = 0

    def __init__(self) -> None:
        Mark.count += 1
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Mark) -> float:
        return 1000.0 * (other.at - self.at)


class Ahead(Device):
    is_async = True

    def timed_event(self) -> Callable[[], Mark]:
        return Mark

    def host_copy(self, x: torch.Tensor) -> tuple[torch.Tensor, NoEvent]:
        return x.clone(), NoEvent()


class Streams(Ahead):
    """FSDP2's streams too: ``told`` has what the stream that computes did.

    Attributes:
        ends: Stream -> number of events that the package has recorded on it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ends: Counter[torch.cpu.Stream] = Counter()
        self.told: list[object] = []

    def timed_event(self) -> Callable[[], Mark]:
        return lambda: self.told.append("mark") or Mark()

    def current_stream(self) -> torch.cpu.Stream:
        return torch.cpu.current_stream()

    def event(self) -> tuple[torch.cpu.Stream, int]:
        self.ends[torch.cpu.current_stream()] += 1
        return self.recorded(torch.cpu.current_stream())

    def recorded(self, stream: torch.cpu.Stream) -> tuple[torch.cpu.Stream, int]:
        return stream, self.ends[stream]

    def waits(self, stream: torch.cpu.Stream, event: tuple[torch.cpu.Stream, int] | None) -> None:
        if stream is torch.cpu._default_cpu_stream and event is not None and event[0] is not stream:
            self.told.append(event)


def timed_stage_3(rank: int, world_size: int, rendezvous: str, flags: Sequence[str]) -> tuple[Record, list[object]]:
    """The second step, which is timed, and what its stream did; the events that FSDP2 waits for are among it."""
    device = Streams()

    def recorded(stream: torch.cpu.Stream) -> tuple[torch.cpu.Stream, int]:
        return device.recorded(stream)

    def waits(stream: torch.cpu.Stream, event: tuple[torch.cpu.Stream, int] | None) -> None:
        device.waits(stream, event)

    with (
        patch.object(trainer, "pick", lambda *_: device),
        patch.object(torch.cpu.Stream, "record_event", recorded),
        patch.object(torch.cpu.Stream, "wait_event", waits),
    ):
        outcome = train_rank(rank, world_size, rendezvous, "moe", flags)
    return outcome.records[1], device.told


@pytest.mark.parametrize("mode", ["step", "micro_batch"])
def test_every_wait_of_the_stream_for_fsdp2_is_between_two_events(mode: str) -> None:
    flags = ("--log-interval", "2", "--train-iters", "2", "--sharding-degree", "2", "--sharding-stage", "3")
    flags += ("--hybrid-dp", "--global-batch-size", "8", "--gradient-merge-mode", mode)
    for record, told in run_ranks(4, timed_stage_3, last_wins((*SMALL["moe"], *COMMON), flags), group=False):
        assert {"shard/all_gather", "shard/reduce_scatter", "replica/all_reduce"} <= record.exposed_seconds.keys()
        assert sum(record.exposed_seconds.values()) == pytest.approx(record.exposed_communication_seconds)
        timed = told[told.index("mark") :]
        waited: dict[object, int] = {}
        for before, event, after in zip(timed, timed[1:], timed[2:], strict=False):
            if event != "mark":
                stream, end = event
                if before == after == "mark":
                    waited[stream] = max(end, waited.get(stream, 0))
                assert waited.get(stream, 0) >= end
        assert len(waited) == 3  # gathers, reductions, sums over replicas


def trained(rank: int, world_size: int, rendezvous: str, flags: Sequence[str]) -> list[tuple[Record, int]]:
    """Each record with the events that its step made."""
    Mark.count, seen = 0, []
    step = trainer.Trainer.step

    def counted(self: trainer.Trainer) -> object:
        before = Mark.count
        made = step(self)
        seen.append(Mark.count - before)
        return made

    with patch.object(trainer, "pick", lambda *_: Ahead()), patch.object(trainer.Trainer, "step", counted):
        outcome = train_rank(rank, world_size, rendezvous, "moe", flags)
    return list(zip(outcome.records, seen, strict=True))


def test_one_step_in_a_line_of_the_log_is_timed():
    flags = ("--log-interval", "3", "--ep-degree", "2", "--sharding-degree", "2")
    for found in run_ranks(2, trained, last_wins((*SMALL["moe"], *COMMON), flags), group=False):
        records = [record for record, _ in found]
        assert [record.exposed_communication_seconds is not None for record in records] == [False, False, True] * 2
        assert all(record.exposed_seconds.keys() >= {"ep/all_to_all"} for record in records[2::3])
        assert [events for _, events in found][0::3] == [0, 0]
        assert min(events for _, events in found[2::3]) > 10
        for record in records:
            assert 0 < record.pace.max < record.iteration_seconds


def test_the_host_s_own_clock_times_every_step():
    flags = ("--log-interval", "3", "--sharding-degree", "2")
    for outcome in run_ranks(2, train_rank, "moe", last_wins((*SMALL["moe"], *COMMON), flags), group=False):
        assert all(record.exposed_communication_seconds is not None for record in outcome.records)
