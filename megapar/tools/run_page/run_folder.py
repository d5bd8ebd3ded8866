"""The files of a run that a page is made of: metrics, facts, the experts' load and a profile."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from megapar.errors import Complaint, ConfigError
from megapar.files.regular_file import read_json
from megapar.schema.batch_size import BatchSize
from megapar.schema.phase_plan import PhaseSpan, parse_phases, plan_phases
from megapar.schema.rule import either

_MAX_JSON_BYTES = 1 << 30  # enough for a trace


class Restart(NamedTuple):
    """A start of a run other than its first one.

    Attributes:
        time: Its time in UTC, ISO 8601.
        layout: The sizes of the axes above 1, and the number of ranks.
        changed: The layout differs from that of the start before it.
    """

    iteration: int
    time: str
    layout: str
    changed: bool


@dataclass(frozen=True)
class RunFolder:
    """Files of a run, read.

    Attributes:
        name: Name of the run on the page.
        records: Its metrics, an object per iteration.
        facts: ``run.json``; empty if it is missing.
        experts: The experts' load, an object per iteration.
        trace: ``trace.json``; empty if no step was profiled.
    """

    name: str
    records: Sequence[Mapping[str, Any]]
    facts: Mapping[str, Any]
    experts: Sequence[Mapping[str, Any]]
    trace: Mapping[str, Any]

    @cached_property
    def restarts(self) -> tuple[Restart, ...]:
        """The starts after the first one, in order."""
        starts = self.facts.get("starts", [])
        layouts = [_layout(start) for start in starts]
        return tuple(
            Restart(int(start["iteration"]), str(start["time"]), layout, layout != before)
            for start, layout, before in zip(starts[1:], layouts[1:], layouts, strict=False)
        )

    @cached_property
    def phases(self) -> tuple[PhaseSpan, ...]:
        """The phases of the data after the first one, by the configuration of the last start."""
        given = {name: entry["value"] for name, entry in self.facts.get("configuration", {}).items()}
        if not given.get("data_phases"):
            return ()
        batch = BatchSize(given["global_batch_size"], *(given.get("rampup_batch_size") or ()))
        return plan_phases(parse_phases(given["data_phases"]), given["seq_length"], batch).spans[1:]

    @property
    def ended(self) -> bool:
        """Its last start has ended by itself, and was not killed."""
        return "end" in (self.facts.get("starts") or [{}])[-1]

    @property
    def marks(self) -> list[tuple[int, str]]:
        """The iterations that charts mark, and what begins there: ``resume``, ``layout`` or ``phase``."""
        starts = [(start.iteration, "layout" if start.changed else "resume") for start in self.restarts]
        return [*starts, *((span.first_step + 1, "phase") for span in self.phases)]


def read_run(folder: Path, name: str) -> RunFolder:
    """Read a run, of the folder or of the only one below it. Raises ConfigError if there are no metrics."""
    below = [path.parent for path in folder.glob("*/metrics.jsonl")]
    if len(below) == 1 and not any(folder.glob("*.jsonl")):
        folder = below[0]
    path, records = _metrics(folder)
    return RunFolder(
        name=name,
        records=records,
        facts=_object(folder / "run.json"),
        experts=_lines(path.with_name(path.stem + ".experts.jsonl")),
        trace=_object(folder / "trace.json"),
    )


def run_names(folders: Sequence[Path]) -> list[str]:
    """Return a name for each folder: its own, with as many of its parents' as it takes to tell the runs apart.

    A folder that is called checkpoints, as in ``--save runs/mine/checkpoints``, has the name of the one that it is in.
    """
    parts = [folder.resolve().parts for folder in folders]
    named = [part[:-1] if part[-1] == "checkpoints" else part for part in parts]
    parts = named if len(set(named)) == len(set(parts)) else parts
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(set(parts)):
            break
    return names


def _layout(start: Mapping[str, Any]) -> str:
    axes = ", ".join(f"{axis} {size}" for axis, size in start["grid"].items() if size > 1)
    ranks = f"{start['world_size']} rank{'s' if start['world_size'] > 1 else ''}"
    return f"{ranks}: {axes}" if axes else ranks


def _metrics(folder: Path) -> tuple[Path, list[dict[str, Any]]]:
    if not folder.is_dir():
        raise ConfigError([Complaint("run-folder", f"{folder} is not a folder.", "Pass the folder of a run.")])
    named = folder / "metrics.jsonl"
    files = [named] if named.is_file() else sorted(p for p in folder.glob("*.jsonl") if ".experts." not in p.name)
    for path in files:
        records = [record for record in _lines(path) if "iteration" in record]
        if records:
            return path, records
    message = f"{folder} contains no metrics: it has no .jsonl file with iterations."
    below = sorted({str(path.parent) for path in folder.glob("*/metrics.jsonl")})
    fix = f"Did you mean {either(below[:3])}?" if below else "Train with --metrics-jsonl FOLDER/metrics.jsonl."
    raise ConfigError([Complaint("run-folder", message, fix)])


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    records = []
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # damaged, or the incomplete last line of a killed run
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def _object(path: Path) -> dict[str, Any]:
    try:
        return read_json(path, _MAX_JSON_BYTES)
    except (OSError, ValueError):
        return {}
