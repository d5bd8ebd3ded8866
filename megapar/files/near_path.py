"""Suggestions for a path that does not exist."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

from megapar.schema.rule import either

MOST_NAMES = 2000
"""Maximum number of a folder's entries to compare with a missing name."""


def near_path(path: str, named: Collection[str] = ()) -> str:
    """Suggest existing paths similar to a missing one. ``named``: words that are legal in place of a path."""
    missing = Path(path)
    while not missing.parent.exists():
        missing = missing.parent
    try:
        names = sorted(entry.name for entry in islice(missing.parent.iterdir(), MOST_NAMES))
    except OSError:  # a file, or an unreadable folder
        names = []
    rest = Path(path).relative_to(missing)
    longer = [name for name in names if missing.name and name.startswith(missing.name)][:3]
    close = get_close_matches(missing.name, names, 3, 0.75) or longer
    near = [str(missing.parent / name / rest) for name in close]
    near = [other for other in near if Path(other).exists()] + get_close_matches(path, list(named), 1, 0.75)
    if near:
        return f"Did you mean {either(near)}?"
    return f"{missing.parent.absolute()} exists, but does not contain {missing.name!r}."
