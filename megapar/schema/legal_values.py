"""Types and bounds of the settings in a published config.json. Standard library only.

The file comes from outside and holds anything that JSON can say, and Python's JSON allows more than that: NaN,
infinities, numbers of any length. A value that has passed its check is safe to calculate with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

MAX_INT = 2**63 - 1
"""The largest whole number that a size, a count or a seed can have: tensors keep them in 64 bits."""

Check = Callable[[Any], str]
"""Says in words which values are legal where the given one is not; "" where it is."""


def whole(low: int, *, optional: bool = False) -> Check:
    """A whole number, at least ``low``; with ``optional`` also null."""
    wanted = f"a whole number from {low} on" + (" or null" if optional else "")

    def check(value: Any) -> str:
        if value is None and optional:
            return ""
        good = isinstance(value, int) and not isinstance(value, bool) and low <= value <= MAX_INT
        # 4096.0 is written by tools that keep every number in double precision.
        good = good or (isinstance(value, float) and value.is_integer() and low <= value <= 2**53)
        return "" if good else wanted

    return check


def number(low: float, high: float = math.inf, *, above: bool = False, optional: bool = False) -> Check:
    """A finite number in the range; with ``above`` greater than ``low``, with ``optional`` also null."""
    range_ = f"from {low:g} to {high:g}" if high < math.inf else f"{'above' if above else 'from'} {low:g}"
    wanted = f"a number {range_}" + (" or null" if optional else "")

    def check(value: Any) -> str:
        if value is None and optional:
            return ""
        if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > 1e300 or value != value:
            return wanted
        return "" if (low < value if above else low <= value) and value <= high else wanted

    return check


def true_or_false(value: Any) -> str:
    """A JSON boolean or null, which is false."""
    return "" if value is None or isinstance(value, bool) else "true or false"


def text(value: Any) -> str:
    """A string or null."""
    return "" if value is None or isinstance(value, str) else "a text"


def rope(value: Any) -> str:
    """An object with the base and the type of rotary positions, or null."""
    if value is None:
        return ""
    if not isinstance(value, dict):
        return "an object or null"
    for name, check in (("rope_theta", THETA), ("rope_type", text), ("type", text)):
        if name in value and (wanted := check(value[name])):
            return f"an object whose {name} is {wanted}"
    return ""


def layer_numbers(value: Any) -> str:
    """A list of whole numbers from 0 on, or null."""
    good = value is None or (isinstance(value, list) and all(not whole(0)(layer) for layer in value))
    return "" if good else "a list of whole numbers"


def anything(value: Any) -> str:
    """Any value: the setting is written and not read."""
    return ""


SIZE, OPTIONAL_SIZE = whole(1), whole(1, optional=True)
COUNT, OPTIONAL_COUNT = whole(0), whole(0, optional=True)
PROBABILITY, OPTIONAL_PROBABILITY = number(0.0, 1.0), number(0.0, 1.0, optional=True)
EPSILON = number(0.0, 1.0)
THETA = number(0.0, above=True, optional=True)
