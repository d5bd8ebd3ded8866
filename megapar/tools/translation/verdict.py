"""Verdicts on the arguments of other frameworks, and the parser of the tables of arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

SAME, RENAMED, IMPLIED, UNNECESSARY = "same", "renamed", "implied", "unnecessary"
UNSUPPORTED = "unsupported"  # speed, memory, logging: not available, and the numbers are the same without it
OTHER = "different results"  # the same model, trained differently
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
        ours: megapar flags to write, with ``{value}``; or ``@`` and the name of a function or the row's cases. ``@~``:
            the numbers of the training do not depend on it.
        takes_value: The argument takes the word after it: its name ends in ``=`` in the table, or ``ours`` has the
            value. Otherwise it is a switch, or it is not known.
    """

    verdict: str
    ours: str = ""
    reason: str = ""
    takes_value: bool = False


def table(text: str) -> dict[str, Foreign]:
    """Parse a table of arguments. Raises ValueError if an argument has two rows.

    Sections begin with a line ``[verdict]``. A row is ``names | ours | reason``: several names may share it, and one
    ends in ``=`` if the argument takes a value and ``ours`` does not show it. ``ours`` may also be ``@NAME`` of a
    function, a case ``@CONDITION: OURS else REASON`` (unnecessary otherwise; another verdict stands before the reason:
    ``else implied: REASON``), or empty, with a case of ``cases`` in each of the indented lines below. ``~`` in front:
    the numbers of the training do not depend on the argument.

    A section ``[verdict | reason]`` lists names alone. In a section ``[verdict unless]`` a row is ``names | values |
    requires | reason``: the verdict does not hold for these values, nor if it is off (every spelling counts), nor if
    none of the arguments that it requires is on.
    """
    found: dict[str, Foreign] = {}
    verdict = shared = ""
    for head, cells, cases in _lines(text):
        if head.startswith("["):
            verdict, shared = head.strip("[]"), "".join(cells).rstrip("]")
            continue
        if shared:
            ours, reason = "", shared
        elif verdict.endswith(" unless"):
            ours, reason = _unless(verdict.removesuffix(" unless"), *cells), cells[-1]
        else:
            ours, reason = _ours(cases, *cells)
        takes = "{value}" in ours and not ours.startswith("@")
        for name in head.split():
            if name.rstrip("=") in found:
                raise ValueError(f"{name} has two rows")
            row = Foreign(verdict.removesuffix(" unless"), ours, reason, takes or name[-1] == "=")
            found[name.rstrip("=")] = row
    return found


def defaults(text: str) -> dict[str, Foreign]:
    """Parse lines ``names | ours | reason``: the framework's default if a script has none of these names.

    The key of a row is all its names. ``ours`` contains flags to add, as in ``table``, or is ``= VALUE``: this value of
    the first name, translated by its row. It is empty if the framework has no default either: the user must set one.
    """
    found = {}
    for names, cells, cases in _lines(text):
        ours, reason = _ours(cases, *cells)
        found[" ".join(names.split())] = Foreign(RENAMED if ours else LEFT, ours, reason)
    return found


def _lines(text: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield (first cell, other cells, indented lines) of each row."""
    for row in re.split(r"\n(?! )", text.strip()):
        line, *cases = (" ".join(line.split()) for line in row.splitlines())
        head, *cells = map(str.strip, line.split("|"))
        yield head, cells, cases


def _ours(cases: Sequence[str], cell: str, reason: str = "") -> tuple[str, str]:
    """Return (ours, reason) of a row, with its cases one per line after ``@`` or ``@~``."""
    if cases:
        return f"@{cell}" + "\n".join(cases), reason
    if cell.startswith("@") and ": " in cell:
        case, _, text = cell.partition(" else ")
        lines = [f"{case} | {reason}" if reason else case]
        if text:
            verdict, _, explained = text.partition(": ")
            lines.append(f"else: {verdict} | {explained}" if verdict in VERDICTS else f"else: {UNNECESSARY} | {text}")
        return "\n".join(lines), ""
    return cell, reason


def _unless(verdict: str, values: str, requires: str, reason: str) -> str:
    cases = [f"not {requires} on: {UNNECESSARY} | no effect without --{requires.split()[0]}"] if requires else []
    cases += [f"{test}: {UNNECESSARY} | no effect with this value" for test in ("off", f"is {values}".strip())]
    return "@" + "\n".join([*cases, f"else: {verdict} | {reason}"])
