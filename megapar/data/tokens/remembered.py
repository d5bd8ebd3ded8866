"""Facts that reading a whole file has shown once, kept in the cache by the file's path, size and time of change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megapar.data.tokens.cache import digest, known, made_once


class Unread(Exception):
    """Raised for a value that needs reading, where nothing may be read. bytes: how much there is to read."""

    def __init__(self, size: int) -> None:
        super().__init__(f"{size} bytes are not read")
        self.bytes = size


def remembered(path: Path, make: Callable[[], str], *kind: str, may_read: bool = True) -> str:
    """``make()`` of the file as it is now, or as it was when it had this size and time of change.

    kind: what is made, where a file has several. may_read: otherwise Unread is raised for what the cache does not have.
    """
    status = path.stat()
    name = f"hashes/{digest(str(path.resolve()), str(status.st_size), str(status.st_mtime_ns), *kind)}"
    if not may_read and known(name) is None:
        raise Unread(status.st_size)

    def write(entry: Path) -> None:
        entry.write_text(make(), encoding="utf-8")

    return made_once(name, write).read_text(encoding="utf-8")
