"""What ended this rank, beside the launcher's error file: how a failure that comes again is told from another one."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from megapar.config.launched import failure_file
from megapar.errors import DataError, DistributedError
from megapar.training.health.innocent import lost_another

# Another rank's, or of a machine that may be well again when the ranks are started anew.
_OF_OTHERS = (DistributedError, dist.DistError, OSError, KeyboardInterrupt, SystemExit)
_OF_LIBRARIES = ("gloo", "NCCL", "HCCL", "nccl", "hccl", "ProcessGroup", "onnection", "imed out", "CUDA", "NPU")


def note(
    error: BaseException, environ: Mapping[str, str], following: tuple[int, str] = (0, ""), *, saved: bool = False
) -> None:
    """Write it down once; what fails here fails in silence, as something else is being told.

    following: the step that was not done, 0 before the first one, and its samples, A-B. saved: whether this start has
    brought a checkpoint to disk.
    """
    path = failure_file(environ)
    if path is None:
        return
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    text = str(error)
    told = {
        "type": type(error).__name__,
        "where": where,
        "step": following[0],
        "saved": saved,
        "own": not isinstance(error, _OF_OTHERS)
        and not (isinstance(error, RuntimeError) and any(name in text for name in _OF_LIBRARIES)),
        "lost": lost_another(error),
        "samples": getattr(error, "samples", following[1] if isinstance(error, DataError) else ""),
        "at": time.time(),
    }
    with suppress(OSError), Path(path).open("x") as file:
        file.write(json.dumps(told))
