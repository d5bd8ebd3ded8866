"""The record of a rank's failure, next to the launcher's error file: lets the launcher recognize repeated failures."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from megapar.errors import DataError, DistributedError
from megapar.health.stop.lost_peer import is_lost_peer
from megapar.launch_environment import failure_file

# Failures of other ranks, and failures of a machine that a restart may cure.
_OF_OTHERS = (DistributedError, dist.DistError, OSError, KeyboardInterrupt, SystemExit)
_OF_LIBRARIES = ("gloo", "NCCL", "HCCL", "nccl", "hccl", "ProcessGroup", "onnection", "imed out", "CUDA", "NPU")


def note(
    error: BaseException, environ: Mapping[str, str], following: tuple[int, str] = (0, ""), *, saved: bool = False
) -> None:
    """Write the record of a failure, once. Errors of the write are ignored, because another error is being handled.

    Args:
        error: The failure.
        environ: Environment of the process.
        following: The step that was not done (0 before the first one) and its samples as "first-last".
        saved: True if this start has written a checkpoint to disk.
    """
    path = failure_file(environ)
    if path is None:
        return
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    record = {
        "type": type(error).__name__,
        "where": where,
        "step": following[0],
        "saved": saved,
        "own": is_own(error),
        "lost": is_lost_peer(error),
        "samples": getattr(error, "samples", following[1] if isinstance(error, DataError) else ""),
        "at": time.time(),
    }
    with suppress(OSError), Path(path).open("x") as file:
        file.write(json.dumps(record))


def is_own(error: BaseException) -> bool:
    """Return True for a failure of this rank's program, as opposed to one of other ranks or of the machine."""
    of_library = isinstance(error, RuntimeError) and any(name in str(error) for name in _OF_LIBRARIES)
    return not isinstance(error, _OF_OTHERS) and not of_library
