"""Where all ranks stand, told through their store to one of them, which tells the others what it found.

A store answers one request after the other. Were every rank to ask for every other's report, a thousand ranks would
send it a million requests, and most would be called dead for want of an answer.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch.distributed as dist

from megapar.core.health import standing
from megapar.core.health.sections import STEP, Overdue
from megapar.core.health.standing import Report

ALARM = "alarm"
GRACE_SECONDS = 3.0
MOST_SECONDS = GRACE_SECONDS + 4
PAUSE_SECONDS = 0.05


@dataclass(frozen=True)
class Survey:
    """What the ranks that answered come to.

    reports: theirs, on the rank that is to explain; elsewhere only its own. late: as ``standing`` has it.
    """

    reports: Mapping[int, Report]
    late: list[int]
    overdue: Overdue
    explains: bool


def found_in(reports: Mapping[int, Report], own: Report, world_size: int, *, explains: bool) -> Survey:
    """What reports come to. A rank may be asked by one whose report is late: then its own section is what it is about;
    else the longest of all that are overdue.
    """
    overdue = [Overdue(*one["overdue"]) for one in reports.values() if one["overdue"]]
    about = Overdue(own["section"] or STEP, own["detail"], own["seconds"], 0.0, False)
    longest = max(overdue, key=lambda one: one.seconds, default=about)
    return Survey(reports, standing.late_ranks(reports, world_size, longest.name), longest, explains)


class Gathering:
    """One question to all ranks. prefix: of its keys, another one for each question. key: what they look for."""

    def __init__(self, store: dist.Store, prefix: str, key: str, rank: int, world_size: int) -> None:
        self._store = store
        self._prefix = prefix
        self._key = key
        self._rank = rank
        self._world_size = world_size

    def ask(self, own: Report) -> Survey:
        """Tell where this rank stands, and hear what became of it within ``MOST_SECONDS``. The first to tell explains.

        Raises RuntimeError (torch's errors of a store are some) where the store does not answer.
        """
        number = self._store.add(f"{self._prefix}begun", 1)
        self._store.set(f"{self._prefix}report/{number}", json.dumps([self._rank, own]))
        self._store.set(self._key, "1")
        self._store.add(f"{self._prefix}told", 1)
        if number > 1 and (heard := self._hear(own)) is not None:
            return heard
        if number == 1:  # others have waited for as long by now
            self._counts("told", self._world_size, GRACE_SECONDS)
        reports = self._read()
        gathered = found_in(reports, own, self._world_size, explains=number == 1 or self._rank == min(reports))
        if number == 1:
            self._store.set(f"{self._prefix}found", json.dumps([gathered.late, gathered.overdue]))
            self._let_hear(len(reports))
        return gathered

    def _hear(self, own: Report) -> Survey | None:
        """What the first rank found; None where it says nothing."""
        key = f"{self._prefix}found"
        if not _within(GRACE_SECONDS + 1, lambda: self._store.check([key])):
            return None
        late, overdue = json.loads(self._store.get(key))
        self._store.add(f"{self._prefix}heard", 1)
        if self._rank == 0:
            self._let_hear(self._store.add(f"{self._prefix}told", 0))
        return Survey({self._rank: own}, late, Overdue(*overdue), explains=False)

    def _let_hear(self, ranks: int) -> None:
        """Give the others a moment: the store may end with this rank, and this one may be the last that waits there."""
        with suppress(RuntimeError):
            self._counts("heard", ranks - 1, 1.0)

    def _read(self) -> dict[int, Report]:
        """The reports of those that have told."""
        told = self._store.add(f"{self._prefix}told", 0)
        begun = self._store.add(f"{self._prefix}begun", 0)
        keys = [f"{self._prefix}report/{number}" for number in range(1, begun + 1)]
        if told < begun:  # somebody is about to, or was stopped in between: nobody waits for that
            keys = [key for key in keys if self._store.check([key])]
        return dict(map(json.loads, self._store.multi_get(keys)))

    def _counts(self, name: str, count: int, seconds: float) -> bool:
        """Whether a counter comes so far within a time."""
        return _within(seconds, lambda: self._store.add(f"{self._prefix}{name}", 0) >= count)


class Ear:
    """Hears from a thread of its own whether another rank has asked: a store whose holder stands still never answers.

    alarm: set for good once one has. number: of the warning that is listened for.
    """

    def __init__(self, store: dist.Store, pause: float) -> None:
        self.alarm = threading.Event()
        self.number = 0
        self._store = store
        self._pause = pause
        self._warned = -1
        self._closed = threading.Event()
        threading.Thread(target=self._listen, name="megapar-watchdog-ear", daemon=True).start()

    @property
    def warned(self) -> bool:
        """Whether somebody has asked for the warning of this number."""
        return self._warned == self.number

    def close(self) -> None:
        """Listen no more."""
        self._closed.set()

    def _listen(self) -> None:
        with suppress(RuntimeError):  # the rank that holds the store is gone; the step will show it
            while not self._closed.wait(self._pause):
                number = self.number
                if self._store.check([f"{warning(number)}asked"]):
                    self._warned = number
                if self._store.check([ALARM]):
                    self.alarm.set()
                    return


def warning(number: int) -> str:
    """Before the keys of a warning; an alarm's have nothing before them."""
    return f"warning/{number}/"


def _within(seconds: float, holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(PAUSE_SECONDS)
    return True
