"""Facts in a checkpoint's small files, read without torch so that a refusal is immediate."""

from __future__ import annotations

import json
from typing import Any

from megapar.files.checkpoint_names import LAYOUT_FILE, SCALARS_FILE, newest_name, parse_checkpoint_name, read_latest
from megapar.files.location import Location, Place, at
from megapar.files.suspects import suspects

MAX_BYTES = 1 << 20
MAX_SCALARS_BYTES = 1 << 24  # they list the data: some 180 bytes per source, for every phase with different data


def stored_facts(root: Place, iteration: int | None = None) -> tuple[Location, dict[str, Any]] | None:
    """Return (folder, the model's facts in ``layout.json``) of an iteration, or of the latest one under ``root``.

    Returns None if they cannot be read; the loader reports the problem with the checkpoint.
    """
    try:
        named = (read_latest(root) or ("", 0))[0] if iteration is None else newest_name(root, iteration)
        if not parse_checkpoint_name(named):
            return None
        folder = at(root) / named
        if iteration is not None and not folder.list():
            folder = suspects(root).get(iteration, folder)
        head = (folder / LAYOUT_FILE).head(MAX_BYTES).split(b"\n", 4)
        text = next(line for line in head if line.startswith(b'"model": '))
        facts = json.loads(text.partition(b": ")[2].rstrip(b","))
    except (OSError, ValueError, RecursionError, StopIteration):
        return None
    return (folder, facts) if isinstance(facts, dict) else None


def _plain(schedule: Any) -> Any:
    """Return a schedule, or None if it has values other than numbers and strings, which no run has written."""
    values = schedule.values() if isinstance(schedule, dict) else ()
    return schedule if all(value is None or isinstance(value, (int, float, str)) for value in values) else None


def stored_schedule(folder: Place) -> dict[str, Any] | None:
    """Return the learning rate schedule of a checkpoint, or None if it has none, as converted checkpoints."""
    schedule = _plain(stored_scalars(folder).get("schedule"))
    return (schedule or None) if isinstance(schedule, dict) else None


def stored_scalars(folder: Place) -> dict[str, Any]:
    """Return the content of a checkpoint's ``scalars.json``, unverified; {} if it cannot be read."""
    try:
        return (at(folder) / SCALARS_FILE).json(MAX_SCALARS_BYTES)
    except (OSError, ValueError):
        return {}
