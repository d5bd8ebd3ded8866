"""Rotary positions by layer, as ``--window-rope`` and ``--no-rope-freq`` give them."""

from __future__ import annotations

import json
from functools import lru_cache

from megapar.model.decoder.layer_pattern import listed_or_number, to_list_text
from megapar.model.decoder.rope_keys import UNSCALED, lacking, object_of, rope_of
from megapar.model.decoder.windows import NO_FULL as ALL
from megapar.model.decoder.windows import skip_text, windowed_layers
from megapar.model.rope import Rope
from megapar.schema.legal_values import rope

SAME = "same"  # layers with a window have the rope of the others


def to_rope(text: str) -> Rope | None:
    """Return the rope of layers with a window, a base or an object; None: the others'. Raises ValueError."""
    if text == SAME:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, int | float):
        value = {"rope_theta": value}
    if not isinstance(value, dict):
        raise ValueError(f"{text[:40]!r} is neither {SAME}, a base, nor an object")
    if wanted := rope(value):
        raise ValueError(f"it must be {wanted}")
    if reason := lacking(value):
        raise ValueError(reason)
    return rope_of({"rope_parameters": value})


def rope_or_same(text: str) -> Rope | None:
    """Return ``to_rope``, and None for a wrong value, which another rule refuses."""
    try:
        return to_rope(text)
    except ValueError:
        return None


def rope_text(window_rope: Rope | None) -> str:
    """Return the shortest value of --window-rope for ``to_rope``."""
    if window_rope is None:
        return SAME
    parameters = object_of(window_rope)
    if parameters["rope_type"] != UNSCALED:
        return json.dumps(parameters, separators=(",", ":"))
    return json.dumps(int(window_rope.theta) if window_rope.theta.is_integer() else window_rope.theta)


@lru_cache(maxsize=64)
def roped_layers(text: str, num_layers: int) -> tuple[bool, ...]:
    """Return for each layer, and then for the block of multi-token prediction, whether it has rotary positions.

    text: Value of --no-rope-freq: N for none in layers N, 2 N, .., counted from 1, or lists of 1 (none) and 0, as
    ``windowed_layers``. Raises ValueError for another text.
    """
    layers = windowed_layers(text, num_layers)
    listed = text != ALL and not isinstance(listed_or_number(text), int)
    return tuple(not own for own in layers) if listed else layers


def roped_or_all(text: str, num_layers: int) -> tuple[bool, ...]:
    """Return ``roped_layers``, and all of them for a wrong text, which another rule refuses."""
    try:
        return roped_layers(text, num_layers)
    except ValueError:
        return (True,) * (num_layers + 1)


def no_rope_text(roped: tuple[bool, ...]) -> str:
    """Return the shortest value of --no-rope-freq for ``roped_layers``."""
    if not (text := skip_text(roped)).startswith("["):
        return text
    layers = roped[:-1] if roped[-1] == roped[-2] else roped
    return to_list_text([int(not own) for own in layers])
