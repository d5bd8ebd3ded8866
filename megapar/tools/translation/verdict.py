"""Verdicts on the arguments of other frameworks, and parsers for the tables of arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SAME, RENAMED, IMPLIED, UNNECESSARY = "same", "renamed", "implied", "unnecessary"
UNSUPPORTED = "unsupported"  # speed, memory, logging: not available, and the numbers are the same without it
OTHER = "other numbers"  # the same model, trained differently
ANOTHER = "another model"  # a part of the model is not available
LEFT = "left to you"  # the script does not contain its value
UNKNOWN = "unknown"  # in no table: its effect is not known
VERDICTS = (SAME, RENAMED, IMPLIED, UNNECESSARY, UNSUPPORTED, OTHER, ANOTHER, LEFT, UNKNOWN)

# With one of these verdicts, the command is not the script's training.
CHANGING = (OTHER, ANOTHER, UNKNOWN)

Given = Mapping[str, str]
"""Arguments of a script: normalized name -> value."""
Decided = tuple[str, str, str]
"""The translation of one argument: verdict, megapar flags, reason."""


@dataclass(frozen=True)
class Foreign:
    """Table row for an argument of another framework.

    Attributes:
        verdict: One of ``VERDICTS``.
        ours: megapar flags to write, with ``{value}``; or ``@`` and the name of a function in ``functions``.
        reason: Explanation for the user.
        takes_value: The argument takes the word after it: its name ends in ``=`` in the table, or ``ours`` has the
            value. Otherwise it is a switch, or it is not known.
    """

    verdict: str
    ours: str = ""
    reason: str = ""
    takes_value: bool = False


def rows(text: str, verdict: str) -> dict[str, Foreign]:
    """Parse lines ``names | ours | reason``. Several names may share a line."""
    found: dict[str, Foreign] = {}
    for line in text.strip().splitlines():
        names, ours, reason = (part.strip() for part in line.split("|"))
        found |= named(names, verdict, ours, reason)
    return found


def named(names: str, verdict: str, ours: str, reason: str) -> dict[str, Foreign]:
    """Return one row for each of these names."""
    takes = "{value}" in ours
    return {name.rstrip("="): Foreign(verdict, ours, reason, takes or name[-1] == "=") for name in names.split()}


def defaults(text: str) -> dict[str, Foreign]:
    """Parse lines ``names | ours | reason``: the framework's default if a script has none of these names.

    The key of a row is all its names. ``ours`` contains flags to add, or ``@`` and the name of a function that is
    called with an empty value. It is empty if the framework has no default either: the user must set a value.
    """
    found = {}
    for line in text.strip().splitlines():
        names, ours, reason = (part.strip() for part in line.split("|"))
        found[" ".join(names.split())] = Foreign(RENAMED if ours else LEFT, ours, reason)
    return found
