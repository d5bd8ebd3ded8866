"""Conversion of text and YAML scalars to values of flags, with checks of type, choices and bounds."""

from __future__ import annotations

import math
from typing import Any

from megapar.config.hints import near_choice, plain_number
from megapar.config.shown import shown
from megapar.schema.flag import SWITCH, Flag
from megapar.schema.legal_values import MAX_INT

TRUE = ("true", "on", "yes", "1")
FALSE = ("false", "off", "no", "0")

_TYPE_WORDS = {"int": "a whole number", "float": "a number", "str": "a string", "bool": "true or false"}


class BadValue(ValueError):
    """A flag does not accept a value.

    Attributes:
        rule: Check that failed.
        fix: Action to take; may be empty.
    """

    def __init__(self, rule: str, message: str, fix: str = "") -> None:
        super().__init__(message)
        self.rule = rule
        self.fix = fix


def convert(flag: Flag, raw: Any) -> Any:
    """Return the flag's value for ``raw``: a string, a YAML scalar or a list of them. Raises BadValue."""
    if flag.type in ("strings", "integers"):
        return _list(flag, raw)
    if flag.type == "bool":
        return _bool(flag, raw)
    if flag.type == "switch" and str(raw).lower() in TRUE + FALSE:
        return "on" if str(raw).lower() in TRUE else "off"
    value = _scalar(flag, raw, flag.type)
    return _bounded(flag, _chosen(flag, value))


def wanted(flag: Flag) -> str:
    """Describe the values that a flag accepts."""
    if flag.choices:
        return f"one of {', '.join(str(choice) for choice in flag.choices)}"
    if flag.takes_list:
        return "one or more whole numbers" if flag.type == "integers" else "one or more words"
    return _TYPE_WORDS["str" if flag.each else flag.type] + (f" ({flag.unit})" if flag.unit else "")


def _bool(flag: Flag, raw: Any) -> bool:
    if isinstance(raw, bool):
        return raw
    text = str(raw).lower()
    if text not in TRUE + FALSE:
        raise BadValue("value", f"{flag.spelling} takes true or false, got {shown(raw)}.")
    return text in TRUE


def _list(flag: Flag, raw: Any) -> tuple[Any, ...]:
    items = list(raw) if isinstance(raw, (list, tuple)) else [raw]
    if flag.type == "integers" and isinstance(raw, str):
        items = raw.split()
    if flag.comma:
        items = [part for item in items for part in str(item).split(",") if part]
    kind = "int" if flag.type == "integers" else "str"
    values = tuple(_bounded(flag, _scalar(flag, item, kind)) for item in items)
    if flag.count and len(values) != flag.count:
        raise BadValue("value", f"{flag.spelling} takes {flag.count} values, got {len(values)}: {_shown(values)}.")
    return values


def _shown(values: tuple[Any, ...]) -> str:
    return " ".join(str(value) for value in values) or "none"


def _scalar(flag: Flag, raw: Any, kind: str) -> Any:
    if isinstance(raw, (list, tuple, dict)) or raw is None:
        raise BadValue("value", f"{flag.spelling} takes {wanted(flag)}, got {shown(raw)}.")
    if kind in ("str", "switch"):
        if isinstance(raw, bool):
            return _word_of(flag, raw)
        return str(raw)
    if str(raw).lower() in flag.words:
        return flag.words[str(raw).lower()]
    try:
        if isinstance(raw, bool):
            raise ValueError
        number = float(raw)
        if kind == "float":
            if not math.isfinite(number):
                raise ValueError
            return number
        whole = int(raw) if isinstance(raw, int) or str(raw).lstrip("+-").isdigit() else int(number)
        if (not isinstance(raw, str) and whole != raw) or (whole != number and abs(number) < 2**53):
            raise ValueError
        return whole
    except (TypeError, ValueError, OverflowError):
        words = "".join(f" or {word}" for word in flag.words)
        fix = plain_number(str(raw), flag.unit)
        raise BadValue("value", f"{flag.spelling} takes {_TYPE_WORDS[kind]}{words}, got {shown(raw)}.", fix) from None


def _word_of(flag: Flag, raw: bool) -> str:
    """Return the choice that YAML has read as a boolean: it reads on, off, yes and no as true and false."""
    for choice in flag.choices or ():
        if str(choice).lower() in (TRUE if raw else FALSE):
            return str(choice)
    fix = "Leave the key out to turn it off, or put the string in quotes."
    raise BadValue("value", f"{flag.spelling} takes {_TYPE_WORDS['str']}, got {str(raw).lower()}.", fix)


def _chosen(flag: Flag, value: Any) -> Any:
    choices = flag.choices or (SWITCH if flag.type == "switch" else ())
    if not choices:
        return value
    for choice in choices:
        if value == choice or str(value).lower() == str(choice).lower():
            return choice
    texts = [str(choice) for choice in choices]
    fix = near_choice(str(value), texts)
    legal = ", ".join(texts)
    raise BadValue("choice", f"{flag.spelling} must be one of {legal}; got {shown(value)}.", fix)


def _bounded(flag: Flag, value: Any) -> Any:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return value
    if isinstance(value, int) and abs(value) > MAX_INT:
        raise BadValue("bound", f"{flag.spelling} must be below 2^63; got a number of {len(str(abs(value)))} digits.")
    if flag.low is not None and value < flag.low:
        raise BadValue("bound", f"{flag.spelling} must be at least {flag.low:g}; got {value}.")
    if flag.above is not None and value <= flag.above:
        raise BadValue("bound", f"{flag.spelling} must be greater than {flag.above:g}; got {value}.")
    if flag.high is not None and value > flag.high:
        raise BadValue("bound", f"{flag.spelling} must be at most {flag.high:g}; got {value}.")
    return value
