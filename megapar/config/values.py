"""Conversion of text and YAML scalars to values of flags: types, choices, bounds, and ``~`` and ``$NAME`` in paths."""

from __future__ import annotations

import math
import os
import re
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megapar.config.hints import near_choice, plain_number
from megapar.files.data_files import split_name
from megapar.files.paths import is_url
from megapar.files.uri import DISK, masked
from megapar.schema.flag import Flag
from megapar.schema.legal_values import MAX_INT
from megapar.schema.phase_plan import NAME

_BITS = 1000  # a larger number is not printed in full: Python refuses to, or takes seconds


class _Short(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        """Return a whole number, or its approximate number of digits if it is very large."""
        if abs(x).bit_length() > _BITS:
            return f"a number of about {int(abs(x).bit_length() * 0.30103) + 1:,} digits"
        return super().repr_int(x, level)


_SHORT = _Short()
_SHORT.maxstring = _SHORT.maxother = 120
_SHORT.maxlong = 80
_SHORT.maxlevel = 3


def shown(value: Any) -> str:
    """Return ``repr`` of a value from JSON, YAML or the command line, shortened to some hundred characters."""
    return _SHORT.repr(value)


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
    if flag.form is not None:
        try:
            raw = flag.form(raw)
        except ValueError as error:
            raise BadValue("value", f"{flag.spelling}: {error}.") from None
    if flag.named and isinstance(raw, dict):
        raw = [_with_name(flag, name, path) for name, path in raw.items()]
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


def _with_name(flag: Flag, name: str, path: Any) -> str:
    if not NAME.fullmatch(name) or not isinstance(path, str):
        message = f"{flag.spelling} takes a path for each name, got {shown(name)}: {shown(path)}."
        raise BadValue("value", message, "A name has letters, digits, points, hyphens and underscores.")
    return f"{name}={path}"


def _list(flag: Flag, raw: Any) -> tuple[Any, ...]:
    items = list(raw) if isinstance(raw, (list, tuple)) else [raw]
    if flag.type == "integers" and isinstance(raw, str):
        items = raw.split()
    if flag.comma:
        items = [part.strip() for item in items for part in str(item).split(",") if part.strip()]
    kind = "int" if flag.type == "integers" else "str"
    values = tuple(_bounded(flag, _scalar(flag, item, kind)) for item in items)
    if flag.count and len(values) != flag.count:
        shown = " ".join(map(str, values)) or "none"
        raise BadValue("value", f"{flag.spelling} takes {flag.count} values, got {len(values)}: {shown}.")
    return values


def _scalar(flag: Flag, raw: Any, kind: str) -> Any:
    if isinstance(raw, (list, tuple, dict)) or raw is None:
        items = [str(item) for item in raw] if kind == "str" and isinstance(raw, list) else [""]
        fix = f'Put it in quotes: "[{",".join(items)}]".' if all(item.isdigit() for item in items) else ""
        raise BadValue("value", f"{flag.spelling} takes {wanted(flag)}, got {shown(raw)}.", fix)
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
        fix = plain_number(str(raw), flag.unit, whole=kind == "int")
        raise BadValue("value", f"{flag.spelling} takes {_TYPE_WORDS[kind]}{words}, got {shown(raw)}.", fix) from None


def _word_of(flag: Flag, raw: bool) -> str:
    """Return the choice that YAML has read as a boolean: it reads on, off, yes and no as true and false."""
    for choice in flag.choices or ():
        if str(choice).lower() in (TRUE if raw else FALSE):
            return str(choice)
    fix = "Leave the key out to turn it off, or put the string in quotes."
    raise BadValue("value", f"{flag.spelling} takes {_TYPE_WORDS['str']}, got {str(raw).lower()}.", fix)


def _chosen(flag: Flag, value: Any) -> Any:
    if not flag.choices:
        return value
    for choice in flag.choices:
        if value == choice or str(value).lower() == str(choice).lower():
            return choice
    texts = [str(choice) for choice in flag.choices]
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


_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|([A-Za-z_]\w*))")


def expanded(flag: Flag, value: Any, environ: Mapping[str, str]) -> Any:
    """Apply ``expand`` to a flag's path or tuple of paths. Raises BadValue with the flag's name."""
    try:
        if isinstance(value, tuple):
            if not value and any(flag.defaults.values()):
                raise BadValue("value", "is an empty list.", "Leave it out, or name a path.")
            return tuple(_expand_item(flag, path, environ) for path in value)
        return expand(value, environ)
    except BadValue as error:
        raise BadValue(error.rule, f"{flag.spelling} {error}", error.fix) from None


def _expand_item(flag: Flag, item: str, environ: Mapping[str, str]) -> str:
    name, path = split_name(item) if flag.named else ("", item)
    return f"{name}={expand(path, environ)}" if name else expand(path, environ)


def expand(path: str, environ: Mapping[str, str]) -> str:
    """Expand ``~``, ``$NAME`` and ``${NAME}``, looked up in ``environ`` and then in this process's environment.

    A path with an undefined variable that exists literally is returned unchanged. Raises BadValue for other undefined
    variables, and if the result is empty.
    """
    result = _expand(path, environ)
    if not result:
        raise BadValue(
            "value",
            f"is an empty text{f' ({path})' if path else ''}.",
            "Leave it out, or name a path; null unsets that of a file.",
        )
    return result


def _expand(path: str, environ: Mapping[str, str]) -> str:
    known = {**os.environ, **environ}
    missing = [name for pair in _VARIABLE.findall(path) for name in pair if name and name not in known]
    if missing and not Path(path).exists():
        fix = "Set it in the shell that starts the run, or write the path out."
        raise BadValue("undefined-variable", f"{path}: ${missing[0]} is not set in the environment.", fix)
    if missing:
        return path
    path = _VARIABLE.sub(lambda match: known[match[1] or match[2]], path).removeprefix(DISK)
    if (path == "~" or path.startswith("~/")) and "HOME" in known:
        return known["HOME"] + path[1:]
    return os.path.expanduser(path)


def remote_paths(flags: Mapping[str, Flag], values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the flags with a URL that take none, each with the first of them. Names of datasets may be anything."""
    urls = []
    for name, flag in flags.items():
        value = values.get(name) if flag.path and not flag.store and name != "hf_dataset" else None
        paths = value if isinstance(value, tuple) else (value,)
        texts = [path for path in paths if isinstance(path, str)]
        found = (path for path in texts if is_url(split_name(path)[1] if flag.named else path))
        urls += [f"{flag.spelling} {masked(path)}" for path in found][:1]
    return tuple(urls)
