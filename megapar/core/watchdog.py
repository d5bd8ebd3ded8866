"""Ends a run that hangs, and says which ranks it waits for, in which collective, and where in the code they stand.

    every rank    thread: step too long, or an alarm in the store -> puts its report into the store
                          -> a few seconds later reads all reports; the lowest rank that answered prints -> exit 1

A rank waits for another one when it has launched more collectives on an axis of both. Late are those that somebody
waits for and that wait for nobody; a rank that puts no report there is stopped, dead, or off the network.
"""

from __future__ import annotations

import faulthandler
import json
import linecache
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megapar.core.journal import Journal
from megapar.core.torch_names import flight_record

STATUS = 1
GRACE_SECONDS = 3.0
SHOWN = 4
Report = Mapping[str, Any]


class Watchdog:
    """Watches the steps of one rank from a thread.

    store: a connection that nobody else uses; None where there is one rank. axes: name -> its ranks, of those with
    several. records: folder for what torch's flight recorder knows of each collective (always on under NCCL,
    TORCH_FR_BUFFER_SIZE on gloo). tell and end: where the report goes, and what then ends the process.
    """

    def __init__(
        self,
        timeout_seconds: float,
        rank: int,
        world_size: int,
        store: dist.Store | None,
        journal: Journal,
        axes: Mapping[str, Sequence[int]],
        *,
        records: Path | None = None,
        tell: Callable[[str], object] = lambda text: sys.stderr.write(text + "\n"),
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self.timeout_seconds = timeout_seconds
        self._rank = rank
        self._world_size = world_size
        self._store = store
        self._journal = journal
        self._axes = {name: list(ranks) for name, ranks in axes.items()}
        self._records = records
        self._tell = tell
        self._end = end
        self._since: float | None = None
        self._iteration = 0
        self._watched = threading.get_ident()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="megapar-watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def before_step(self, iteration: int) -> None:
        """A step begins on the thread that made this object."""
        self._iteration, self._since = iteration, time.monotonic()

    def after_step(self, iteration: int) -> None:
        """It has ended; what comes until the next one takes the time it takes."""
        self._since = None

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(GRACE_SECONDS)  # or it might arm what is taken back here
        faulthandler.cancel_dump_traceback_later()

    def _run(self) -> None:
        pause = min(1.0, self.timeout_seconds / 10)
        while not self._closed.wait(pause):
            # Where even this thread is not let run (somebody holds the interpreter), C code ends the process.
            faulthandler.dump_traceback_later(self.timeout_seconds + 30, exit=True)
            since = self._since
            late = since is not None and time.monotonic() - since > self.timeout_seconds
            if late or self._alarmed():
                self._fire()
                return

    def _alarmed(self) -> bool:
        try:
            return self._store is not None and self._store.check(["alarm"])
        except (RuntimeError, dist.DistStoreError):
            return False  # the rank that holds the store is gone; the step will show it

    def _fire(self) -> None:
        own = self.report()
        reports = {self._rank: own}
        # The store may hang with the rank that holds it: it is asked from a thread that need not come back.
        asking = threading.Thread(target=self._exchange, args=(own, reports), daemon=True)
        asking.start()
        asking.join(GRACE_SECONDS + 2)
        if self._closed.is_set():
            return
        known = dict(reports)
        if self._rank == min(known):
            self._tell(explain(known, self._world_size, self.timeout_seconds))
        else:
            self._tell(f"rank {self._rank}: ended by the watchdog; {_place(own)}")
        if record := flight_record():
            self._keep(record)
        sys.stderr.flush()
        self._end(STATUS)

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
        now = time.monotonic()
        last = self._journal.recent[-1] if self._journal.recent else None
        return {
            "iteration": self._iteration,
            "in_step": self._since is not None,
            "seconds": 0.0 if self._since is None else now - self._since,
            "counts": dict(self._journal.counts),
            "axes": self._axes,
            "last": "" if last is None else f"{last}, launched {now - last.at:.1f} s ago",
            "recent": [str(launched) for launched in list(self._journal.recent)[-SHOWN:]],
            "line": _line_of(self._watched),
        }

    def _exchange(self, own: Report, reports: dict[int, Report]) -> None:
        if self._store is None:
            return
        deadline = time.monotonic() + GRACE_SECONDS
        try:
            self._store.set(f"report/{self._rank}", json.dumps(own))
            self._store.set("alarm", "1")
            while len(reports) < self._world_size and time.monotonic() < deadline:
                for rank in range(self._world_size):
                    if rank not in reports and self._store.check([f"report/{rank}"]):
                        reports[rank] = json.loads(self._store.get(f"report/{rank}"))
                time.sleep(0.05)
        except (RuntimeError, dist.DistStoreError):
            return


def _line_of(thread: int) -> str:
    """The line of Python that a thread is at: the innermost one outside of torch and of the standard library."""
    frame = sys._current_frames().get(thread)
    lines = []
    while frame is not None:
        path, number, name = frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        lines.append((path, f"{path}:{number} in {name}: {linecache.getline(path, number).strip()}"))
        frame = frame.f_back
    outside = [text for path, text in lines if "site-packages" not in path and "/lib/python" not in path]
    return outside[0] if outside else lines[0][1] if lines else "nowhere"


def late_ranks(reports: Mapping[int, Report], world_size: int) -> list[int]:
    """Ranks that others wait for and that wait for nobody; those without a report are late before all others."""
    silent = [rank for rank in range(world_size) if rank not in reports]
    if silent:
        return silent
    waits: dict[int, set[int]] = {rank: set() for rank in reports}
    for rank, report in reports.items():
        for axis, ranks in report["axes"].items():
            here = report["counts"].get(axis, 0)
            waits[rank].update(r for r in ranks if r in reports and reports[r]["counts"].get(axis, 0) < here)
    waited_for = set().union(*waits.values())
    return sorted(rank for rank in waited_for if not waits[rank]) or sorted(waited_for)


def explain(reports: Mapping[int, Report], world_size: int, timeout_seconds: float) -> str:
    """The report for people."""
    slowest = max(reports.values(), key=lambda report: float(report["seconds"]))
    lines = [
        f"megapar watchdog: step {slowest['iteration']} has taken {slowest['seconds']:.1f} s, "
        f"--step-timeout-seconds is {timeout_seconds:g}."
    ]
    late = late_ranks(reports, world_size)
    for rank in late:
        if rank not in reports:
            lines.append(f"  late: rank {rank} does not answer: stopped, dead, or off the network")
        else:
            lines.append(f"  late: rank {rank} {_place(reports[rank])}")
            lines.append(f"        its last collectives: {'; '.join(reports[rank]['recent']) or 'none'}")
    if not late:
        lines.append("  no rank is behind: all have launched the same collectives; look at the network or the device")
    same: dict[str, list[int]] = {}
    for rank, report in sorted(reports.items()):
        if rank not in late:
            same.setdefault(_place(report), []).append(rank)
    for place, ranks in list(same.items())[: 2 * SHOWN]:
        lines.append(f"  waiting: ranks {', '.join(map(str, ranks[:16]))}{' ...' * (len(ranks) > 16)} {place}")
    return "\n".join(lines)


def _place(report: Report) -> str:
    where = f"in step {report['iteration']}" if report["in_step"] else f"between steps, after {report['iteration']}"
    last = f"; last collective: {report['last']}" if report["last"] else ""
    return f"{where}, at {report['line']}{last}"
