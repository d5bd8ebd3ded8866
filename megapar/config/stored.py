"""What a checkpoint's small files say of it. No torch: a refusal takes no second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megapar.config.latest_name import newest_of, of_name, read_latest
from megapar.config.suspects import suspects

MAX_BYTES = 1 << 20
LAYOUT, SCALARS = "layout.json", "scalars.json"


def stored_facts(root: Path, iteration: int | None = None) -> tuple[Path, dict[str, Any]] | None:
    """(folder, what ``layout.json`` says of the model) of an iteration, or of the latest checkpoint under ``root``.

    None where that is not to be had at a glance: whoever loads the checkpoint says what is wrong with it.
    """
    try:
        named = (read_latest(root) or ("", 0))[0] if iteration is None else newest_of(root, iteration)
        if not of_name(named):
            return None
        folder = root / named
        if iteration is not None and not folder.exists():
            folder = suspects(root).get(iteration, folder)
        with (folder / LAYOUT).open("rb") as file:
            head = file.read(MAX_BYTES).split(b"\n", 4)
        text = next(line for line in head if line.startswith(b'"model": '))
        facts = json.loads(text.partition(b": ")[2].rstrip(b","))
    except (OSError, ValueError, RecursionError, StopIteration):
        return None
    return (folder, facts) if isinstance(facts, dict) else None


def _plain(schedule: Any) -> Any:
    """None where a schedule holds what is neither a number nor a text: nothing that was trained on."""
    values = schedule.values() if isinstance(schedule, dict) else ()
    return schedule if all(value is None or isinstance(value, (int, float, str)) for value in values) else None


def stored_schedule(folder: Path) -> dict[str, Any] | None:
    """The learning-rate schedule that a checkpoint was trained on; None where it says none, as converted ones."""
    found = _plain(stored_scalars(folder).get("schedule"))
    return (found or None) if isinstance(found, dict) else None


def stored_scalars(folder: Path) -> dict[str, Any]:
    """What ``scalars.json`` of a checkpoint says, unverified; {} where that is not to be had at a glance."""
    try:
        with (folder / SCALARS).open("rb") as file:
            found = json.loads(file.read(MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
