"""Which eighth of the big tables runs: ``CI_SHARE`` is its number, or ``all``, as without it.

``python -m tests.support.shares`` passes those of its lines on that are drawn.
"""

from __future__ import annotations

import os
import sys
import zlib

SHARES = 8


def share_of(name: str) -> int:
    """Return the share of a row by its name, which a row that is added beside it does not change."""
    return zlib.crc32(name.encode()) % SHARES


def is_drawn(name: str) -> bool:
    """Whether the row of this name runs."""
    asked = os.environ.get("CI_SHARE") or "all"
    return asked == "all" or share_of(name) == int(asked)


if __name__ == "__main__":
    sys.stdout.writelines(line for line in sys.stdin if is_drawn(line.strip()))
