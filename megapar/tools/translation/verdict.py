"""What can become of another framework's argument, and how its tables are written."""

from __future__ import annotations

from dataclasses import dataclass

SAME, RENAMED, IMPLIED, UNNECESSARY, UNSUPPORTED = "same", "renamed", "implied", "unnecessary", "unsupported"
OTHER = "other numbers"  # it is known, and the run here computes something else
VERDICTS = (SAME, RENAMED, IMPLIED, UNNECESSARY, OTHER, UNSUPPORTED)


@dataclass(frozen=True)
class Foreign:
    """What becomes of an argument. ours: flags to write, with ``{value}``, or ``@`` and a function of ``decided``."""

    verdict: str
    ours: str = ""
    reason: str = ""


def rows(text: str, verdict: str) -> dict[str, Foreign]:
    """Lines ``names | ours | reason``, where several names may share a line."""
    found = {}
    for line in text.strip().splitlines():
        names, ours, reason = (part.strip() for part in line.split("|"))
        for name in names.split():
            found[name] = Foreign(verdict, ours, reason)
    return found
