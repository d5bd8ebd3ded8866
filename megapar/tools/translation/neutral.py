"""Table rows for arguments that have an effect only with some values, or only together with other arguments."""

from __future__ import annotations

from collections.abc import Callable

from megapar.config.values import FALSE
from megapar.tools.translation.number import NotANumberError, number
from megapar.tools.translation.verdict import UNNECESSARY, Decided, Foreign, Given, named

Function = Callable[[str, Given], Decided]


def off(value: str) -> bool:
    """Return True if a switch with this value is off. A switch without a value is on."""
    return value.lower() in (*FALSE, "none", "null")


def unless(text: str, verdict: str) -> tuple[dict[str, Foreign], dict[str, Function]]:
    """Parse lines ``names | neutral values | requires | reason`` into (rows, their functions).

    Args:
        text: The lines. A neutral value has no effect; numbers are compared as numbers, and every spelling of "off" is
            neutral. ``requires`` lists arguments of which one must be given and on for the row to have an effect.
        verdict: Verdict for the other values.
    """
    rows: dict[str, Foreign] = {}
    functions: dict[str, Function] = {}
    for line in text.strip().splitlines():
        names, values, requires, reason = (part.strip() for part in line.split("|"))
        for word in names.split():
            name = word.rstrip("=")
            functions[f"unless {name}"] = _function(tuple(values.split()), tuple(requires.split()), verdict, reason)
            rows |= named(word, verdict, f"@unless {name}", reason)
    return rows, functions


def _function(values: tuple[str, ...], requires: tuple[str, ...], verdict: str, reason: str) -> Function:
    def decide(value: str, given: Given) -> Decided:
        if requires and not any(name in given and not off(given[name]) for name in requires):
            return UNNECESSARY, "", f"no effect without --{requires[0]}"
        if off(value) or any(_equal(value, word) for word in values):
            return UNNECESSARY, "", "no effect with this value"
        return verdict, "", reason

    return decide


def _equal(value: str, word: str) -> bool:
    try:
        return value != "" and number(value) == number(word)
    except NotANumberError:
        return value.lower() == word.lower()
