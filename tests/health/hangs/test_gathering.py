"""Ranks tell where they stand: one reads it all, the others hear what it found, at few requests for each."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from megapar.health.hangs import gathering
from megapar.health.hangs.gathering import Gathering, Survey
from megapar.health.hangs.sections import Overdue
from tests.support.counted_store import CountedStore

OVERDUE = Overdue("step", "7", 31.0, 30.0, True)


def report(rank: int, *, late: bool = False) -> dict[str, Any]:
    here = {"section": "step", "detail": "7", "seconds": 31.0, "line": "", "file": "", "waits": not late, "beside": []}
    counts = {"data": 4 if late else 5}
    return {**here, "iteration": 7, "counts": counts, "axes": {"data": [0, 1, 2]}, "last": "", "recent": []}


def ask(store: Any, rank: int, world_size: int, **own: Any) -> Survey:
    return Gathering(store, "", "alarm", rank, world_size).collect({"overdue": None, **report(rank), **own})


def test_one_rank_reads_and_the_others_hear() -> None:
    world_size, store = 100, CountedStore()
    together = threading.Barrier(world_size)

    def one(rank: int) -> Survey:
        together.wait(60)
        late = {"counts": {"data": 4}} if rank == 2 else {}
        return ask(store, rank, world_size, overdue=OVERDUE if rank == 0 else None, **late)

    with ThreadPoolExecutor(world_size) as threads:
        found = list(threads.map(one, range(world_size)))
    (reader,) = [one for one in found if one.prints_report]
    assert sorted(reader.reports) == list(range(world_size))
    assert all((one.late_ranks, one.overdue) == ([2], OVERDUE) for one in found)
    assert store.calls["multi_get"] == 1
    assert store.calls["get"] == world_size - 1


def test_a_rank_that_does_not_answer_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "GRACE_SECONDS", 0.2)
    found = ask(dist.HashStore(), 0, 2, overdue=OVERDUE)
    assert (found.late_ranks, found.prints_report, sorted(found.reports)) == ([1], True, [0])


class Dead:
    """A store that ends with the rank that holds it, at the call for a key."""

    def __init__(self, key: str) -> None:
        self.store = dist.HashStore()
        self._key = key

    def add(self, key: str, amount: int) -> int:
        if key == self._key:
            raise dist.DistNetworkError("Connection reset by peer")
        return self.store.add(key, amount)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def test_what_was_found_is_kept_where_the_store_ends_behind_it() -> None:
    store = Dead("heard")
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(ask, store, 0, 2, overdue=OVERDUE)
        while not store.check(["reported"]):
            pass
        with pytest.raises(dist.DistNetworkError):
            ask(store, 1, 2)
        assert sorted(other.result().reports) == [0, 1]


def test_nobody_waits_for_a_report_that_is_not_there_yet() -> None:
    """Between two looks of the rank that reads another one begins and tells; a third has only begun."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=1))

    class Between(CountedStore):
        def add(self, key: str, amount: int) -> int:
            found = store.add(key, amount)
            if amount == 0 and key in ("reported", "begun") and not self.calls["reported"]:
                self.calls["reported"] += 1
                store.set(f"report/{store.add('begun', 1)}", json.dumps([2, report(2)]))
                store.add("reported", 1)
            return found

    between: Any = Between()
    between.store = store
    store.add("begun", 1)
    store.set("report/1", json.dumps([0, report(0)]))
    store.add("reported", 1)
    store.add("begun", 1)  # rank 1, which is stopped there
    assert set(Gathering(between, "", "alarm", 0, 3)._read()) == {0, 2}


def test_where_the_first_to_answer_says_nothing_others_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once: they have waited for it as long as it would have waited for them."""
    monkeypatch.setattr(gathering, "GRACE_SECONDS", 0.2)
    monkeypatch.setattr(Gathering, "_counts", lambda *_: pytest.fail("it waits again"))
    store = dist.HashStore()
    store.add("begun", 1)  # and was stopped before it told anything
    found = ask(store, 1, 2)
    assert (found.late_ranks, found.prints_report) == ([0], True)
    assert found.overdue == Overdue("step", "7", 31.0, 0.0, False)
