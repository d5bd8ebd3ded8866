"""The one reader of numbers in other frameworks' arguments, which Python's int and float read there."""

from __future__ import annotations

import math
from collections.abc import Mapping

from megapar.tools.translation import open_values


class NotANumberError(ValueError):
    """A value of the script that is not a number; the message contains it."""


def number(value: str, otherwise: float = 0.0) -> float:
    """Return a value as Python's int and float read it (9_765_625, 1e-5).

    Return ``otherwise`` if the value is empty or left open. Raises NotANumberError.
    """
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
