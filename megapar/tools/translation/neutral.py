"""Table rows for arguments that have an effect only with some values, or only together with other arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import isfunction, signature
from typing import Any

from megapar.config.values import FALSE
from megapar.tools.translation.number import NotANumberError, number
from megapar.tools.translation.verdict import RENAMED, SAME, UNNECESSARY, Decided, Foreign, Given, named

Function = Callable[[str, Given], Decided]


def collected(module: Mapping[str, Any], prefix: str = "") -> dict[str, Function]:
    """Return the functions of a module that translate an argument, by their names in tables.

    ``_steps`` is ``@steps``, or with a prefix ``@paddle_steps``.
    """
    return {
        prefix + name[1:]: one
        for name, one in module.items()
        if isfunction(one)
        and one.__module__ == module["__name__"]
        and list(signature(one).parameters) == ["value", "given"]
    }


def case(cell: str) -> Function:
    """Return the function of a cell ``CONDITION: OURS else REASON``: without the condition the argument does nothing.

    A condition is ``above N``, of the value; ``on``, of a switch; or of another argument, ``with NAME``,
    ``with NAME=VALUE`` or ``without NAME=VALUE``. ``same`` in front of OURS: the flag is the argument itself. ``~`` in
    front of all: the numbers do not depend on it.
    """
    condition, rest = cell.removeprefix("~").split(": ", 1)
    ours, reason = map(str.strip, rest.split(" else ", 1))
    kind, _, word = condition.partition(" ")
    name, _, wanted = word.partition("=")
    verdict = SAME if ours.startswith("same ") else RENAMED
    ours = ours.removeprefix("same ")

    def decide(value: str, given: Given) -> Decided:
        if kind == "on":
            holds = not off(value)
        elif kind == "above":
            holds = number(value) > float(word)
        else:
            holds = (name in given and wanted in ("", given[name].lower())) == (kind == "with")
        # Not format: the name of the argument is filled in later.
        return (verdict, ours.replace("{value}", value), "") if holds else (UNNECESSARY, "", reason)

    return decide


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
