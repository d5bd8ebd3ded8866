"""How long the sections of a run may take, as ``--section-timeouts`` says it. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

SECTIONS = ("start-up", "load", "first-step", "step", "evaluation", "save", "log")
"""What a run does, in which it can hang. log: bringing records of steps together, and writing them."""


def section_limits(texts: Iterable[str], step_seconds: float = 0.0) -> dict[str, float]:
    """Section -> seconds after which the run ends, of ``NAME=SECONDS`` each; sections without such a limit are not
    there.

    step_seconds: ``--step-timeout-seconds``, of every step, the first one included, that has no limit of its own.
    Raises ValueError.
    """
    given: dict[str, float] = {}
    for text in texts:
        name, equals, seconds = (part.strip() for part in text.partition("="))
        try:
            limit = float(seconds)
        except ValueError:
            limit = math.nan
        if not equals or name not in SECTIONS or not 0 <= limit < math.inf:
            raise ValueError(f"{text!r} is not NAME=SECONDS with a NAME of {', '.join(SECTIONS)}")
        if name in given:
            raise ValueError(f"{name} is given twice")
        given[name] = limit
    step = given.get("step", step_seconds)
    return {name: limit for name, limit in {"first-step": step, "step": step, **given}.items() if limit}


def is_section_limits(texts: Iterable[str]) -> bool:
    """Whether ``section_limits`` takes them."""
    try:
        section_limits(texts)
    except ValueError:
        return False
    return True


def origin_of_limit(name: str, limits: Mapping[str, float], texts: Iterable[str]) -> str:
    """Where the limit of a section is from, for people; "" where it has none."""
    if name not in limits:
        return ""
    named = {text.partition("=")[0].strip() for text in texts}
    by_step = name in ("step", "first-step") and not named & {name, "step"}
    flag = "--step-timeout-seconds is " if by_step else f"--section-timeouts has {name}="
    return f"{flag}{limits[name]:g}"
