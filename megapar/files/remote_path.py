"""Paths that are URLs, such as ``s3://bucket/a``, which are refused."""

from __future__ import annotations

import re

REMOTE = "paths are those of mounted file systems, and object stores are not built"
MOUNT = "Mount the store as a file system, or write to a disk and copy afterwards (docs/launch.md#disks)."
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def is_url(text: str) -> bool:
    """Return True for ``scheme://...``, which a file system would take for a folder named ``scheme:``."""
    return _URL.match(text) is not None
