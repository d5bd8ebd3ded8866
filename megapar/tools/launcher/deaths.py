"""The launcher's messages about failed ranks: which ranks failed first, and what happens next."""

from __future__ import annotations

import signal
from collections.abc import Mapping

from megapar.files.regular_file import read_json
from megapar.tools.launcher.failures import MOST_BYTES, REFUSED
from megapar.tools.launcher.warm import ending

SHOWN = 4


def describe(statuses: Mapping[int, int], notes: Mapping[int, str | None], then: str) -> str:
    """Return a sentence about the failed ranks; "" for a refusal that ends the job, because the rank explained it.

    Ranks that failed only because they lost another rank, or that the agent ended, are left out.

    Args:
        statuses: Global rank -> exit status of the failed ranks of this node; negative for signals.
        notes: Global rank -> file in which the rank recorded the reason, or None.
        then: The next action; "" if the job ends.
    """
    secondary = {rank for rank, status in statuses.items() if status == -signal.SIGTERM or _lost_peer(notes[rank])}
    primary = sorted(statuses.keys() - secondary)
    if not then and any(statuses[rank] == REFUSED for rank in primary):
        return ""
    if not primary:
        message = f"ranks {sorted(secondary)} of this node lost ranks of other nodes, or were stopped from outside"
        return message + (then and f"; {then}")
    parts = [f"rank {rank} {ending(statuses[rank])}" for rank in primary[:SHOWN]]
    if len(primary) > SHOWN:
        parts.append(f"{len(primary) - SHOWN} more failed")
    return ", ".join(parts) + (then and f"; {then}")


def next_action(maximum: int, left: int, *, job_ends: bool) -> str:
    """Return the action after a failure; "" if there is nothing to add.

    Args:
        maximum: Restarts that the job may have.
        left: Restarts that are left, including the one that starts now.
        job_ends: The job ends for another reason.
    """
    if left:
        return f"restarting, {maximum - left + 1} of {maximum}"
    return f"no restarts left of {maximum}" if maximum and not job_ends else ""


def _lost_peer(note: str | None) -> bool:
    """Return True if the rank recorded that it failed because it lost another rank."""
    try:
        return bool(read_json(note or "", MOST_BYTES)["lost"])
    except (OSError, ValueError, KeyError):
        return False
