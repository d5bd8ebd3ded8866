"""What a launcher says when ranks have failed: which of them by themselves, and what comes now."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping

from megapar.tools.launcher.failures import MOST_BYTES
from megapar.tools.launcher.warm import ending

REFUSED = 2
SHOWN = 4


def describe(statuses: Mapping[int, int], notes: Mapping[int, str | None], then: str) -> str:
    """One sentence; "" for a refusal that ends the job, which the rank has explained.

    statuses: of the ranks of this node that failed, by global rank, negative for signals. notes: by rank, the file in
    which one notes what ended it. then: what comes now, "" for the end.
    """
    followed = {rank for rank, status in statuses.items() if status == -signal.SIGTERM or _lost_another(notes[rank])}
    own = sorted(statuses.keys() - followed)
    if not then and any(statuses[rank] == REFUSED for rank in own):
        return ""
    if not own:
        first = f"ranks {sorted(followed)} of this node lost ranks of other nodes, or were stopped from outside"
        return first + (then and f"; {then}")
    said = [f"rank {rank} {ending(statuses[rank])}" for rank in own[:SHOWN]]
    if len(own) > SHOWN:
        said.append(f"{len(own) - SHOWN} more failed")
    return ", ".join(said) + (then and f"; {then}")


def following(most: int, left: int, *, over: bool) -> str:
    """What comes after a failure. most, left: restarts. over: the job ends anyway."""
    if left:
        return f"starting again, {most - left + 1} of {most}"
    return f"no restart is left of {most}" if most and not over else ""


def _lost_another(note: str | None) -> bool:
    """Whether the rank noted that it failed for want of another one."""
    try:
        with open(note or "", "rb") as opened:
            return bool(json.loads(opened.read(MOST_BYTES))["lost"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
