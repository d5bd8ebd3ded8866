"""Units of bytes and of parameter counts, and the type of a JSON value."""

from __future__ import annotations

from typing import Any, TypeAlias

Json: TypeAlias = Any
MEGABYTE = 2**20
GIBIBYTE = 2**30


def billions(count: int) -> str:
    """Format a number of parameters or tokens for people: in billions from 0.1 B to 10,000 B, a small one in digits."""
    for least, unit, letter in ((9.9995e12, 1e12, "T"), (1e8, 1e9, "B"), (1e5, 1e6, "M")):
        if count >= least:
            return f"{count / unit:.4g} {letter}"
    return f"{count:,}"


def clock_text(seconds: float) -> str:
    """Format seconds as ``0:05``, ``1:02:03`` or ``3 d 04:05:06``."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour:02}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"
