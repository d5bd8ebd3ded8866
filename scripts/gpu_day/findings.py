"""Findings of a GPU day: one line of JSON each, written immediately."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

PART = "the part"  # the last finding of a part, about the part itself


@dataclass(frozen=True)
class Findings:
    """Append-only file of findings.

    A line contains part, what (unique in its part), ok (false: wrong; null: a figure, or not available here) and
    figures.

    Attributes:
        path: Path of the file.
        facts: Device, size and commit, added to every line.
    """

    path: Path
    facts: Mapping[str, Any]

    def record(self, part: str, what: str, ok: bool | None, **figures: Any) -> None:
        """Append a line, which is in the file when this returns."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        line = {"part": part, "what": what, "ok": ok, "date": now, **self.facts, **figures}
        text = (json.dumps(_plain(line)) + "\n").encode()
        place = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            # One call: lines of other processes do not interleave, and the line survives this process.
            os.write(place, text)
        finally:
            os.close(place)
        shown = {name: value for name, value in figures.items() if name != "traceback"}
        print(f"{_WORDS[ok]} {part}: {what} {json.dumps(_plain(shown))[:300]}", flush=True)

    def read(self) -> dict[tuple[str, str], dict[str, Any]]:
        """Return (part, what) -> its last line with this device, size and commit."""
        found = {}
        if self.path.exists():
            for text in self.path.read_text(encoding="utf-8").splitlines():
                try:
                    line = json.loads(text)
                except json.JSONDecodeError:
                    continue  # truncated by a crash
                if all(line.get(name) == value for name, value in self.facts.items()):
                    found[line["part"], line["what"]] = line
        return found


_WORDS = {True: "ok   ", False: "WRONG", None: "     "}


def _plain(value: Any) -> Any:
    """Convert a value for JSON, which does not support infinities and NaN."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
