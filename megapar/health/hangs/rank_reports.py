"""Rank reports: the progress of each rank, the late ranks among all of them, and the text of the watchdog.

A rank waits for another one if it has launched more collectives on an axis that both are on. The late ranks are those
that others wait for and that do not wait themselves. In a save or load, they are the ranks that do not wait for a
collective or a thread, but for a file. A rank without a report in the store is stopped, dead, or off the network.
"""

from __future__ import annotations

import linecache
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from megapar.core.comm.accounts import FlightRecorder
from megapar.files.location import Location
from megapar.health.hangs.sections import Overdue, Section, Sections

SHOWN = 4
AT_FILES = ("save", "load")
Report = Mapping[str, Any]


def report(
    iteration: int, sections: Sections, recorder: FlightRecorder, axes: Mapping[str, Sequence[int]], watched: int
) -> dict[str, Any]:
    """Return the report of this rank as JSON.

    Args:
        axes: Name to the ranks of each axis with several.
        watched: Id of the thread that trains.
    """
    now = time.monotonic()
    last = recorder.recent[-1] if recorder.recent else None
    by_thread = {section.thread: section for section in sections.open()}
    section = by_thread.pop(watched, None)
    return {
        "iteration": iteration,
        **_thread_report(watched, section, sections),
        "beside": [_thread_report(thread, section, sections) for thread, section in by_thread.items()],
        "counts": dict(recorder.counts),
        "axes": {name: list(ranks) for name, ranks in axes.items()},
        "last": "" if last is None else f"{last}, launched {now - last.at:.1f} s ago",
        "recent": [str(launched) for launched in list(recorder.recent)[-SHOWN:]],
    }


def _thread_report(thread: int, section: Section | None, sections: Sections) -> dict[str, Any]:
    """Return the part of the report about one thread."""
    line, file, waits = line_of(thread)
    return {
        "section": "" if section is None else section.name,
        "detail": "" if section is None else section.detail,
        "seconds": 0.0 if section is None else sections.seconds(section),
        "line": line,
        "file": file,
        "waits": waits,
    }


_OWN = __file__.removesuffix("health/hangs/rank_reports.py")  # also where megapar is installed


def line_of(thread: int) -> tuple[str, str, bool]:
    """Return the present position of a thread.

    Returns:
        The innermost line of Python outside of torch and the standard library; the file that this line works on, or "";
        True if it waits there for a collective or another thread.
    """
    frame = sys._current_frames().get(thread)
    lines, file, waits = [], "", False
    while frame is not None:
        path, number, name = frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        lines.append(f"{path}:{number} in {name}: {linecache.getline(path, number).strip()}")
        if path.startswith(_OWN) or ("site-packages" not in path and "/lib/python" not in path):
            return lines[-1], "" if waits else _file_in(frame.f_locals), waits
        waits = waits or "/torch/distributed/" in path or path.endswith(("/threading.py", "/queue.py"))
        frame = frame.f_back
    return (lines[0] if lines else "an unknown line"), file, waits


def _file_in(names: Mapping[str, Any]) -> str:
    """Return a path among a function's locals or the attributes of its ``self``. Properties are not evaluated."""
    attributes = getattr(names.get("self"), "__dict__", {})
    for value in (attributes.get("_path"), attributes.get("path"), *names.values()):
        if isinstance(value, PurePath | Location):
            return str(value)
    return ""


def late_ranks(reports: Mapping[int, Report], world_size: int, section: str = "step") -> list[int]:
    """Return the ranks without a report or, if there are none, those that others wait for and that do not wait."""
    silent = [rank for rank in range(world_size) if rank not in reports]
    if silent:
        return silent
    if section in AT_FILES:
        at_files = sorted(
            rank for rank, entry in reports.items() if any(not at["waits"] for at in _within(entry, section))
        )
        return at_files if len(at_files) < world_size or world_size == 1 else []
    waits: dict[int, set[int]] = {rank: set() for rank in reports}
    for rank, entry in reports.items():
        for axis, ranks in entry["axes"].items():
            count = entry["counts"].get(axis, 0)
            waits[rank].update(r for r in ranks if r in reports and reports[r]["counts"].get(axis, 0) < count)
    waited_for = set().union(*waits.values())
    return sorted(rank for rank in waited_for if not waits[rank]) or sorted(waited_for)


def _within(entry: Report, section: str) -> list[Mapping[str, Any]]:
    """Return the parts of a report about the threads in a section."""
    return [at for at in (entry, *entry["beside"]) if at["section"] == section]


def headline(overdue: Overdue, limit: str) -> str:
    """Return the first line of the watchdog's text. ``limit``: what sets the limit, such as a flag, or ""."""
    what = f"{overdue.name} {overdue.detail}".strip()
    if not overdue.limit:
        limit = "and another rank has raised the alarm"
    limit = limit or f"more than {overdue.limit:g} s is unusual"
    return f"megapar watchdog: {what} has taken {overdue.seconds:.1f} s, {limit}."


def explain(reports: Mapping[int, Report], world_size: int, overdue: Overdue, limit: str) -> str:
    """Return the watchdog's text about all ranks. ``overdue`` and ``limit`` are as in ``headline``."""
    lines = [headline(overdue, limit)]
    late = late_ranks(reports, world_size, overdue.name)
    for rank in late:
        if rank not in reports:
            lines.append(f"  late: rank {rank} does not answer: stopped, dead, or off the network")
            continue
        lines.append(f"  late: rank {rank} {place(reports[rank], overdue.name)}")
        if overdue.name not in AT_FILES:
            lines.append(f"        its last collectives: {'; '.join(reports[rank]['recent']) or 'none'}")
    if not late and overdue.name in AT_FILES:
        lines.append("  no rank is later than the other ranks: check the disk and the network")
    elif not late and world_size > 1:
        lines.append("  no rank is behind: all have launched the same collectives; check the network and the devices")
    same: dict[str, list[int]] = {}
    for rank, entry in sorted(reports.items()):
        if rank not in late:
            same.setdefault(place(entry, overdue.name), []).append(rank)
    for where, ranks in list(same.items())[: 2 * SHOWN]:
        lines.append(f"  waiting: ranks {', '.join(map(str, ranks[:16]))}{' ...' * (len(ranks) > 16)} {where}")
    return "\n".join(lines)


def place(entry: Report, section: str = "") -> str:
    """Return the position of a rank as text: its thread in the section, preferably one that does not wait."""
    at = min(_within(entry, section) or [entry], key=lambda each: bool(each["waits"]))
    where = f"between steps, after step {entry['iteration']}"
    if at["section"]:
        where = f"in {at['section']} {at['detail']}".rstrip()
    file = f"; file {at['file']}" if at["file"] else ""
    last = f"; last collective: {entry['last']}" if entry["last"] and at is entry else ""
    return f"{where}, at {at['line']}{file}{last}"
