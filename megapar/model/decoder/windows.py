"""Windows of a decoder's attention, as ``--window-size`` and ``--window-attn-skip-freq`` give them.

A window of w keys is a position's own and the w - 1 before it (``sliding_window`` of transformers). Megatron-LM gives
the keys before and after a position: its L,0 is a window of L + 1 keys.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from megapar.model.decoder.layer_pattern import listed_or_number, to_list_text

NONE = "none"
NO_FULL = "0"  # all layers have the window
_PAIR = re.compile(r"\(?\s*(-?\d+)\s*,\s*(-?\d+)\s*,?\s*\)?")


def to_window(text: str) -> int:
    """Return the keys of a window, 0 for none. Raises ValueError for another text."""
    text = text.strip()
    if text == NONE or text == "-1":
        return 0
    if pair := _PAIR.fullmatch(text):
        left, right = map(int, pair.groups())
        if left == -1 and right in (-1, 0):
            return 0
        if right != 0 or left < 0:
            raise ValueError(f"{text} has keys after a position, or not the key of the position")
        return left + 1
    if not text.isdigit() or not int(text):
        raise ValueError(f"{text[:20]!r} is not a number of at least 1")
    return int(text)


def window_or_none(text: str) -> int:
    """Return ``to_window``, and 0 for a wrong value, which another rule refuses."""
    try:
        return to_window(text)
    except ValueError:
        return 0


def window_text(window: int | None) -> str:
    """Return the value of --window-size for a window; 0 or None for none."""
    return str(window) if window else NONE


@lru_cache(maxsize=64)
def windowed_layers(text: str, num_layers: int) -> tuple[bool, ...]:
    """Return for each layer, and then for the block of multi-token prediction, whether it has the window.

    text: Value of --window-attn-skip-freq: N for full attention in layers N, 2 N, .., counted from 1, or lists of 1
    (window) and 0 (full). The block is like the last layer, unless a list has one number more. Raises ValueError for
    another text.
    """
    if text == NO_FULL:
        return (True,) * (num_layers + 1)
    value = listed_or_number(text)
    if isinstance(value, int):
        layers = [number % value > 0 for number in range(1, num_layers + 1)]
    else:
        layers = [value[number % len(value)] > 0 for number in range(num_layers)]
        if len(value) == num_layers + 1:
            return (*layers, value[-1] > 0)
    return (*layers, layers[-1])


def windowed_or_all(text: str, num_layers: int) -> tuple[bool, ...]:
    """Return ``windowed_layers``, and all of them for a wrong text, which another rule refuses."""
    try:
        return windowed_layers(text, num_layers)
    except ValueError:
        return (True,) * (num_layers + 1)


def skip_text(windowed: Sequence[bool]) -> str:
    """Return the shortest value of --window-attn-skip-freq for ``windowed_layers``."""
    *layers, block = windowed
    for text in (NO_FULL, *map(str, range(2, len(layers) + 1))):
        if windowed_layers(text, len(layers)) == tuple(windowed):
            return text
    return to_list_text([int(own) for own in (layers if block == layers[-1] else windowed)])
