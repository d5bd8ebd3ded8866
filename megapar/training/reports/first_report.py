"""Deduplication of errors: a message that several ranks would print is printed by the first one only."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from megapar.launch_environment import RANK_FILE, starts_before

_AGENT = "TORCHELASTIC_USE_AGENT_STORE"  # set by torch's agent if the store outlives the ranks
_PATIENCE = timedelta(seconds=5)


def is_first_to_report(text: str, environ: Mapping[str, str]) -> bool:
    """Return True for the first rank of this start that has to print a message.

    It is the first in time, not rank 0, because other ranks may be killed before they can print. If the store belongs
    to rank 0, it may be gone, and all ranks print. ``environ`` is as torchrun sets it.
    """
    if int(environ.get("WORLD_SIZE", "1")) == 1 or environ.get(_AGENT) != "True":
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
