"""What a Paddle script says, as numbers and switches."""

from __future__ import annotations

from collections.abc import Mapping

from megapar.tools.translation.neutral import off

# Arguments that only ERNIE 4.5's own trainer has, whose schedule and defaults are not PaddleNLP's.
ERNIE_4_5 = ("moe-group", "base-seq-length", "moe-gate-lr-ratio", "moe-use-aux-free-update-coef", "use-sp-callback")


def number(value: str, otherwise: float = 0.0) -> float:
    """What a value says, or ``otherwise`` where that is no number."""
    try:
        return float(value)
    except ValueError:
        return otherwise


def first(given: Mapping[str, str], *names: str, otherwise: float = 0.0) -> float:
    """The number of the first of these that is given."""
    return next((number(given[name], otherwise) for name in names if name in given), otherwise)


def is_on(given: Mapping[str, str], *names: str) -> bool:
    """Whether one of these is given and not false."""
    return any(name in given and not off(given[name]) for name in names)


def by_ernie_4_5(given: Mapping[str, str]) -> bool:
    """Whether the arguments are for ERNIE 4.5's own trainer."""
    return any(name in given for name in ERNIE_4_5)
