"""Ends a run that hangs, and says which ranks it waits for, in which collective or file, and where in the code.

    every rank    thread: a section too long, or an alarm in the store -> puts its report into the store
                          -> a few seconds later the first that did reads all of them and prints -> exit 1

A section whose limit nobody has given is told in the same way, with the stacks of the late ranks, and goes on.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megapar.core.comm.flight_recorder import FlightRecorder
from megapar.core.health import standing
from megapar.core.health.gathering import (
    ALARM,
    GRACE_SECONDS,
    MOST_SECONDS,
    PAUSE_SECONDS,
    Ear,
    Gathering,
    Survey,
    found_in,
    warning,
)
from megapar.core.health.sections import FIRST, STEP, Overdue, Sections
from megapar.core.health.signal_listener import takes_text
from megapar.core.health.standing import Report
from megapar.core.torch_names import flight_record

STATUS = 1
HELD_SECONDS = 30.0  # how much longer than a step the interpreter may be held by one thread


class Watchdog:
    """Watches what one rank does from a thread.

    sections: with their limits. named: where the limit of a section is from, for people. records: folder for what
    torch's flight recorder knows of each collective (always on under NCCL, TORCH_FR_BUFFER_SIZE on gloo). tell and
    end: where the report goes, and what then ends the process.
    """

    def __init__(
        self,
        sections: Sections,
        *,
        rank: int = 0,
        named: Callable[[str], str] = lambda name: "",
        records: Path | None = None,
        tell: Callable[[str], object] = lambda text: sys.stderr.write(text + "\n"),
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self.sections = sections
        self.iteration = 0
        self._rank = rank
        self._world_size = 1
        self._store: dist.Store | None = None
        self._ear: Ear | None = None
        self._recorder = FlightRecorder()
        self._axes: Callable[[], Mapping[str, Sequence[int]]] = dict
        self._named = named
        self._records = records
        self._tell = tell
        self._end = end
        self._stepped = False
        self._warnings = 0
        self._watched = threading.get_ident()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        limits = sections.limits
        self._pause = min(1.0, min(limits.values()) / 10) if limits else 1.0
        self._held = limits[STEP] + HELD_SECONDS if STEP in limits else 0.0

    def meet(
        self,
        rank: int,
        world_size: int,
        store: dist.Store | None,
        recorder: FlightRecorder,
        axes: Callable[[], Mapping[str, Sequence[int]]],
    ) -> None:
        """From now on ranks tell each other where they stand.

        store: a connection that nobody else uses; None where there is one rank. recorder: of this rank's collectives.
        axes: name -> its ranks, of those with several, as they are when somebody asks.
        """
        self._rank, self._world_size, self._recorder, self._axes = rank, world_size, recorder, axes
        self._store = store
        self._ear = None if store is None else Ear(store, self._pause)

    def start(self) -> None:
        """Begin to watch, once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="megapar-watchdog", daemon=True)
            self._thread.start()

    def section(self, name: str, detail: str = "") -> AbstractContextManager[None]:
        """This thread does something that may hang."""
        return self.sections.inside(name, detail)

    def before_step(self, iteration: int) -> None:
        """A step begins on the thread that made this object."""
        self.sections.end_all()
        self.iteration = iteration
        self.sections.begin(STEP if self._stepped else FIRST, str(iteration))

    def after_step(self, iteration: int) -> None:
        """It has ended."""
        self._stepped = True
        self.sections.end_all()

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        if self._ear is not None:
            self._ear.close()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(GRACE_SECONDS)  # or it might arm what is taken back here
        faulthandler.cancel_dump_traceback_later()

    def _run(self) -> None:
        while not self._closed.wait(self._pause):
            if self._held and self.iteration:  # a library may take its time with a corpus
                # Where even this thread is not let run (somebody holds the interpreter), C code ends the process.
                faulthandler.dump_traceback_later(self._held, exit=True)
            overdue, ear = self.sections.overdue(), self._ear
            if (overdue is None or not overdue.ends) and not self._alarmed:
                if overdue is None and (ear is None or not ear.warned):
                    continue
                self._warn(overdue)
                if not self._alarmed:
                    continue
                overdue = None
            self._fire(overdue if overdue is not None and overdue.ends else None)
            return

    @property
    def _alarmed(self) -> bool:
        """Whether another rank has found that the run is to end."""
        return self._ear is not None and self._ear.alarm.is_set()

    def _fire(self, overdue: Overdue | None) -> None:
        """End the run. overdue: None where another rank found it."""
        own, gathered = self._gather("", ALARM, overdue)
        if self._closed.is_set():
            return
        # The disk of the log or of the records may be what hangs.
        ending = threading.Thread(target=self._last_words, args=(own, gathered), daemon=True)
        ending.start()
        ending.join(2 * GRACE_SECONDS)
        self._end(STATUS)

    def _last_words(self, own: Report, gathered: Survey) -> None:
        overdue = gathered.overdue
        self._say(own, gathered, f"ended by the watchdog; {standing.place(own, overdue.name)}")
        # Not to a disk that may be what hangs: this rank would wait in the kernel as well, where nothing ends it.
        if overdue.name not in standing.AT_FILES and (record := flight_record()):
            self._keep(record)
        with suppress(Exception):
            sys.stderr.flush()

    def _warn(self, overdue: Overdue | None) -> None:
        """Tell of what takes unusually long, with the stacks of ranks that are late; the run goes on.

        Unless there is an alarm meanwhile, which waits for every rank's answer.
        """
        prefix = warning(self._warnings)
        self._warnings += 1
        own, gathered = self._gather(prefix, f"{prefix}asked", overdue)
        if self._ear is not None:
            self._ear.number = self._warnings
        if self._alarmed:
            return
        # Whoever reads it may stand still, and must not keep this thread from the next look.
        saying = threading.Thread(target=self._say, args=(own, gathered, ""), daemon=True)
        saying.start()
        saying.join(GRACE_SECONDS)
        if takes_text() and (self._rank in gathered.late or self._world_size == 1):
            with suppress(OSError, ValueError):
                faulthandler.dump_traceback(all_threads=True)

    def _say(self, own: Report, gathered: Survey, otherwise: str) -> None:
        """One of the ranks that answered explains; others have a line of their own, if any."""
        overdue = gathered.overdue
        with suppress(Exception):  # a closed terminal keeps nobody from ending
            if self._world_size == 1 or self._store is None:
                where = standing.place(own, overdue.name)
                self._tell(f"{standing.headline(overdue, self._named(overdue.name))}\n  rank {self._rank} {where}")
            elif gathered.explains:
                self._tell(standing.explain(gathered.reports, self._world_size, overdue, self._named(overdue.name)))
            elif otherwise:
                self._tell(f"rank {self._rank}: {otherwise}")

    def _keep(self, record: bytes) -> None:
        path = (self._records or Path.cwd()) / f"flight-record-{self._rank:05d}.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(record)
            self._tell(f"rank {self._rank}: torch's flight record is in {path}")
        except OSError as error:
            self._tell(f"rank {self._rank}: {path} cannot be written: {error}")

    def report(self) -> dict[str, Any]:
        """Where this rank stands."""
        return standing.report(self.iteration, self.sections, self._recorder, self._axes(), self._watched)

    def _gather(self, prefix: str, key: str, overdue: Overdue | None) -> tuple[Report, Survey]:
        """(where this rank stands, what all that answered come to). key: asks the others."""
        own = self.report()
        own["overdue"] = overdue
        found: list[Survey] = []
        store = self._store

        def ask() -> None:
            if store is not None:
                with suppress(RuntimeError):  # torch's errors of a store are some
                    found.append(Gathering(store, prefix, key, self._rank, self._world_size).ask(own))

        # The store may hang with the rank that holds it: it is asked from a thread that need not come back.
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        deadline = time.monotonic() + MOST_SECONDS
        while asking.is_alive() and time.monotonic() < deadline and not (prefix and self._alarmed):
            asking.join(PAUSE_SECONDS)
        return own, (found or [found_in({self._rank: own}, own, self._world_size, explains=True)])[0]
