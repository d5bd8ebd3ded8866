"""Failures that no restart goes past: refusals, and what comes again at the same step."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

MOST_BYTES = 10_000
REFUSED = 2


@dataclass(frozen=True)
class Failure:
    """What ended a rank, by its own exception. step: 0 before the first one. saved: whether the start that failed had
    brought a checkpoint to disk. samples: that can be stepped over, A-B, or "". at: seconds since the epoch.
    """

    type: str
    where: str
    step: int
    saved: bool
    samples: str
    at: float


def first_failure(files: Iterable[str]) -> Failure | None:
    """The earliest that ranks noted; None where none failed by itself, but by a signal or for want of another rank."""
    found = [failure for file in files if (failure := _read(file)) is not None]
    return min(found, key=lambda failure: failure.at, default=None)


def is_refusal(failures: Mapping[int, Any]) -> bool:
    """Whether ranks were refused: the earliest has that status, or was ended by the agent where another one has it.

    failures: torch's, by rank.
    """
    first = min(failures.values(), key=lambda failure: failure.timestamp)
    refused = any(failure.exitcode == REFUSED for failure in failures.values())
    return refused and first.exitcode in (REFUSED, -signal.SIGTERM)


def _read(file: str) -> Failure | None:
    try:
        with open(file, "rb") as opened:
            told = json.loads(opened.read(MOST_BYTES))
        if not told["own"]:
            return None
        name, where, samples = (str(told[key]) for key in ("type", "where", "samples"))
        return Failure(name, where, int(told["step"]), bool(told["saved"]), samples, float(told["at"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def again(before: Failure | None, now: Failure | None) -> str:
    """Why another start would fail as these two did, or ""."""
    if before is None or now is None or now.saved:
        return ""
    if (before.type, before.where, before.step) != (now.type, now.where, now.step):
        return ""
    when = f"at step {now.step}" if now.step else "before the first step"
    more = ""
    if now.samples:
        more = f" The same command with --skip-samples {now.samples} steps over the samples of that step."
    return f"{now.type} {when} again, at {now.where}, with no checkpoint in between: not started once more.{more}"
