"""Watchdog: ends a run that hangs, and reports the late ranks with their collective or file and line of code.

    every rank    thread: a section too long, or an alarm in the store -> writes its report to the store
                          -> a few seconds later the first rank to report reads all of them and prints -> exit 1

A section without a set limit is only reported, in the same way and with the stacks of the late ranks.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megapar.core.comm.accounts import FlightRecorder
from megapar.core.torch_names import flight_record
from megapar.files.location import Place, at, replace
from megapar.health.hangs import rank_reports
from megapar.health.hangs.gathering import (
    ALARM,
    GRACE_SECONDS,
    MOST_SECONDS,
    PAUSE_SECONDS,
    AlarmListener,
    Gathering,
    Survey,
    survey_of,
    warning,
)
from megapar.health.hangs.rank_reports import Report
from megapar.health.hangs.sections import FIRST, STEP, Overdue, Sections
from megapar.health.stop.signal_listener import takes_text

STATUS = 1
HELD_SECONDS = 30.0  # in addition to the limit of a step: the time that one thread may hold the interpreter lock


@dataclass(eq=False)
class Watchdog:
    """Monitors one rank from a thread.

    Attributes:
        rank: This rank, for messages before ``connect``.
        origin_of_limit: Returns the origin of a section's limit, for messages.
        note_wait: Records that this rank only waits for late ones, for the launcher.
        record_folder: Folder for the dump of torch's flight recorder, which NCCL always has (for gloo set
            TORCH_FR_BUFFER_SIZE).
    """

    sections: Sections
    rank: int = field(default=0, kw_only=True)
    origin_of_limit: Callable[[str], str] = field(default=lambda name: "", kw_only=True)
    record_folder: Place | None = field(default=None, kw_only=True)
    note_wait: Callable[[], object] = field(default=lambda: None, kw_only=True)
    print_report: Callable[[str], object] = field(default=lambda text: sys.stderr.write(text + "\n"), kw_only=True)
    end: Callable[[int], object] = field(default=os._exit, kw_only=True)

    def __post_init__(self) -> None:
        self.iteration = 0
        self._world_size = 1
        self._store: dist.Store | None = None
        self._listener: AlarmListener | None = None
        self._recorder = FlightRecorder()
        self._axes: Callable[[], Mapping[str, Sequence[int]]] = dict
        self._stepped = False
        self._warnings = 0
        self._watched = threading.get_ident()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        limits = self.sections.limits
        self._pause = min(1.0, min(limits.values()) / 10) if limits else 1.0
        self._held_limit = limits[STEP] + HELD_SECONDS if STEP in limits else 0.0

    def connect(
        self,
        rank: int,
        world_size: int,
        store: dist.Store | None,
        recorder: FlightRecorder,
        axes: Callable[[], Mapping[str, Sequence[int]]],
    ) -> None:
        """Connect the watchdogs of all ranks, which from then on exchange reports.

        Args:
            store: A connection for this watchdog alone; None with one rank.
            axes: Returns name to ranks of each axis with several.
        """
        self.rank, self._world_size, self._recorder, self._axes = rank, world_size, recorder, axes
        self._store = store
        self._listener = None if store is None else AlarmListener(store, self._pause)
        if self._listener is not None:
            # Of a watchdog that is dropped without a close, as a trainer's that never ran.
            weakref.finalize(self, self._listener.close)

    def start(self) -> None:
        """Start the thread, unless it is running."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="megapar-watchdog", daemon=True)
            self._thread.start()

    def section(self, name: str, detail: str = "") -> AbstractContextManager[None]:
        """Return a block for an activity of this thread that may hang."""
        return self.sections.inside(name, detail)

    def before_step(self, iteration: int) -> None:
        """Begin a step. Called on the thread that made this object."""
        self.sections.end_all()
        self.iteration = iteration
        self.sections.begin(STEP if self._stepped else FIRST, str(iteration))

    def after_step(self, iteration: int) -> None:
        """End the step."""
        self._stepped = True
        self.sections.end_all()

    def close(self) -> None:
        """Stop the thread."""
        self._closed.set()
        if self._listener is not None:
            self._listener.close()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(GRACE_SECONDS)  # otherwise it could start the timer that is cancelled here
        faulthandler.cancel_dump_traceback_later()

    def _run(self) -> None:
        while not self._closed.wait(self._pause):
            if self._held_limit and self.iteration:  # not at start-up: a library may need long for a corpus
                # If even this thread cannot run, because code holds the interpreter lock, C code ends the process.
                faulthandler.dump_traceback_later(self._held_limit, exit=True)
            overdue, listener = self.sections.overdue(), self._listener
            if (overdue is None or not overdue.ends) and not self._alarmed:
                if overdue is None and (listener is None or not listener.warned):
                    continue
                self._warn(overdue)
                if not self._alarmed:
                    continue
                overdue = None
            self._fire(overdue if overdue is not None and overdue.ends else None)
            return

    @property
    def _alarmed(self) -> bool:
        """True if another rank has raised the alarm, so that the run must end."""
        return self._listener is not None and self._listener.alarm.is_set()

    def _fire(self, overdue: Overdue | None) -> None:
        """Report and end the run. ``overdue`` is None if another rank raised the alarm."""
        own_report, survey = self._gather("", ALARM, overdue)
        if self._closed.is_set():
            return
        # In a thread: the disk of the log or of the records may be the cause of the hang.
        ending = threading.Thread(target=self._final_report, args=(own_report, survey), daemon=True)
        ending.start()
        ending.join(2 * GRACE_SECONDS)
        self.end(STATUS)

    def _final_report(self, own_report: Report, survey: Survey) -> None:
        overdue = survey.overdue
        if survey.late_ranks and self.rank not in survey.late_ranks:
            self.note_wait()
        self._print_report(own_report, survey, f"ended by the watchdog; {rank_reports.place(own_report, overdue.name)}")
        # Skipped if the disk may be the cause: this rank would block in the kernel too, where no signal ends it.
        if overdue.name not in rank_reports.AT_FILES and (record := flight_record()):
            self._keep(record)
        with suppress(Exception):
            sys.stderr.flush()

    def _warn(self, overdue: Overdue | None) -> None:
        """Report a section that takes unusually long, with the stacks of late ranks. The run continues.

        An alarm in the meantime cancels the warning, because it needs the reports of all ranks.
        """
        prefix = warning(self._warnings)
        self._warnings += 1
        own_report, survey = self._gather(prefix, f"{prefix}asked", overdue)
        if self._listener is not None:
            self._listener.number = self._warnings
        if self._alarmed:
            return
        # In a thread: a blocked terminal or pipe must not stop the watchdog.
        printing = threading.Thread(target=self._print_report, args=(own_report, survey, ""), daemon=True)
        printing.start()
        printing.join(GRACE_SECONDS)
        if takes_text() and (self.rank in survey.late_ranks or self._world_size == 1):
            with suppress(OSError, ValueError):
                faulthandler.dump_traceback(all_threads=True)

    def _print_report(self, own_report: Report, survey: Survey, otherwise: str) -> None:
        """Print the report on the rank that has to, and ``otherwise``, if not empty, on the other ranks."""
        overdue = survey.overdue
        with suppress(Exception):  # a closed terminal must not prevent the end
            limit = self.origin_of_limit(overdue.name)
            if self._world_size == 1 or self._store is None:
                where = rank_reports.place(own_report, overdue.name)
                self.print_report(f"{rank_reports.headline(overdue, limit)}\n  rank {self.rank} {where}")
            elif survey.prints_report:
                self.print_report(rank_reports.explain(survey.reports, self._world_size, overdue, limit))
            elif otherwise:
                self.print_report(f"rank {self.rank}: {otherwise}")

    def _keep(self, record: bytes) -> None:
        path = at(self.record_folder or Path.cwd()) / f"flight-record-{self.rank:05d}.json"
        try:
            replace(path, record)
            self.print_report(f"rank {self.rank}: torch's flight record is in {path}")
        except OSError as error:
            self.print_report(f"rank {self.rank}: {path} cannot be written: {error}")

    def report(self) -> dict[str, Any]:
        """Return the report of this rank."""
        return rank_reports.report(self.iteration, self.sections, self._recorder, self._axes(), self._watched)

    def _gather(self, prefix: str, key: str, overdue: Overdue | None) -> tuple[Report, Survey]:
        """Return the report of this rank and the survey of all ranks that responded.

        Args:
            prefix: Prefix of the keys in the store; "" for the alarm.
            key: Set to make the other ranks report.
        """
        own_report = self.report()
        own_report["overdue"] = overdue
        surveys: list[Survey] = []
        store = self._store

        def collect() -> None:
            if store is not None:
                with suppress(RuntimeError):  # torch's store errors are RuntimeErrors
                    surveys.append(Gathering(store, prefix, key, self.rank, self._world_size).collect(own_report))

        # In a thread that may never return: the store may hang with the rank that holds it.
        collecting = threading.Thread(target=collect, daemon=True)
        collecting.start()
        deadline = time.monotonic() + MOST_SECONDS
        while collecting.is_alive() and time.monotonic() < deadline and not (prefix and self._alarmed):
            collecting.join(PAUSE_SECONDS)
        return own_report, (
            surveys or [survey_of({self.rank: own_report}, own_report, self._world_size, prints_report=True)]
        )[0]
