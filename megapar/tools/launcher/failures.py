"""Failures that a restart does not cure: refusals, and errors that repeat at the same step."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megapar.files.regular_file import read_json

MOST_BYTES = 10_000
REFUSED = 2


@dataclass(frozen=True)
class Failure:
    """The exception that ended a rank.

    Attributes:
        type: Name of the exception's class.
        where: File and line that raised it.
        step: Training step; 0 before the first one.
        saved: The failed start had written a checkpoint to disk.
        samples: Samples that --skip-samples can skip, as A-B; "" for none.
        at: Time of the failure in seconds since the epoch.
    """

    type: str
    where: str
    step: int
    saved: bool
    samples: str
    at: float


def first_failure(files: Iterable[str]) -> Failure | None:
    """Return the earliest failure that ranks recorded; None if all were ended by signals or by the loss of a rank."""
    failures = [failure for file in files if (failure := _read(file)) is not None]
    return min(failures, key=lambda failure: failure.at, default=None)


def is_refusal(failures: Mapping[int, Any]) -> bool:
    """Return True if the run was refused.

    A rank must have the status of a refusal, and the earliest failure must be a refusal or the agent's SIGTERM.

    Args:
        failures: Rank -> torch's ProcessFailure.
    """
    first = min(failures.values(), key=lambda failure: failure.timestamp)
    refused = any(failure.exitcode == REFUSED for failure in failures.values())
    return refused and first.exitcode in (REFUSED, -signal.SIGTERM)


def _read(file: str) -> Failure | None:
    try:
        note = read_json(file, MOST_BYTES)
        if not note["own"]:
            return None
        name, where, samples = (str(note[key]) for key in ("type", "where", "samples"))
        return Failure(name, where, int(note["step"]), bool(note["saved"]), samples, float(note["at"]))
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None


def repeated(previous: Failure | None, current: Failure | None) -> str:
    """Return why another restart would fail in the same way; "" if the two failures differ or progress was saved."""
    if previous is None or current is None or current.saved:
        return ""
    if (previous.type, previous.where, previous.step) != (current.type, current.where, current.step):
        return ""
    when = f"at step {current.step}" if current.step else "before the first step"
    hint = ""
    if current.samples:
        hint = f" To skip the samples of that step, add --skip-samples {current.samples} to the same command."
    return (
        f"{current.type} {when} again, at {current.where}, with no checkpoint in between; the job is not restarted."
        f"{hint}"
    )
