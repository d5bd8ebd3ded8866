"""Placeholders ("marks") for values that a script does not contain."""

from __future__ import annotations

import re

BEGIN, END = "\ue000", "\ue001"  # private-use characters, which no script contains
_MARK = re.compile(f"{BEGIN}([^{END}]*){END}")


def mark(text: str) -> str:
    """Return the mark for an expression of the script, such as $1 or `date`."""
    return f"{BEGIN}{text}{END}"


def is_open(word: str) -> bool:
    """Return True if the word contains a mark."""
    return BEGIN in word


def as_written(word: str) -> str:
    """Return the word as the script has it, with expressions in place of their marks."""
    return _MARK.sub(lambda match: match[1], word)


def names(word: str) -> list[str]:
    """Return the expressions of all marks in a word."""
    return _MARK.findall(word)


def is_variable(word: str) -> bool:
    """Return True if the word is the mark of a variable and nothing else."""
    return re.fullmatch(rf"{BEGIN}\$\w+{END}", word) is not None


def marks(word: str) -> list[str]:
    """Return all marks in a word, including their delimiters."""
    return [match[0] for match in _MARK.finditer(word)]
