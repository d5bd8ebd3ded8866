"""Where all ranks stand, told through their store to one of them, which tells the others what it found.

A store answers one request after the other. Were every rank to ask for every other's report, a thousand ranks would
send it a million requests, and most would be called dead for want of an answer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

from megapar.core import standing
from megapar.core.sections import STEP, Overdue
from megapar.core.standing import Report

GRACE_SECONDS = 3.0
PAUSE_SECONDS = 0.05


@dataclass(frozen=True)
class Gathered:
    """What the ranks that answered come to.

    reports: theirs, on the rank that is to explain; elsewhere only its own. late: as ``standing`` has it.
    """

    reports: Mapping[int, Report]
    late: list[int]
    overdue: Overdue
    explains: bool


def found_in(reports: Mapping[int, Report], own: Report, world_size: int, *, explains: bool) -> Gathered:
    """What reports come to. A rank may be asked by one whose report is late: then its own section is what it is about;
    else the longest of all that are overdue.
    """
    overdue = [Overdue(*one["overdue"]) for one in reports.values() if one["overdue"]]
    about = Overdue(own["section"] or STEP, own["detail"], own["seconds"], 0.0, False)
    longest = max(overdue, key=lambda one: one.seconds, default=about)
    return Gathered(reports, standing.late_ranks(reports, world_size, longest.name), longest, explains)


class Gathering:
    """One question to all ranks. prefix: of its keys, another one for each question. key: what they look for."""

    def __init__(self, store: dist.Store, prefix: str, key: str, rank: int, world_size: int) -> None:
        self._store = store
        self._prefix = prefix
        self._key = key
        self._rank = rank
        self._world_size = world_size

    def ask(self, own: Report) -> Gathered:
        """Tell where this rank stands, and hear what became of it within seconds. The first to tell explains.

        Raises RuntimeError (torch's errors of a store are some) where the store does not answer.
        """
        number = self._store.add(f"{self._prefix}begun", 1)
        self._store.set(f"{self._prefix}report/{number}", json.dumps([self._rank, own]))
        self._store.set(self._key, "1")
        self._store.add(f"{self._prefix}told", 1)
        if number > 1 and (heard := self._hear(own)) is not None:
            return heard
        reports = self._read()
        gathered = found_in(reports, own, self._world_size, explains=number == 1 or self._rank == min(reports))
        if number == 1:
            self._store.set(f"{self._prefix}found", json.dumps([gathered.late, gathered.overdue]))
            self._wait("heard", len(reports) - 1, 1.0)  # the store may end with this rank
        return gathered

    def _hear(self, own: Report) -> Gathered | None:
        """What the first rank found; None where it says nothing."""
        if not self._wait("found", 0, GRACE_SECONDS + 1):
            return None
        late, overdue = json.loads(self._store.get(f"{self._prefix}found"))
        self._store.add(f"{self._prefix}heard", 1)
        return Gathered({self._rank: own}, late, Overdue(*overdue), explains=False)

    def _read(self) -> dict[int, Report]:
        """The reports of all ranks, or of those that have told within the time."""
        self._wait("told", self._world_size, GRACE_SECONDS)
        begun = self._store.add(f"{self._prefix}begun", 0)
        keys = [f"{self._prefix}report/{number}" for number in range(1, begun + 1)]
        if self._store.add(f"{self._prefix}told", 0) < begun:
            keys = [key for key in keys if self._store.check([key])]
        return dict(map(json.loads, self._store.multi_get(keys)))

    def _wait(self, name: str, count: int, seconds: float) -> bool:
        """Whether a counter has come so far within a time; 0: whether a key is there."""
        key, deadline = f"{self._prefix}{name}", time.monotonic() + seconds
        while not (self._store.add(key, 0) >= count if count else self._store.check([key])):
            if time.monotonic() > deadline:
                return False
            time.sleep(PAUSE_SECONDS)
        return True
