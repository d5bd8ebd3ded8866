"""Gathering the reports of all ranks through their store: one rank reads them and publishes the result.

A store handles one request at a time. If every rank read every other rank's report, a thousand ranks would send a
million requests, and most ranks would be reported dead because they get no answer in time.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch.distributed as dist

from megapar.health.hangs import rank_reports
from megapar.health.hangs.rank_reports import Report
from megapar.health.hangs.sections import STEP, Overdue

ALARM = "alarm"
GRACE_SECONDS = 3.0
MOST_SECONDS = GRACE_SECONDS + 4
PAUSE_SECONDS = 0.05


@dataclass(frozen=True)
class Survey:
    """The result of the reports of the ranks that responded.

    Attributes:
        reports: Rank to its report, on the rank that prints them; only its own on the other ranks.
    """

    reports: Mapping[int, Report]
    late_ranks: list[int]
    overdue: Overdue
    prints_report: bool


def survey_of(reports: Mapping[int, Report], own_report: Report, world_size: int, *, prints_report: bool) -> Survey:
    """Return the result of these reports, for the longest of the overdue sections.

    If no report has one, because the report of the rank that started the survey is late, it is this rank's section.
    """
    overdue = [Overdue(*report["overdue"]) for report in reports.values() if report["overdue"]]
    about = Overdue(own_report["section"] or STEP, own_report["detail"], own_report["seconds"], 0.0, False)
    longest = max(overdue, key=lambda section: section.seconds, default=about)
    return Survey(reports, rank_reports.late_ranks(reports, world_size, longest.name), longest, prints_report)


class Gathering:
    """One exchange of reports between all ranks.

    Args:
        prefix: Prefix of the keys of this exchange; unique for each one.
        key: Set to make the other ranks report.
    """

    def __init__(self, store: dist.Store, prefix: str, key: str, rank: int, world_size: int) -> None:
        self._store = store
        self._prefix = prefix
        self._key = key
        self._rank = rank
        self._world_size = world_size

    def collect(self, own_report: Report) -> Survey:
        """Report this rank and return the result within ``MOST_SECONDS``. The first rank to report prints.

        Raises RuntimeError if the store does not respond (torch's store errors are RuntimeErrors).
        """
        number = self._store.add(f"{self._prefix}begun", 1)
        self._store.set(f"{self._prefix}report/{number}", json.dumps([self._rank, own_report]))
        self._store.set(self._key, "1")
        self._store.add(f"{self._prefix}reported", 1)
        if number > 1 and (received := self._receive(own_report)) is not None:
            return received
        if number == 1:  # the other ranks have already waited in _receive
            self._counts("reported", self._world_size, GRACE_SECONDS)
        reports = self._read()
        survey = survey_of(
            reports, own_report, self._world_size, prints_report=number == 1 or self._rank == min(reports)
        )
        if number == 1:
            self._store.set(f"{self._prefix}found", json.dumps([survey.late_ranks, survey.overdue]))
            self._wait_for_readers(len(reports))
        return survey

    def _receive(self, own_report: Report) -> Survey | None:
        """Return the result that the first rank published, or None if it did not respond."""
        key = f"{self._prefix}found"
        if not _within(GRACE_SECONDS + 1, lambda: self._store.check([key])):
            return None
        late, overdue = json.loads(self._store.get(key))
        self._store.add(f"{self._prefix}heard", 1)
        if self._rank == 0:
            self._wait_for_readers(self._store.add(f"{self._prefix}reported", 0))
        return Survey({self._rank: own_report}, late, Overdue(*overdue), prints_report=False)

    def _wait_for_readers(self, ranks: int) -> None:
        """Wait a moment until the other ranks have read the result: the store may end with this rank."""
        with suppress(RuntimeError):
            self._counts("heard", ranks - 1, 1.0)

    def _read(self) -> dict[int, Report]:
        """Return the reports so far."""
        complete = self._store.add(f"{self._prefix}reported", 0)
        begun = self._store.add(f"{self._prefix}begun", 0)
        keys = [f"{self._prefix}report/{number}" for number in range(1, begun + 1)]
        if complete < begun:  # a rank is about to report, or was stopped before that: do not wait for it
            keys = [key for key in keys if self._store.check([key])]
        return dict(map(json.loads, self._store.multi_get(keys)))

    def _counts(self, name: str, count: int, seconds: float) -> bool:
        """Wait until a counter has reached ``count``. Return False if it has not within this time."""
        return _within(seconds, lambda: self._store.add(f"{self._prefix}{name}", 0) >= count)


class AlarmListener:
    """Checks in a separate thread if another rank has raised an alarm or a warning.

    A thread, because a store does not respond while the process that holds it is stopped.

    Attributes:
        alarm: Set after another rank has raised the alarm.
        number: The next warning to listen for.
    """

    def __init__(self, store: dist.Store, pause: float) -> None:
        self.alarm = threading.Event()
        self.number = 0
        self._store = store
        self._pause = pause
        self._warned = -1
        self._closed = threading.Event()
        threading.Thread(target=self._listen, name="megapar-watchdog-listener", daemon=True).start()

    @property
    def warned(self) -> bool:
        """True if another rank has raised the warning of this number."""
        return self._warned == self.number

    def close(self) -> None:
        """Stop listening."""
        self._closed.set()

    def _listen(self) -> None:
        with suppress(RuntimeError):  # the rank that holds the store has died; the step will fail
            while not self._closed.wait(self._pause):
                number = self.number
                if self._store.check([f"{warning(number)}asked"]):
                    self._warned = number
                if self._store.check([ALARM]):
                    self.alarm.set()
                    return


def warning(number: int) -> str:
    """Return the prefix of the keys of a warning. Those of the alarm have none."""
    return f"warning/{number}/"


def _within(seconds: float, holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(PAUSE_SECONDS)
    return True
