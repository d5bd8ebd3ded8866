"""Cases of a table's row: conditions on the value and on other arguments, each with its translation.

A case is ``CONDITION: OURS | REASON``; the first whose condition holds counts, and the last condition is ``else``. OURS
is a verdict, flags (``renamed``) or both: ``same --lr {value}``. Besides ``{value}``, its first word ``{word}`` and the
value of any other argument can be filled in. A condition is one or several, joined by ``and``, of:

===========================  ==========================================================================
``is WORDS``                 the value is one of them; numbers are compared as numbers, upper case is lower case
``has WORD``                 the value contains it
``above N``, ``below N``     the value is a number like this; also ``at least N``, ``at most N``, ``equals N``
``on``, ``off``              the value of a switch; a switch without a value is on
``alike``                    the value has words, all equal
``with NAMES``               one of these arguments is given; ``without NAMES``: none
``NAMES [or USUAL] is ..``   the same of the first of these arguments that is given; USUAL if none is
a fact in ``given``          such as ``latent``
``not ..``                   the opposite of any of these
===========================  ==========================================================================
"""

from __future__ import annotations

import math
import operator
import re
import shlex
from collections.abc import Callable, Mapping
from functools import cache
from inspect import isfunction, signature
from typing import Any

from megapar.tools.translation.given import FACTS, is_on, off
from megapar.tools.translation.number import NotANumberError, first, number
from megapar.tools.translation.verdict import RENAMED, VERDICTS, Decided, Given

Function = Callable[[str, Given], Decided]
_Holds = Callable[[str, Given], bool]
_TEST = re.compile(r"(?:^|(?<= ))(is|has|above|below|at most|at least|equals|on|off)(?: |$)")
_COMPARED: Mapping[str, Callable[[float, float], bool]] = {
    "above": operator.gt,
    "below": operator.lt,
    "at most": operator.le,
    "at least": operator.ge,
    "equals": operator.eq,
}


def collected(module: Mapping[str, Any], prefix: str = "") -> dict[str, Function]:
    """Return the functions of a module that translate an argument, by their names in tables.

    ``_steps`` is ``@steps``, or with a prefix ``@paddle_steps``.
    """
    return {
        prefix + name[1:]: found
        for name, found in module.items()
        if isfunction(found)
        and found.__module__ == module["__name__"]
        and list(signature(found).parameters) == ["value", "given"]
    }


@cache
def cases(text: str) -> Function:
    """Return the function of a row's cases, one per line. Raises ValueError if a condition cannot be read."""
    steps = []
    for line in text.splitlines():
        condition, _, outcome = line.strip().partition(": ")
        ours, _, reason = (part.strip() for part in outcome.partition("|"))
        verdict = next((word for word in VERDICTS if f"{ours} ".startswith(f"{word} ")), "")
        steps.append((_condition(condition), verdict or RENAMED, ours.removeprefix(verdict).strip(), reason))

    def decide(value: str, given: Given) -> Decided:
        verdict, ours, reason = next(step[1:] for step in steps if step[0](value, given))
        return verdict, _filled(ours, value, given).strip(), _filled(reason, value, given)

    return decide


def _filled(text: str, value: str, given: Given) -> str:
    """Fill in values. The name of the argument, ``{name}``, is filled in later."""
    known = {**given, "value": value, "word": value.partition(" ")[0], "name": "{name}"} if "{" in text else {}
    return re.sub(r"\{([\w-]+)\}", lambda found: known.get(found[1], ""), text)


def _condition(text: str) -> _Holds:
    parts = [_part(part) for part in text.split(" and ")]
    return lambda value, given: all(part(value, given) for part in parts)


def _part(text: str) -> _Holds:
    if text.startswith("not "):
        inner = _part(text[4:])
        return lambda value, given: not inner(value, given)
    kind, _, names = text.partition(" ")
    if text in FACTS:
        fact = FACTS[text]
        return lambda value, given: fact(given)
    if text == "else":
        return lambda value, given: True
    if text == "alike":
        return lambda value, given: len(set(value.split())) == 1
    if kind in ("with", "without"):
        return lambda value, given: (kind == "with") == any(name in given for name in names.split())
    test = _TEST.search(text)
    if test is None:
        raise ValueError(f"{text} cannot be read as a condition")
    subject, _, usual = f" {text[: test.start()]}".partition(" or ")
    return _tested(tuple(subject.split()), usual.strip(), test[1], shlex.split(text[test.end() :]))


def _tested(names: tuple[str, ...], usual: str, test: str, words: list[str]) -> _Holds:
    """Return a condition on the first given one of these arguments; without names, on the row's own value."""
    if test in ("on", "off"):
        return lambda value, given: (is_on(given, *names) if names else not off(value)) == (test == "on")
    if test in _COMPARED:
        compare, bounds, otherwise = _COMPARED[test], [float(word) for word in words], float(usual or 0)

        def compared(value: str, given: Given) -> bool:
            found = first(given, *names, otherwise=otherwise) if names else number(value, otherwise)
            return any(compare(found, bound) for bound in bounds)

        return compared

    def holds(value: str, given: Given) -> bool:
        if names:
            value = next((given[name] for name in names if name in given), usual)
        return any(_equal(value, word) if test == "is" else word in value.lower() for word in words)

    return holds


def _equal(value: str, word: str) -> bool:
    try:
        return value == word or number(value, math.nan) == number(word, math.nan)
    except NotANumberError:
        return value.lower() == word.lower()
