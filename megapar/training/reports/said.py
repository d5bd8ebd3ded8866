"""What all ranks have to say is said by one of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist

from megapar.config.launched import RANK_FILE, starts_before

_AGENT = "TORCHELASTIC_USE_AGENT_STORE"  # torch's agent sets it where its own store outlives the ranks
_PATIENCE = timedelta(seconds=5)


def is_first_to_say(text: str, environ: Mapping[str, str]) -> bool:
    """Whether no other rank of this start has said the same: whichever comes first, as others may be ended before.

    environ: as torchrun sets it. Ranks whose store lies with rank 0 cannot ask, and all speak.
    """
    if int(environ.get("WORLD_SIZE", "1")) == 1 or environ.get(_AGENT) != "True":
        return True
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    try:
        store = _store(environ)
        return bool(store.add(f"megapar-said-{starts_before(environ)}-{key}", 1) == 1)
    except (KeyError, ValueError, OSError, RuntimeError):  # better twice than never
        return True


def _store(environ: Mapping[str, str]) -> dist.Store:
    if file := environ.get(RANK_FILE):
        return dist.FileStore(file)
    return dist.TCPStore(environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), is_master=False, timeout=_PATIENCE)
