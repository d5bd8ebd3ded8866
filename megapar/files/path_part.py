"""Names of jobs as names of folders."""

from __future__ import annotations

import hashlib
from urllib.parse import quote

MOST_LETTERS = 200  # with a suffix of its user, still a legal file name


def path_part(name: str) -> str:
    """Return a name of any characters as one component of a path: never empty, ``.``, ``..`` or too long."""
    part = quote(name, safe="", errors="surrogateescape")
    if not part.strip("."):
        return part.replace(".", "%2E") or "%"
    if len(part) <= MOST_LETTERS:
        return part
    digest = hashlib.sha256(part.encode()).hexdigest()[:16]
    return f"{part[:MOST_LETTERS]}-{digest}"
