"""Rows of arguments that change something only with some values, or only beside others."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megapar.config.values import FALSE
from megapar.tools.translation.verdict import UNNECESSARY, Foreign

Function = Callable[[str, Mapping[str, str]], tuple[str, str, str]]


def off(value: str) -> bool:
    """Whether a switch with this value is off; one that stands alone is on."""
    return value.lower() in (*FALSE, "none", "null")


def unless(text: str, verdict: str) -> tuple[dict[str, Foreign], dict[str, Function]]:
    """(rows, their functions) of lines ``names | values that change nothing | beside | reason``.

    values: words; a number is equal to every way of writing it, and what is off to every way of saying so. beside:
    arguments one of which must be given and on for these to mean anything.
    """
    rows: dict[str, Foreign] = {}
    functions: dict[str, Function] = {}
    for line in text.strip().splitlines():
        names, values, beside, reason = (part.strip() for part in line.split("|"))
        for name in names.split():
            functions[f"unless {name}"] = _function(tuple(values.split()), tuple(beside.split()), verdict, reason)
            rows[name] = Foreign(verdict, f"@unless {name}", reason)
    return rows, functions


def _function(values: tuple[str, ...], beside: tuple[str, ...], verdict: str, reason: str) -> Function:
    def decide(value: str, given: Mapping[str, str]) -> tuple[str, str, str]:
        if beside and not any(name in given and not off(given[name]) for name in beside):
            return UNNECESSARY, "", f"means nothing without --{beside[0]}"
        if off(value) or any(_equal(value, word) for word in values):
            return UNNECESSARY, "", "with this value nothing is different"
        return verdict, "", reason

    return decide


def _equal(value: str, word: str) -> bool:
    try:
        return float(value) == float(word)
    except ValueError:
        return value.lower() == word.lower()
