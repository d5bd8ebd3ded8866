"""Types and bounds of the settings in a published config.json.

The file is untrusted input and may contain any JSON value, and Python's JSON also accepts NaN, infinities and numbers
of any length. A value that passes its check is safe to calculate with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

MAX_INT = 2**63 - 1  # largest size, count or seed: tensors store them in 64 bits

Check = Callable[[Any], str]
"""Returns a description of the legal values if the given one is not legal, else ""."""


MAX_LAYERS = 10_000
"""Maximum number of layers; each has entries in lists, so that more would fill the memory instead of being refused."""


def require_choice(field: str, value: str, legal: Iterable[str]) -> None:
    """Raise ValueError unless ``value`` is one of ``legal``: for direct callers, whom no rule refuses."""
    if value not in legal:
        raise ValueError(f"{field} is {value!r}; choose one of {', '.join(legal)}")


def whole(low: int, high: int = MAX_INT, *, optional: bool = False) -> Check:
    """Accept whole numbers from ``low`` to ``high``; with ``optional`` also null."""
    range_ = f"of at least {low}" if high == MAX_INT else f"from {low} to {high}"
    wanted = f"a whole number {range_}" + (" or null" if optional else "")

    def check(value: Any) -> str:
        if value is None and optional:
            return ""
        legal = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
        # Tools that store every number in double precision write 4096.0.
        legal = legal or (isinstance(value, float) and value.is_integer() and low <= value <= min(high, 2**53))
        return "" if legal else wanted

    return check


def number(low: float, high: float = math.inf, *, above: bool = False, optional: bool = False) -> Check:
    """Accept finite numbers in the range; with ``above`` not ``low`` itself, with ``optional`` also null."""
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
    """Accept a JSON boolean, or null, which means false."""
    return "" if value is None or isinstance(value, bool) else "true or false"


def text(value: Any) -> str:
    """Accept a string or null."""
    return "" if value is None or isinstance(value, str) else "a string"


def rope(value: Any) -> str:
    """Accept an object with the base, the type and the scaling of rotary positions, or null."""
    if value is None:
        return ""
    if not isinstance(value, dict):
        return "an object or null"
    for name, check in ROPE_PARTS.items():
        if name in value and (wanted := check(value[name])):
            return f"an object whose {name} is {wanted}"
    return ""


def rope_by_kind(value: Any) -> str:
    """Accept an object with ``rope`` of one or both kinds of layers, or null."""
    if value is None or not isinstance(value, dict):
        return "" if value is None else "an object or null"
    found = ((kind, rope(value[kind])) for kind in LAYER_KINDS if kind in value)
    return next((f"an object whose {kind} is {wanted}" for kind, wanted in found if wanted), "")


def layer_numbers(value: Any) -> str:
    """Accept a list of whole numbers of at least 0, or null."""
    legal = value is None or (isinstance(value, list) and all(not whole(0)(layer) for layer in value))
    return "" if legal else "a list of whole numbers"


def anything(value: Any) -> str:
    """Accept any value: the setting is written but not read."""
    return ""


LAYER_KINDS = FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of layers by their names in config.json: those that see all keys, and those with a window."""
SIZE, OPTIONAL_SIZE, LAYERS = whole(1), whole(1, optional=True), whole(1, MAX_LAYERS)
COUNT, OPTIONAL_COUNT = whole(0), whole(0, optional=True)
PROBABILITY, OPTIONAL_PROBABILITY = number(0.0, 1.0), number(0.0, 1.0, optional=True)
EPSILON = number(0.0, 1.0)
THETA = number(0.0, above=True, optional=True)
ROPE_PARTS: Mapping[str, Check] = {
    "rope_theta": THETA,
    "rope_type": text,
    "type": text,
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor", "attention_factor"), THETA),
    **dict.fromkeys(("beta_fast", "beta_slow", "mscale", "mscale_all_dim"), number(0.0, optional=True)),
    "original_max_position_embeddings": OPTIONAL_SIZE,
    "truncate": lambda value: "" if isinstance(value, bool) else "true or false",
    "partial_rotary_factor": number(0.0, 1.0, above=True, optional=True),
}
"""Checks of the parts of an object that describes rotary positions."""
POSITIVE = number(0.0, above=True)
