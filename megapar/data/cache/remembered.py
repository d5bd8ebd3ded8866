"""Values computed once from a whole file, kept in the cache by the file's path, size and mtime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megapar.data.cache.cache import hash_parts, known, made_once


class Unread(Exception):
    """Raised if a value is not in the cache and its file may not be read.

    Attributes:
        bytes: Number of bytes to read.
    """

    def __init__(self, size: int) -> None:
        super().__init__(f"{size} bytes are not read")
        self.bytes = size


def remembered(path: Path, make: Callable[[], str], *kind: str, may_read: bool = True) -> str:
    """Return ``make()``, or the value remembered for a file of this path, size and mtime.

    ``kind`` tells several values of one file apart. Raises Unread if the cache does not have the value and ``may_read``
    is False.
    """
    status = path.stat()
    name = f"hashes/{hash_parts(str(path.resolve()), str(status.st_size), str(status.st_mtime_ns), *kind)}"
    if not may_read and known(name) is None:
        raise Unread(status.st_size)

    def write(entry: Path) -> None:
        entry.write_text(make(), encoding="utf-8")

    return made_once(name, write).read_text(encoding="utf-8")
