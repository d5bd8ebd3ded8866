"""What can become of another framework's argument, and how its tables are written."""

from __future__ import annotations

from dataclasses import dataclass

SAME, RENAMED, IMPLIED, UNNECESSARY = "same", "renamed", "implied", "unnecessary"
UNSUPPORTED = "unsupported"  # speed, memory, logging: not here, and the numbers are the same without it
OTHER = "other numbers"  # the same model, which the run here trains in another way
ANOTHER = "another model"  # a part of the model that is not here
LEFT = "left to you"  # its value is not to be had from the script
UNKNOWN = "unknown"  # in no table: nobody can say what it changes
VERDICTS = (SAME, RENAMED, IMPLIED, UNNECESSARY, UNSUPPORTED, OTHER, ANOTHER, LEFT, UNKNOWN)

# With one of these a command here is not the script's training.
CHANGING = (OTHER, ANOTHER, UNKNOWN)


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


def defaults(text: str) -> dict[str, Foreign]:
    """Lines ``names | ours | reason``: what a script means that has none of these names, keyed by all of them.

    ours: flags to add, or ``@`` and a function of ``decided``, which is called with an empty value; empty where the
    script must say it, and the person who starts the run has to.
    """
    found = {}
    for line in text.strip().splitlines():
        names, ours, reason = (part.strip() for part in line.split("|"))
        found[" ".join(names.split())] = Foreign(RENAMED if ours else LEFT, ours, reason)
    return found
