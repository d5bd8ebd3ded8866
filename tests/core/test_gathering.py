"""Ranks tell where they stand: one reads it all, the others hear what it found, at few requests for each."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from megapar.core import gathering
from megapar.core.gathering import Gathered, Gathering
from megapar.core.sections import Overdue

OVERDUE = Overdue("step", "7", 31.0, 30.0, True)


class Counted:
    """A store of torch's, and how often each of its methods was called."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self.store, name)


def report(rank: int, *, late: bool = False) -> dict[str, Any]:
    here = {"section": "step", "detail": "7", "seconds": 31.0, "line": "", "file": "", "waits": not late, "beside": []}
    counts = {"data": 4 if late else 5}
    return {**here, "iteration": 7, "counts": counts, "axes": {"data": [0, 1, 2]}, "last": "", "recent": []}


def ask(store: Any, rank: int, world_size: int, **own: Any) -> Gathered:
    return Gathering(store, "", "alarm", rank, world_size).ask({"overdue": None, **report(rank), **own})


def test_one_rank_reads_and_the_others_hear() -> None:
    world_size, store = 100, Counted()
    together = threading.Barrier(world_size)

    def one(rank: int) -> Gathered:
        together.wait(60)
        late = {"counts": {"data": 4}} if rank == 2 else {}
        return ask(store, rank, world_size, overdue=OVERDUE if rank == 0 else None, **late)

    with ThreadPoolExecutor(world_size) as threads:
        found = list(threads.map(one, range(world_size)))
    (reader,) = [one for one in found if one.explains]
    assert sorted(reader.reports) == list(range(world_size))
    assert all((one.late, one.overdue) == ([2], OVERDUE) for one in found)
    assert store.calls["multi_get"] == 1
    assert store.calls["get"] == world_size - 1


def test_a_rank_that_does_not_answer_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "GRACE_SECONDS", 0.2)
    found = ask(dist.HashStore(), 0, 2, overdue=OVERDUE)
    assert (found.late, found.explains, sorted(found.reports)) == ([1], True, [0])


def test_where_the_first_to_answer_says_nothing_others_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "GRACE_SECONDS", 0.2)
    store = dist.HashStore()
    store.add("begun", 1)  # and was stopped before it told anything
    found = ask(store, 1, 2)
    assert (found.late, found.explains) == ([0], True)
    assert found.overdue == Overdue("step", "7", 31.0, 0.0, False)
