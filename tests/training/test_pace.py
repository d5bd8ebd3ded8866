"""What a device that its host runs ahead of times of its waits, and the pace of ranks that comes of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from unittest.mock import patch

import torch

from megapar import trainer
from megapar.arguments import parse
from megapar.core.device.base import Device, NoEvent
from megapar.training.reports.record import Record
from tests.support.ranks import run_ranks
from tests.support.training import COMMON, SMALL, last_wins


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


def trained(rank: int, world_size: int, rendezvous: str, flags: Sequence[str]) -> list[tuple[Record, int]]:
    """Each record with the events that its step made."""
    Mark.count, seen = 0, []
    step = trainer.Trainer.step

    def counted(self: trainer.Trainer) -> object:
        before = Mark.count
        made = step(self)
        seen.append(Mark.count - before)
        return made

    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    with (
        patch.dict(os.environ, place),
        patch.object(trainer, "pick", lambda *_: Ahead()),
        patch.object(trainer.Trainer, "step", counted),
    ):
        outcome = trainer.train(parse("moe", flags, dict(os.environ)), f"file://{rendezvous}", keep_records=True)
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
            assert record.pace is not None
            assert 0 < record.pace.max < record.iteration_seconds


def test_the_host_s_own_clock_times_every_step():
    flags = ("--log-interval", "3", "--sharding-degree", "2")
    found = run_ranks(2, plain, last_wins((*SMALL["moe"], *COMMON), flags), group=False)
    for records in found:
        assert all(record.exposed_communication_seconds is not None for record in records)


def plain(rank: int, world_size: int, rendezvous: str, flags: Sequence[str]) -> list[Record]:
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    with patch.dict(os.environ, place):
        return list(
            trainer.train(parse("moe", flags, dict(os.environ)), f"file://{rendezvous}", keep_records=True).records
        )
