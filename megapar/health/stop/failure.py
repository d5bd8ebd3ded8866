"""The failure of a rank: what it prints, and the record from which the launcher recognizes repeated failures."""

from __future__ import annotations

import hashlib
import json
import re
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from megapar.errors import DataError, DistributedError, MegaparError
from megapar.launch_environment import RANK_FILE, failure_file, starts_before

WAITED = "waited for late ranks"  # what the watchdog of a rank records that is not late
_SIGNS = (
    "onnection closed by peer",
    "onnection reset by peer",
    "roken pipe",
    "remote process exited",
    "ncclRemoteError",
    WAITED,
)
_HEAD = re.compile(r"^(\[\S+/[\w.]+:\d+\] )+")
# Failures of other ranks, and failures of a machine that a restart may cure.
_OF_OTHERS = (DistributedError, dist.DistError, OSError, KeyboardInterrupt, SystemExit)
_OF_LIBRARIES = ("gloo", "NCCL", "HCCL", "nccl", "hccl", "ProcessGroup", "onnection", "imed out", "CUDA", "NPU")
_AGENT = "TORCHELASTIC_USE_AGENT_STORE"  # set by torch's agent if the store outlives the ranks
_PATIENCE = timedelta(seconds=5)


def report(error: BaseException, environ: Mapping[str, str]) -> int:
    """Record a failure of this rank, print it, and return the exit status. ``environ`` is as torchrun sets it.

    Of equal errors of several ranks the first is printed. A rank that fails because another one exited prints a line,
    so that the real traceback stays visible.
    """
    note(error, environ)
    if isinstance(error, MegaparError):
        prefix = f"rank {environ.get('RANK') or 0}: " if int(environ.get("WORLD_SIZE") or "1") > 1 else ""
        if is_first_to_report(str(error), environ):
            sys.stderr.write(f"{prefix}{type(error).__name__}: {error}\n")
        return error.exit_status
    if not report_lost_peer(error, environ):
        traceback.print_exception(error)
    return 1


def note(
    error: BaseException, environ: Mapping[str, str], following: tuple[int, str] = (0, ""), *, saved: bool = False
) -> None:
    """Write the record of a failure, once. Errors of the write are ignored, because another error is being handled.

    Args:
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


def is_lost_peer(error: BaseException) -> bool:
    """Return True if an exception means that another rank closed its connection."""
    if not isinstance(error, RuntimeError | dist.DistError | ConnectionError):
        return False
    return any(sign in str(error) for sign in _SIGNS)


def report_lost_peer(error: BaseException, environ: Mapping[str, str]) -> bool:
    """Print one line if another rank's exit caused the exception. Returns True in that case."""
    if int(environ.get("WORLD_SIZE") or "1") == 1 or not is_lost_peer(error):
        return False
    reason = _HEAD.sub("", str(error).splitlines()[0]).partition(". ")[0]
    sys.stderr.write(f"rank {environ.get('RANK') or 0}: another rank is gone, see its error ({reason})\n")
    return True


def is_first_to_report(text: str, environ: Mapping[str, str]) -> bool:
    """Return True for the first rank of this start that has to print a message.

    It is the first in time, not rank 0, because other ranks may be killed before they can print. If the store belongs
    to rank 0, it may be gone, and all ranks print.
    """
    if int(environ.get("WORLD_SIZE") or "1") == 1 or environ.get(_AGENT) != "True":
        return True
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    try:
        store = _store(environ)
        return bool(store.add(f"megapar-said-{starts_before(environ)}-{key}", 1) == 1)
    except (KeyError, ValueError, OSError, RuntimeError):  # printing twice is better than not at all
        return True


def _store(environ: Mapping[str, str]) -> dist.Store:
    if file := environ.get(RANK_FILE):
        if not Path(file).parent.is_dir():  # torch would wait for it for five minutes, with the interpreter lock
            raise FileNotFoundError(f"{file} is gone with its launcher")
        return dist.FileStore(file)
    return dist.TCPStore(environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), is_master=False, timeout=_PATIENCE)
