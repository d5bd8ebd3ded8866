"""Values of a Paddle script, read as switches."""

from __future__ import annotations

from collections.abc import Mapping

from megapar.tools.translation.neutral import off

# Arguments that only ERNIE 4.5's trainer has. Its schedule and defaults differ from PaddleNLP's.
ERNIE_4_5 = ("moe-group", "base-seq-length", "moe-gate-lr-ratio", "moe-use-aux-free-update-coef", "use-sp-callback")


def is_on(given: Mapping[str, str], *names: str) -> bool:
    """Return True if one of these arguments is given and not off."""
    return any(name in given and not off(given[name]) for name in names)


def by_ernie_4_5(given: Mapping[str, str]) -> bool:
    """Return True if the arguments are for ERNIE 4.5's trainer."""
    return any(name in given for name in ERNIE_4_5)
