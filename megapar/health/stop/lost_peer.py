"""Ranks that fail because another rank exited: they print one line each, so that the real traceback stays visible."""

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


def is_lost_peer(error: BaseException) -> bool:
    """Return True if an exception means that another rank closed its connection."""
    if not isinstance(error, RuntimeError | dist.DistError | ConnectionError):
        return False
    return any(sign in str(error) for sign in _SIGNS)


def report_lost_peer(error: BaseException, environ: Mapping[str, str]) -> bool:
    """Print one line if another rank's exit caused the exception. Returns True in that case."""
    if int(environ.get("WORLD_SIZE", "1")) == 1 or not is_lost_peer(error):
        return False
    reason = _HEAD.sub("", str(error).splitlines()[0]).partition(". ")[0]
    sys.stderr.write(f"rank {environ.get('RANK', '0')}: another rank is gone, see its error ({reason})\n")
    return True
