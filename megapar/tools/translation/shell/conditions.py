"""Evaluation of a script's conditions without running anything."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence

from megapar.tools.translation import open_values

_NUMBERS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}
_UNARY = ("-z", "-n", "-v")
_FILES = ("-f", "-d", "-e", "-s", "-r", "-x", "-L", "-h")


def holds(words: Sequence[str]) -> bool | None:
    """Return True if ``[ words ]`` holds; None if it depends on something that the script does not contain.

    Files are assumed to exist, because scripts that check for a file usually continue only if it exists.
    """
    for joint, decided in (("||", True), ("-o", True), ("&&", False), ("-a", False)):
        if joint in words:
            place = len(words) - 1 - list(words)[::-1].index(joint)
            sides = [holds(words[:place]), holds(words[place + 1 :])]
            return decided if decided in sides else None if None in sides else not decided
    if words and words[0] == "!":
        inner = holds(words[1:])
        return None if inner is None else not inner
    if len(words) > 2 and words[0] == "(" and words[-1] == ")":
        return holds(words[1:-1])
    return _one(words)


def taken_as_empty(words: Sequence[str]) -> list[str]:
    """Return the unset variables that ``words`` compare."""
    compared = [word for before, word in zip(["", *words], words, strict=False) if before not in _UNARY]
    return [open_values.as_written(word) for word in compared if open_values.is_variable(word)]


def _one(words: Sequence[str]) -> bool | None:
    if len(words) == 2 and words[0] in _FILES:
        return True
    if len(words) == 2 and words[0] in _UNARY:
        empty = words[1] == "" or open_values.marks(words[1]) == [words[1]]  # an unset variable is empty
        return empty == (words[0] == "-z")
    words = ["" if open_values.is_variable(word) else word for word in words]
    if any(open_values.is_open(word) for word in words):
        return None
    if len(words) < 2:
        return bool(words and words[0])
    if len(words) != 3:
        return None
    left, operator, right = words
    if operator in _NUMBERS:
        try:
            return bool(_NUMBERS[operator](int(left), int(right)))
        except ValueError:
            return None
    if operator in ("=", "=="):
        return fnmatch.fnmatchcase(left, right)
    if operator == "!=":
        return not fnmatch.fnmatchcase(left, right)
    return None
