"""Ranks that end because another one has gone: one line each, as their own tracebacks hide the one that counts."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping

import torch.distributed as dist

_SIGNS = (
    "onnection closed by peer",
    "onnection reset by peer",
    "roken pipe",
    "remote process exited",
    "ncclRemoteError",
)
_HEAD = re.compile(r"^(\[\S+/[\w.]+:\d+\] )+")


def lost_another(error: BaseException) -> bool:
    """Whether an exception says that the connection to another rank has ended from the other side."""
    if not isinstance(error, RuntimeError | dist.DistError | ConnectionError):
        return False
    return any(sign in str(error) for sign in _SIGNS)


def reported(error: BaseException, environ: Mapping[str, str]) -> bool:
    """Say it in one line where it is such an exception, of one of several ranks; whether it was."""
    if int(environ.get("WORLD_SIZE", "1")) == 1 or not lost_another(error):
        return False
    reason = _HEAD.sub("", str(error).splitlines()[0]).partition(". ")[0]
    sys.stderr.write(f"rank {environ.get('RANK', '0')}: another rank is gone, what it says counts ({reason})\n")
    return True
