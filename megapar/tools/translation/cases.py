"""Cases of a table's row: conditions on the value and on other arguments, each with its translation.

A case is ``CONDITION: OURS | REASON``; the first whose condition holds counts, and the last condition is ``else``. OURS
is a verdict, flags (``renamed``) or both: ``same --lr {value}``. Besides ``{value}``, its first word ``{word}`` and the
value of any other argument can be filled in. A condition is one or several, joined by ``and``, of:

===========================  ==========================================================================
``is WORDS``                 the value is one of them; numbers are compared as numbers, upper case is lower case
``has WORD``                 the value contains it
``above N``, ``below N``     the number compared with N; also ``at least N``, ``at most N``, ``equals N``
``on``, ``off``              the value of a switch; a switch without a value is on
``alike``                    the value has words, all equal
``with NAMES``               one of these arguments is given; ``without NAMES``: none
``NAMES [or USUAL] is ..``   this condition on the first of these arguments given; on USUAL if none is
a name of ``FACTS``          such as ``latent``
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

from megapar.config.values import FALSE
from megapar.tools.translation import open_values
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
# Arguments that only ERNIE 4.5's trainer has. Its schedule and defaults differ from PaddleNLP's.
ERNIE_4_5 = ("moe-group", "base-seq-length", "moe-gate-lr-ratio", "moe-use-aux-free-update-coef", "use-sp-callback")


class NotANumberError(ValueError):
    """A value of the script that is not a number; the message contains it."""


def number(value: str, otherwise: float = 0.0) -> float:
    """Return a number as Python reads it (9_765_625, 1e-5), ``otherwise`` if empty or open. Raises NotANumberError."""
    if not value or open_values.is_open(value):
        return otherwise
    try:
        found = float(value)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise NotANumberError(f"{value} is not a number")
    return found


def whole(value: str) -> int | None:
    """Return a value as Python's int reads it; None if it is not a whole number."""
    try:
        return int(value)
    except ValueError:
        return None


def first(given: Mapping[str, str], *names: str, otherwise: float = 0.0) -> float:
    """Return the number of the first of these arguments that is given. Raises NotANumberError."""
    for name in names:
        if name in given:
            try:
                return number(given[name], otherwise)
            except NotANumberError as error:
                raise NotANumberError(f"--{name} {error}") from None
    return otherwise


def off(value: str) -> bool:
    """Return True if a switch with this value is off. A switch without a value is on."""
    return value.lower() in (*FALSE, "none", "null")


def is_on(given: Given, *names: str) -> bool:
    """Return True if one of these arguments is given and not off."""
    return any(name in given and not off(given[name]) for name in names)


# Megatron-LM and its extensions.


def is_latent(given: Given) -> bool:
    """Return True if the command's attention is multi-latent attention."""
    names = ("multi-latent-attention", "multi-head-latent-attention")
    return any(name in given and given[name].lower() not in ("false", "off", "0") for name in names)


def scaling(given: Given) -> str:
    """Return the formula by which a script scales RoPE, "" for none."""
    if "rope-scaling-type" in given:
        return given["rope-scaling-type"]
    if is_latent(given):
        return "yarn" if given.get("rope-type", "yarn") == "yarn" and scaling_factor(given) != 1 else ""
    if "use-rope-scaling" in given:
        return "llama3"
    return "linear" if first(given, "rotary-seq-len-interpolation-factor", otherwise=1.0) not in (0.0, 1.0) else ""


def scaling_factor(given: Given) -> float:
    """Return the factor of RoPE's scaling, 1 if it is not set."""
    names = (
        ("rope-scaling-factor", "yarn-scaling-factor") if "rope-scaling-type" in given else ("rotary-scaling-factor",)
    )
    return next((first(given, name, otherwise=1.0) for name in names if name in given), 1.0)


def _has_experts(given: Given) -> bool:
    counts = given.get("num-experts", given.get("num-moe-experts", "")).split()
    return bool(counts) and counts != ["1"]


def _holds_out(given: Given) -> bool:
    """Return True if some data are held out for evaluation."""
    if "mock-data" in given or "split" not in given:
        return True
    return sum([number(word) for word in given["split"].strip("'\"").split(",")][1:2]) > 0


# Paddle.


def by_ernie_4_5(given: Given) -> bool:
    """Return True if the arguments are for ERNIE 4.5's trainer."""
    return any(name in given for name in ERNIE_4_5)


FACTS: Mapping[str, Callable[[Given], bool]] = {
    "latent": is_latent,
    "scaled": lambda given: scaling(given) in ("llama3", "yarn"),
    "scaled by linear": lambda given: scaling(given) == "linear",
    "scaled by llama3": lambda given: scaling(given) == "llama3",
    "scaled by yarn": lambda given: scaling(given) == "yarn",
    "experts": _has_experts,
    "muon": lambda given: given.get("optimizer") in ("muon", "dist_muon", "adaptive_muon"),
    "gated": lambda given: is_on(given, "swiglu", "fused-swiglu", "geglu", "quick-geglu"),
    "balanced per sample": lambda given: (
        "seq-aux" in given or given.get("moe-router-load-balancing-type") == "seq_aux_loss"
    ),
    "limited": lambda given: any(name.endswith("capacity-factor") for name in given),
    "loss scaled": lambda given: given.get("fp16", "false").lower() not in ("false", "0"),
    "held out": _holds_out,
    "evaluated": lambda given: (
        first(given, "eval-iters", otherwise=100) > 0 and "eval-interval" in given and _holds_out(given)
    ),
    "ernie 4.5": by_ernie_4_5,
    "evaluated in paddle": lambda given: is_on(given, "do-eval") or given.get("evaluation-strategy", "no") == "steps",
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
