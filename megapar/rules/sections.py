"""Time limits of the sections of a run, set by ``--section-timeouts``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

SECTIONS = ("start-up", "load", "first-step", "step", "evaluation", "save", "log")
"""Sections of a run, in each of which it can hang. log: gathering and writing the records of steps."""


def section_limits(texts: Iterable[str], step_seconds: float = 0.0) -> dict[str, float]:
    """Return section -> seconds after which the run ends; sections without a limit are absent.

    Raises ValueError for a text that is not NAME=SECONDS, and for a repeated NAME.

    Args:
        texts: Texts ``NAME=SECONDS``.
        step_seconds: ``--step-timeout-seconds``, the limit of all steps, including the first, without a separate limit.
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
    """Return True if ``section_limits`` accepts the texts."""
    try:
        section_limits(texts)
    except ValueError:
        return False
    return True


def origin_of_limit(name: str, limits: Mapping[str, float], texts: Iterable[str]) -> str:
    """Return the flag that sets the limit of a section, for messages; "" if there is no limit."""
    if name not in limits:
        return ""
    named = {text.partition("=")[0].strip() for text in texts}
    by_step = name in ("step", "first-step") and not named & {name, "step"}
    flag = "--step-timeout-seconds is " if by_step else f"--section-timeouts has {name}="
    return f"{flag}{limits[name]:g}"
