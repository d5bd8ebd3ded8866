"""Where a rank stands, and who of all ranks is late, for people.

A rank waits for another one when it has launched more collectives on an axis of both. Late are those that somebody
waits for and that wait for nobody. Of ranks that save or load together late are those that do not wait for a collective
or a thread, but for a file. A rank that puts no report into the store is stopped, dead, or off the network.
"""

from __future__ import annotations

import linecache
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megapar.core.comm.flight_recorder import FlightRecorder
from megapar.core.health.sections import Overdue, Section, Sections

SHOWN = 4
AT_FILES = ("save", "load")
Report = Mapping[str, Any]


def report(
    iteration: int, sections: Sections, recorder: FlightRecorder, axes: Mapping[str, Sequence[int]], watched: int
) -> dict[str, Any]:
    """Where this rank stands, as JSON. iteration: the last step that began. watched: the thread that trains."""
    now = time.monotonic()
    last = recorder.recent[-1] if recorder.recent else None
    found = {section.thread: section for section in sections.open()}
    own = found.pop(watched, None)
    return {
        "iteration": iteration,
        **_standing(watched, own, sections),
        "beside": [_standing(thread, section, sections) for thread, section in found.items()],
        "counts": dict(recorder.counts),
        "axes": {name: list(ranks) for name, ranks in axes.items()},
        "last": "" if last is None else f"{last}, launched {now - last.at:.1f} s ago",
        "recent": [str(launched) for launched in list(recorder.recent)[-SHOWN:]],
    }


def _standing(thread: int, section: Section | None, sections: Sections) -> dict[str, Any]:
    """Of one thread."""
    line, file, waits = line_of(thread)
    return {
        "section": "" if section is None else section.name,
        "detail": "" if section is None else section.detail,
        "seconds": 0.0 if section is None else sections.seconds(section),
        "line": line,
        "file": file,
        "waits": waits,
    }


def line_of(thread: int) -> tuple[str, str, bool]:
    """(line of Python that a thread is at, the innermost outside of torch and of the standard library; the file that
    it is at, or ""; whether it waits for a collective or another thread there).
    """
    frame = sys._current_frames().get(thread)
    lines, file, waits = [], "", False
    while frame is not None:
        path, number, name = frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        lines.append(f"{path}:{number} in {name}: {linecache.getline(path, number).strip()}")
        if "site-packages" not in path and "/lib/python" not in path:
            return lines[-1], "" if waits else _file_in(frame.f_locals), waits
        waits = waits or "/torch/distributed/" in path or path.endswith(("/threading.py", "/queue.py"))
        frame = frame.f_back
    return (lines[0] if lines else "nowhere"), file, waits


def _file_in(names: Mapping[str, Any]) -> str:
    """The path among the local names of a function, or in the object that it is a method of; no property is run."""
    own = getattr(names.get("self"), "__dict__", {})
    for value in (own.get("_path"), own.get("path"), *names.values()):
        if isinstance(value, Path):
            return str(value)
    return ""


def late_ranks(reports: Mapping[int, Report], world_size: int, section: str = "step") -> list[int]:
    """Ranks that others wait for and that wait for nobody; those without a report are late before all others.

    section: in which somebody has taken too long.
    """
    silent = [rank for rank in range(world_size) if rank not in reports]
    if silent:
        return silent
    if section in AT_FILES:
        at_files = sorted(rank for rank, one in reports.items() if any(not at["waits"] for at in _within(one, section)))
        return at_files if len(at_files) < world_size or world_size == 1 else []
    waits: dict[int, set[int]] = {rank: set() for rank in reports}
    for rank, one in reports.items():
        for axis, ranks in one["axes"].items():
            here = one["counts"].get(axis, 0)
            waits[rank].update(r for r in ranks if r in reports and reports[r]["counts"].get(axis, 0) < here)
    waited_for = set().union(*waits.values())
    return sorted(rank for rank in waited_for if not waits[rank]) or sorted(waited_for)


def _within(one: Report, section: str) -> list[Mapping[str, Any]]:
    """Where a rank's threads stand that are in a section."""
    return [at for at in (one, *one["beside"]) if at["section"] == section]


def headline(overdue: Overdue, limit: str) -> str:
    """What has taken how long. limit: where its limit is from, "" for one that was learned."""
    what = f"{overdue.name} {overdue.detail}".strip()
    if not overdue.limit:
        limit = "and another rank has given the alarm"
    limit = limit or f"{overdue.limit:g} s would be unusual"
    return f"megapar watchdog: {what} has taken {overdue.seconds:.1f} s, {limit}."


def explain(reports: Mapping[int, Report], world_size: int, overdue: Overdue, limit: str) -> str:
    """The report for people. limit: as ``headline`` takes it."""
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
        lines.append("  no rank stands out: look at the disk and the network")
    elif not late and world_size > 1:
        lines.append("  no rank is behind: all have launched the same collectives; look at the network or the device")
    same: dict[str, list[int]] = {}
    for rank, one in sorted(reports.items()):
        if rank not in late:
            same.setdefault(place(one, overdue.name), []).append(rank)
    for where, ranks in list(same.items())[: 2 * SHOWN]:
        lines.append(f"  waiting: ranks {', '.join(map(str, ranks[:16]))}{' ...' * (len(ranks) > 16)} {where}")
    return "\n".join(lines)


def place(one: Report, section: str = "") -> str:
    """Where a rank stands: its thread that is in the section, and of several one that waits for nobody."""
    at = min(_within(one, section) or [one], key=lambda each: bool(each["waits"]))
    where = f"between steps, after {one['iteration']}"
    if at["section"]:
        where = f"in {at['section']} {at['detail']}".rstrip()
    file = f"; file {at['file']}" if at["file"] else ""
    last = f"; last collective: {one['last']}" if one["last"] and at is one else ""
    return f"{where}, at {at['line']}{file}{last}"
