"""Parts of a page that a script writes: what is between two comments that name the part."""

from __future__ import annotations

CLOSING = "<!-- end -->\n"


def opening(name: str) -> str:
    """Return the comment before the part ``name``; ``CLOSING`` is the one after it."""
    return f"<!-- {name} -->\n"


def part(page: str, name: str) -> str:
    """Return the text between the comments. Raises ValueError unless they are on the page, the first one once."""
    return _divided(page, name)[1]


def replaced(page: str, name: str, text: str) -> str:
    """Return the page with this text between the comments. Raises ValueError as ``part`` does."""
    before, _, after = _divided(page, name)
    return before + opening(name) + text.strip("\n") + "\n" + CLOSING + after


def _divided(page: str, name: str) -> tuple[str, str, str]:
    before, found, rest = page.partition(opening(name))
    text, closed, after = rest.partition(CLOSING)
    if not found or not closed or opening(name) in rest:
        raise ValueError(f"the page does not have the comments of {name!r} once")
    return before, text, after
