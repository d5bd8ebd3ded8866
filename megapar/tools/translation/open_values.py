"""Marks that stand for values that a script does not hold."""

from __future__ import annotations

import re

BEGIN, END = "\ue000", "\ue001"  # private use: in no script
_MARK = re.compile(f"{BEGIN}([^{END}]*){END}")


def mark(said: str) -> str:
    """The mark of what a script calls ``said``, such as $1 or `date`."""
    return f"{BEGIN}{said}{END}"


def is_open(word: str) -> bool:
    """The word holds a mark."""
    return BEGIN in word


def said(word: str) -> str:
    """The word as the script has it."""
    return _MARK.sub(lambda found: found[1], word)


def names(word: str) -> list[str]:
    """What is open in a word."""
    return _MARK.findall(word)


def is_variable(word: str) -> bool:
    """The word is the mark of a variable and nothing else."""
    return re.fullmatch(rf"{BEGIN}\$\w+{END}", word) is not None


def marks(word: str) -> list[str]:
    """The marks in a word, whole."""
    return [found[0] for found in _MARK.finditer(word)]
