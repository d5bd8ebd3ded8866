"""Paths that users write and runs derive: similar existing ones, URLs, names of jobs as folders, files of metrics."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from urllib.parse import quote

from megapar.schema.rule import either

METRICS = "metrics.jsonl"  # the default metrics file, in the folder of ``--save``

EXPERTS = ".experts.jsonl"  # replaces the suffix of the metrics file for the experts' load

REMOTE = "only checkpoints, exports and data lie in object stores; other paths are those of mounted file systems"
MOUNT = "Mount the store as a file system, or write to a disk and copy afterwards (docs/launch.md#object-stores)."
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_MOST_NAMES = 2000  # of a folder that are compared with a missing name
_MOST_LETTERS = 200  # with a suffix of its user, still a legal file name


def near_path(path: str, named: Collection[str] = ()) -> str:
    """Suggest existing paths similar to a missing one. ``named``: words that are legal in place of a path."""
    missing = Path(path)
    while not missing.parent.exists():
        missing = missing.parent
    try:
        names = sorted(entry.name for entry in islice(missing.parent.iterdir(), _MOST_NAMES))
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


def is_url(text: str) -> bool:
    """Return True for ``scheme://...``, which a file system would take for a folder named ``scheme:``."""
    return _URL.match(text) is not None


def path_part(name: str) -> str:
    """Return a name of any characters as one component of a path: never empty, ``.``, ``..`` or too long."""
    part = quote(name, safe="", errors="surrogateescape")
    if not part.strip("."):
        return part.replace(".", "%2E") or "%"
    if len(part) <= _MOST_LETTERS:
        return part
    digest = hashlib.sha256(part.encode()).hexdigest()[:16]
    return f"{part[:_MOST_LETTERS]}-{digest}"
